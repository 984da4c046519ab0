"""How long large bodies keep a router's event loop from other requests: uploads of images, all at once.

    python bench/body_uploads.py --bodies 8 --megabytes 50
    python bench/body_uploads.py --bodies 1 --megabytes 32 --max-body-bytes 32MiB

Needs the test dependencies (pip install -e '.[dev]'). A router takes chats with images of noise as PNG, and a
scripted node takes their pixels. A timer of 10 ms runs on the router's event loop (timed_router.py). Prints as JSON

    statuses      answers by HTTP status: 503 where all bodies together exceed their memory
    lag_ms        the longest delay of the timer: with waits for a CPU, and for threads that hold the interpreter
    cpu_ms        the most CPU time of the loop's thread between two runs of the timer, 10 ms apart
    held_ms       the longest delay less the time that the loop's thread waited for a CPU, as Linux counts it
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

from scripted_node import Conversation, ScriptedNode
from small_tokenizers import byte_level, write
from tokenizers import AddedToken

from pdserve.images import ImageInput
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import image_input_to_pb

SIDE = 1900  # pixels: a file of 10.8 MB
MODEL = "test-model"
PLACEHOLDER = "<|image_pad|>"
TEMPLATE = "{% for part in messages[0].content %}" + PLACEHOLDER + "{% endfor %}What is this?"
RESULT = "BODY_UPLOADS_RESULT"  # variable of the router's process: the file that it writes


class ImageNode(ScriptedNode, pb_grpc.ImageNodeServicer):
    """Takes pixels, and answers one token."""

    def __init__(self, token_id: int) -> None:
        super().__init__(MODEL, max_model_len=100_000, vocab_size=token_id + 1)
        accepted = ImageInput(token_id, 16, 2, 4 * 32**2, 256 * 32**2, bytes(32))
        self.description.images.CopyFrom(image_input_to_pb(accepted))
        self.scripts[""] = _one_token

    def add_services(self, server: grpc.aio.Server) -> None:
        super().add_services(server)
        pb_grpc.add_ImageNodeServicer_to_server(self, server)

    async def Put(self, request_iterator: AsyncIterator[pb.ImagePiece], context: object) -> pb.ImageStored:
        async for _ in request_iterator:
            pass
        return pb.ImageStored()


async def _one_token(conversation: Conversation) -> None:
    conversation.token(5, finish="stop")


def write_tokenizer(directory: Path) -> int:
    """Write a tokenizer with a template that shows images only; return the id of their placeholder."""
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(PLACEHOLDER, special=True, normalized=False)])
    write(directory, tokenizer, eos_token="<|im_end|>", chat_template=TEMPLATE)
    token_id = tokenizer.token_to_id(PLACEHOLDER)
    assert token_id is not None, "it has been added"
    return token_id


def body(megabytes: float, seed: int) -> bytes:
    """Return a chat with images of so many megabytes together."""
    rng = np.random.default_rng(seed)
    parts = []
    length = 0.0
    while length < 1e6 * megabytes - 2e5:
        side = min(SIDE, int(((1e6 * megabytes - length) / 4) ** 0.5))  # 3 bytes of a pixel are 4 of base64
        file = io.BytesIO()
        Image.fromarray(rng.integers(0, 256, (side, side, 3), np.uint8)).save(file, "PNG", compress_level=0)
        url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
        parts.append({"type": "image_url", "image_url": {"url": url}})
        length += len(url)
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": 1}).encode()


@contextmanager
def router(directory: Path, flags: list[str], result: Path) -> Iterator[str]:
    """Run a router with ``Timer``; yield its URL."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    script = Path(__file__).with_name("timed_router.py")
    argv = [sys.executable, str(script), str(directory), "--port", str(port), *flags]
    process = subprocess.Popen(argv, env={**os.environ, RESULT: str(result)})
    url = f"http://127.0.0.1:{port}"
    try:
        with httpx.Client(base_url=url, trust_env=False, verify=False, timeout=60) as client:
            while not _is_ready(client):
                time.sleep(0.1)
        yield url
    finally:
        process.terminate()
        process.wait()


def _is_ready(client: httpx.Client) -> bool:
    with suppress(httpx.HTTPError):
        return client.get("/health").status_code == 200
    return False


async def upload(url: str, bodies: list[bytes]) -> Counter[int]:
    """Send all bodies at once; return how many answers have which status."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, verify=False, timeout=600) as client:
        answers = await asyncio.gather(*(client.post("/v1/chat/completions", content=data) for data in bodies))
    for text in {answer.text for answer in answers if answer.status_code != 200}:
        print(text, file=sys.stderr)
    return Counter(answer.status_code for answer in answers)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bodies", type=int, default=8, metavar="N", help="at once (default %(default)s)")
    parser.add_argument("--megabytes", type=float, default=31.0, help="of a body (default %(default)s)")
    parser.add_argument("--max-body-bytes", default="64MiB", help="the router's (default %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        node = ImageNode(write_tokenizer(directory))
        result = directory / "result.json"
        flags = ["--decode", node.address, "--served-model-name", MODEL, "--max-body-bytes", args.max_body_bytes]
        bodies = [body(args.megabytes, seed) for seed in range(args.bodies)]
        with router(directory, flags, result) as url:
            result.write_text("{}")
            began = time.monotonic()
            statuses = asyncio.run(upload(url, bodies))
            seconds = time.monotonic() - began
            figures = json.loads(result.read_text())
        node.close()
    sizes = {"bodies": len(bodies), "bytes": len(bodies[0])}
    print(json.dumps({**sizes, "statuses": statuses, "seconds": round(seconds, 2), **figures}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
