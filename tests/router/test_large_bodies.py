"""Large bodies are bounded in memory and in work, and honest requests are served meanwhile."""

from __future__ import annotations

import asyncio
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from hypothesis import given
from hypothesis import strategies as st
from machine import patience
from router_process import RouterProcess, router_process, wait_for
from scripted_node import ScriptedNode
from starlette.types import Message

from pdserve.errors import Overloaded, RequestError
from router.http.endpoints import body_reader
from router.http.endpoints.body_reader import BODIES_IN_MEMORY, BodyReader
from router.metrics import RouterMetrics
from router.text import json_bounds
from router.text.json_bounds import SMALL_BYTES, check_json

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"
RESPONSES = "/v1/responses"


def chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "a"}], **fields}).encode()


def call(arguments: str) -> bytes:
    function = {"name": "f", "arguments": arguments}
    return chat(messages=[{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}])


TOOL = {"function": {"name": "f", "parameters": {"enum": ["x" * 9_000_000]}}}
LISTS = "[" + "[]," * 4_000_000 + "1]"  # decoded in 2 s at least
TAGS = {
    "type": "structural_tag",
    "structures": [{"begin": f"{i}<", "end": "a"} for i in range(3000)],
    "triggers": [f"{i}<" for i in reversed(range(3000))],
}
#: By name: path, a function that makes the body, and words of the error.
BODIES: dict[str, tuple[str, Callable[[], bytes], str]] = {
    "lists as a prompt": (COMPLETIONS, lambda: b'{"prompt":%b}' % LISTS.encode(), "more than 100000 objects, lists"),
    "token ids": (COMPLETIONS, lambda: b'{"prompt":[%b1]}' % (b"1," * 8_000_000), "more than 1148576 values"),
    "token ids to decode": ("/detokenize", lambda: b'{"tokens":[%b1]}' % (b"1," * 4_000_000), "more than 1148576"),
    "exponents": (COMPLETIONS, lambda: b'{"prompt":[%b1]}' % (b"1.7e308," * 1_000_000), "with an exponent"),
    "digits": (COMPLETIONS, lambda: b'{"prompt":[%b1]}' % ((b"1" * 4000 + b",") * 8000), "more than 100 digits"),
    "keys": (CHAT, lambda: chat(metadata=dict.fromkeys(map(str, range(1_000_000)))), "more than 100000 objects"),
    "duplicate keys": (CHAT, lambda: b'{%b"x":1}' % (b'"x":1,' * 4_000_000), "more than 100000 objects"),
    "lists in arguments": (CHAT, lambda: call(f'{{"a":{LISTS}}}'), "more than 100000 objects, lists"),
    "lists in a schema": (CHAT, lambda: chat(guided_json=f'{{"a":{LISTS}}}'), "the limit is 131072"),
    "lists in a tag": (CHAT, lambda: chat(structured_outputs={"structural_tag": LISTS}), "the limit is 131072"),
    "structural tags": (CHAT, lambda: chat(response_format=TAGS), "more than 128 structures"),
    "a long grammar": (CHAT, lambda: chat(guided_grammar='start: "a"' + ' "a"' * 5_000_000), "the limit is 131072"),
    "choices": (CHAT, lambda: chat(guided_choice=["c"] * 90_000), "the limit is 131072"),
    "tools": (CHAT, lambda: chat(tools=[TOOL], tool_choice="required"), "tools[0] (f): the grammar takes"),
    "items": (RESPONSES, lambda: json.dumps({"input": [{"role": "user"}] * 20_000}).encode(), "limit is 10000"),
    "a name": (CHAT, lambda: chat(**{"x" * 8_000_000: 1}), "unknown parameter xxx"),
    "a text": (COMPLETIONS, lambda: b'{"prompt":"%b"}' % (b"x" * 30_000_000), "bytes; the 1000"),
    "a message": (CHAT, lambda: chat(messages=[{"role": "user", "content": "x" * 30_000_000}]), "bytes; the 1000"),
    "an image": (
        CHAT,
        lambda: chat(messages=[{"role": "user", "content": [{"type": "image_url", "image_url": "A" * 20_000_000}]}]),
        "messages[0].content[0] is an image; the model reads text only",
    ),
    "a text to tokenize": ("/tokenize", lambda: b'{"prompt":"%b"}' % (b"word " * 1_400_000), "at most 1048576"),
}  # fmt: skip


@contextmanager
def longest_wait(url: str) -> Iterator[list[float]]:
    """Ask for /health again and again; at the end the list holds the longest wait in seconds."""
    longest = [0.0]
    ended = threading.Event()

    def ask() -> None:
        with httpx.Client(base_url=url, trust_env=False, timeout=patience(60)) as client:
            while not ended.wait(0.01):
                asked = time.monotonic()
                assert client.get("/health").status_code == 200
                longest[0] = max(longest[0], time.monotonic() - asked)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield longest
    finally:
        ended.set()
        thread.join()


@pytest.mark.parametrize("name", BODIES)
def test_costly_body_is_rejected_and_delays_no_other_client(
    router: RouterProcess, client: httpx.Client, name: str
) -> None:
    path, make, said = BODIES[name]
    data = make()
    with longest_wait(router.url) as wait:
        response = client.post(path, content=data)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]
    assert len(response.content) < 2000
    assert wait[0] < 1.0


signs = st.text(st.sampled_from('a\\",:[]{}eE'), max_size=9)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(-1e3, 1e3) | signs,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(signs, inner, max_size=4),
)


