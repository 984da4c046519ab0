"""What a handoff costs: the same prompts with and without one, on a running decode node.

    pdserve prefill MODEL --port 9001 &
    pdserve decode MODEL --port 9002 --prefill 127.0.0.1:9001 &
    python bench/handoff.py --decode 127.0.0.1:9002 --prompts 256,1000,4000

Each prompt (random token ids) asks for two tokens, in turn through the prefill node and on the decode node alone. The
time of the first token then holds the prefill, that of the second the transfer as well. Reported are medians, in ms:
``ttft``, ``second`` (time from sending to the second token) and ``cost`` (the differences in ``second``), the last also
as a share of the prefill.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import sys
import time
from collections.abc import AsyncIterator

import grpc

from pdserve import rpc
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.records import SamplingParams
from pdserve.wire import pack_tokens, sampling_to_pb

SAMPLING = sampling_to_pb(SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))


class Client:
    """One router's stream to a decode node."""

    def __init__(self, stub: pb_grpc.DecodeNodeAsyncStub) -> None:
        self._requests: asyncio.Queue[pb.ServeRequest] = asyncio.Queue()
        self._outputs: grpc.aio.StreamStreamCall[pb.ServeRequest, pb.OutputBatch] = stub.Serve(self._send())
        self._number = 0

    async def _send(self) -> AsyncIterator[pb.ServeRequest]:
        while True:
            yield await self._requests.get()

    async def two_tokens(self, token_ids: list[int], prefill_node: str) -> tuple[float, float]:
        """Seconds until the first and the second token."""
        self._number += 1
        start = time.perf_counter()
        generate = pb.Generate(
            request=self._number,
            token_ids=pack_tokens(token_ids),
            sampling=SAMPLING,
            prefill_node=prefill_node,
        )
        self._requests.put_nowait(pb.ServeRequest(generate=generate))
        times: list[float] = []
        while len(times) < 2:
            batch = await self._outputs.read()
            if not isinstance(batch, pb.OutputBatch):
                raise RuntimeError("the decode node ended the stream")
            for output in batch.outputs:
                if output.HasField("failure"):
                    raise RuntimeError(output.failure.message)
                times += [time.perf_counter() - start] * output.has_token
        return times[0], times[1]


async def run(args: argparse.Namespace) -> list[dict[str, float]]:
    source = random.Random(args.seed)
    rows = []
    async with rpc.open_channel(args.decode) as channel:
        node = await pb_grpc.NodeStub(channel).Describe(pb.DescribeRequest())
        if not node.connected_peers:
            raise RuntimeError(f"decode node {args.decode} has no prefill node; start it with --prefill ADDR")
        client = Client(pb_grpc.DecodeNodeStub(channel))
        for length in args.prompts:
            taken: dict[str, list[tuple[float, float]]] = {"": [], node.connected_peers[0]: []}
            for turn in range(args.repeat + 1):
                for peer, times in taken.items():
                    prompt = source.choices(range(node.vocab_size), k=length)
                    pair = await client.two_tokens(prompt, peer)
                    if turn:  # the first of each warms up
                        times.append(pair)
            rows.append(summary(length, *taken.values()))
            print(json.dumps(rows[-1]), flush=True)
    return rows


def summary(length: int, without: list[tuple[float, float]], handed: list[tuple[float, float]]) -> dict[str, float]:
    def median_ms(pairs: list[tuple[float, float]], which: int) -> float:
        return statistics.median(pair[which] for pair in pairs) * 1e3

    prefill, second, second_handed = median_ms(without, 0), median_ms(without, 1), median_ms(handed, 1)
    return {
        "prompt_tokens": length,
        "ttft_ms": round(prefill, 2),
        "ttft_handoff_ms": round(median_ms(handed, 0), 2),
        "second_ms": round(second, 2),
        "second_handoff_ms": round(second_handed, 2),
        "cost_ms": round(second_handed - second, 2),
        "cost_share": round((second_handed - second) / prefill, 4),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--decode", required=True, metavar="ADDR")
    parser.add_argument("--prompts", type=lambda text: [int(n) for n in text.split(",")], default=[256, 1000, 4000])
    parser.add_argument("--repeat", type=int, default=9, help="counted prompts of each kind and length")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        asyncio.run(run(args))
    except (grpc.RpcError, RuntimeError) as exc:
        text = exc.details() if isinstance(exc, grpc.aio.AioRpcError) else exc
        print(f"handoff.py: {text}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
