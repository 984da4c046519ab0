"""CPU time of vLLM's HTTP server per streamed token, with an engine that only replays tokens.

    VLLM_PYTHON bench/vllm_http.py MODEL_DIR --streams 256 --tokens 400 --interval 0.0065

Run it in an environment with vLLM (tested with 0.32.0); it imports nothing of pdserve. vLLM's API server is complete:
HTTP, validation, detokenizing, server-sent events. Its engine core is replaced, in the same process, by a loop that
yields one token per request and interval, like the node of bench/router_stream.py. So vLLM does not pay for the socket
to its engine core. CPU time is that of the server process. Compare with bench/router_stream.py.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import time
from typing import Any


class ReplayCore:
    """Replaces vllm.v1.engine.core_client.AsyncMPClient."""

    def __init__(self, interval: float) -> None:
        self._interval = interval
        self._left: dict[str, int] = {}  # remaining tokens by request
        self._arrived = asyncio.Event()
        self._step = 0
        self.engine_ranks_managed = [0]
        self.resources = argparse.Namespace(engine_dead=False)

    async def add_request_async(self, request: Any) -> None:
        self._left[request.request_id] = request.sampling_params.max_tokens
        self._arrived.set()

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        for request_id in request_ids:
            self._left.pop(request_id, None)

    async def get_supported_tasks_async(self) -> tuple[str, ...]:
        return ("generate",)

    async def get_output_async(self) -> Any:
        from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs, FinishReason

        await asyncio.sleep(self._interval)
        while not self._left:
            self._arrived.clear()
            await self._arrived.wait()
        self._step += 1
        token_id = 300 + self._step % 3000
        outputs = []
        for request_id, left in list(self._left.items()):
            reason = FinishReason.LENGTH if left == 1 else None
            outputs.append(EngineCoreOutput(request_id, [token_id], finish_reason=reason))
            if left == 1:
                del self._left[request_id]
            else:
                self._left[request_id] = left - 1
        return EngineCoreOutputs(outputs=outputs)

    def shutdown(self, timeout: float | None = None) -> None:
        """Do nothing: there is no engine process."""

    def __getattr__(self, name: str) -> Any:
        """Return a coroutine function that does nothing for every other async method."""
        if name.endswith("_async"):

            async def nothing(*args: object, **kwargs: object) -> None:
                return None

            return nothing
        raise AttributeError(name)


def run_server(model: str, port: int, interval: float) -> None:
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.v1.engine.core_client import EngineCoreClient

    EngineCoreClient.make_async_mp_client = staticmethod(lambda **kwargs: ReplayCore(interval))
    sys.argv[1:] = ["--model", model, "--port", str(port), "--disable-log-stats", "--disable-uvicorn-access-log"]
    entry.main()


async def read_stream(port: int, num_tokens: int) -> int:
    """Read a stream to its end and return its bytes."""
    content = {"prompt": "hello", "max_tokens": num_tokens, "stream": True, "ignore_eos": True}
    body = json.dumps(content).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    size = 0
    while data := await reader.read(1 << 16):
        size += len(data)
    writer.close()
    return size


def cpu_seconds(pid: int) -> float:
    """Return the user + system time of a process so far, in seconds (proc(5))."""
    with open(f"/proc/{pid}/stat") as file:
        fields = file.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def measure(pid: int, port: int, streams: int, tokens: int) -> dict[str, float]:
    await read_stream(port, 8)  # warm-up
    before, started = cpu_seconds(pid), time.perf_counter()
    await asyncio.gather(*(read_stream(port, tokens) for _ in range(streams)))
    cpu, seconds = cpu_seconds(pid) - before, time.perf_counter() - started
    total = streams * tokens
    return {"streams": streams, "us_per_token": 1e6 * cpu / total, "tokens_per_s": total / seconds}


async def wait_for(port: int) -> None:
    while True:
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.5)
        else:
            writer.close()
            return


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0] if __doc__ else None)
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=400, help="per stream")
    parser.add_argument("--interval", type=float, default=0.0065, help="seconds between steps")
    parser.add_argument("--port", type=int, default=8377)
    parser.add_argument("--serve", action="store_true", help="run as the server")
    args = parser.parse_args()
    if args.serve:
        run_server(args.model, args.port, args.interval)
        return
    resource.setrlimit(resource.RLIMIT_NOFILE, (4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
    flags = ["--serve", "--port", str(args.port), "--interval", str(args.interval)]
    server = subprocess.Popen([sys.executable, __file__, args.model, *flags], stdout=subprocess.DEVNULL)
    try:
        asyncio.run(wait_for(args.port))
        result = asyncio.run(measure(server.pid, args.port, args.streams, args.tokens))
    finally:
        server.terminate()
        server.wait()
    print(json.dumps({name: round(value, 1) for name, value in result.items()}), flush=True)


if __name__ == "__main__":
    main()