def size_of(value: Any) -> tuple[int, int]:
    """Return the numbers of objects, lists and keys, and of commas."""
    if not isinstance(value, list | dict):
        return 0, 0
    inner = [size_of(child) for child in (value if isinstance(value, list) else value.values())]
    keys = len(value) if isinstance(value, dict) else 0
    return 1 + keys + sum(items for items, _ in inner), max(0, len(value) - 1) + sum(commas for _, commas in inner)


@given(json_values, st.integers(2, 20), st.booleans())
def test_scan_counts_as_a_decoder_does(value: Any, piece_bytes: int, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only).encode()
    num_items, num_commas = size_of(value)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(json_bounds, "SMALL_BYTES", 0)
        patch.setattr(json_bounds, "_PIECE_BYTES", piece_bytes)
        patch.setattr(json_bounds, "MAX_ITEMS", num_items)
        check_json(data, num_commas - num_items)
        with pytest.raises(RequestError, match="values"):
            check_json(data, num_commas - num_items - 1)
        patch.setattr(json_bounds, "MAX_ITEMS", num_items - 1)
        with pytest.raises(RequestError, match="objects, lists and keys"):
            check_json(data, 10**6)


@pytest.mark.parametrize("tail", [b"\\", b'"\\', b'"' + b"\\" * 999, b'"', b""])
def test_scan_of_broken_text_ends(tail: bytes) -> None:
    check_json(b"[" + b" " * (2 * SMALL_BYTES) + tail, 0)


# ---------------------------------------------------------------- memory of unfinished bodies


MAX_BYTES = 4 * SMALL_BYTES
PART = b" " * (3 * SMALL_BYTES)


class Upload:
    """A body that a test sends part by part to a reader."""

    def __init__(self, reader: BodyReader) -> None:
        self._parts: asyncio.Queue[Message] = asyncio.Queue()
        self.result = asyncio.create_task(reader.read(self._parts.get, bytes))

    def send(self, data: bytes, more: bool = True) -> None:
        self._parts.put_nowait({"type": "http.request", "body": data, "more_body": more})


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def make_reader() -> BodyReader:
    return BodyReader(MAX_BYTES, lambda: 0, RouterMetrics())


def test_unfinished_bodies_share_a_budget() -> None:
    async def run() -> None:
        reader = make_reader()
        uploads = [Upload(reader) for _ in range(20)]
        for upload in uploads:
            upload.send(PART)
        await settle()
        refused = [upload for upload in uploads if upload.result.done()]
        assert len(uploads) - len(refused) == BODIES_IN_MEMORY * MAX_BYTES // len(PART)
        for upload in refused:
            with pytest.raises(Overloaded, match="unfinished request bodies hold") as raised:
                upload.result.result()
            assert raised.value.retry_after >= 1
        small = Upload(reader)
        small.send(b"{}", more=False)
        assert await small.result == b"{}"
        for upload in uploads:
            upload.result.cancel()
        await settle()
        large = Upload(reader)  # there is room again
        large.send(PART)
        large.send(b"", more=False)
        assert await large.result == PART

    asyncio.run(run())


def test_oldest_unfinished_body_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body_reader, "_PATIENCE", 0.0)

    async def run() -> None:
        reader = make_reader()
        uploads = [Upload(reader) for _ in range(BODIES_IN_MEMORY * MAX_BYTES // len(PART))]
        for upload in uploads:
            upload.send(PART)
        await settle()
        assert not any(upload.result.done() for upload in uploads)
        honest = Upload(reader)
        honest.send(PART)
        await settle()
        honest.send(b"", more=False)
        assert await honest.result == PART
        assert [upload.result.done() for upload in uploads] == [True] + [False] * (len(uploads) - 1)
        with pytest.raises(Overloaded):
            uploads[0].result.result()
        for upload in uploads[1:]:
            upload.result.cancel()
        await settle()

    asyncio.run(run())


def begin_upload(router: RouterProcess, num_bytes: int) -> socket.socket:
    """Send a part of a larger body. The router may refuse it."""
    host, _, port = router.url.removeprefix("http://").rpartition(":")
    sock = socket.create_connection((host, int(port)), timeout=patience(20))
    try:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n"
        sock.sendall(head % (2 * num_bytes) + b" " * num_bytes)
    except (ConnectionResetError, BrokenPipeError):
        pass
    return sock


def resident(process: psutil.Process) -> int:
    """MiB."""
    return int(process.memory_info().rss) >> 20


def test_endless_uploads_do_not_fill_the_memory(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    flags = ["--decode", scripted_node.address, "--max-body-bytes", "8MiB"]
    with router_process(tokenizer_dir, flags) as router, ExitStack() as stack:
        process = psutil.Process(router.process.pid)
        before = resident(process)
        for _ in range(60):
            stack.enter_context(begin_upload(router, 6 << 20))
        assert resident(process) < before + 100  # not 360
        assert httpx.get(f"{router.url}/health", trust_env=False).status_code == 200
        stack.close()
        wait_for(lambda: resident(process) < before + 60)


def test_memory_of_long_texts_is_given_back(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    text = "".join(random.Random(1).choices("qxzjkvw", k=1_000_000))  # about a token per character
    with router_process(tokenizer_dir, ["--decode", scripted_node.address]) as router, ThreadPoolExecutor(4) as pool:
        process = psutil.Process(router.process.pid)
        before = resident(process)

        def tokenize(_: int) -> int:
            answer = httpx.post(f"{router.url}/tokenize", json={"prompt": text}, timeout=patience(60), trust_env=False)
            return int(answer.json()["count"])

        assert min(pool.map(tokenize, range(4))) > 900_000
        wait_for(lambda: resident(process) < before + 100, 40.0)
