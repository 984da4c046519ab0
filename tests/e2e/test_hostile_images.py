"""Hostile images cost their sender a 4xx and nothing else: no process ends, and the streams of others go on."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import MODEL_NAME, Fleet
from hostile_images import ATTACKS, PHOTO
from image_checkpoints import make_image_checkpoint
from machine import patience

from pdserve.images import MAX_IMAGES

SIMULATED = ["--engine", "simulated", "--kv-cache-memory", "1GiB"]
CHAT = "/v1/chat/completions"
COUNT = "/v1/messages/count_tokens"
STREAMED = 3000  # tokens
MESSAGES = "/v1/messages"


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    model = make_image_checkpoint(Path(tmp_path_factory.mktemp("model")) / "sees", "qwen3_vl")
    with Fleet() as fleet:
        fleet.start_prefill(model, SIMULATED)
        fleet.start_decode(model, SIMULATED)
        fleet.start_router(model)
        fleet.wait_ready()
        fleet.wait_connected()
        yield fleet


def part(file: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(file).decode()}"}}


def chat(*parts: Any) -> dict[str, Any]:
    content = [*parts, {"type": "text", "text": "What?"}]
    return {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 2}


def url(url: Any) -> dict[str, Any]:
    return chat({"type": "image_url", "image_url": url})


def block(source: Any) -> dict[str, Any]:
    return chat({"type": "image", "source": source})


def post(fleet: Fleet, path: str, body: dict[str, Any]) -> tuple[int, str]:
    response = httpx.post(fleet.url + path, json=body, timeout=patience(120))
    return response.status_code, response.text


class Stream:
    """Another client's stream, which runs meanwhile."""

    def __init__(self, fleet: Fleet) -> None:
        self.num_tokens = 0
        self.ended = False
        self._url = fleet.url
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()
        assert self._started.wait(patience(30))

    def finish(self) -> None:
        self._thread.join(patience(120))
        assert self.ended, f"the stream stopped after {self.num_tokens} tokens"

    def _read(self) -> None:
        body = {"model": MODEL_NAME, "prompt": "a", "max_tokens": STREAMED, "ignore_eos": True, "stream": True}
        extra = {"return_token_ids": True}
        with httpx.stream("POST", f"{self._url}/v1/completions", json=body | extra, timeout=patience(60)) as response:
            rest = b""
            for data in response.iter_bytes():  # texts have characters that end lines for ``iter_lines``
                self._started.set()
                *events, rest = (rest + data).split(b"\n\n")
                for event in events:
                    self._count(event)
        self.ended = self.num_tokens == STREAMED

    def _count(self, event: bytes) -> None:
        if event.startswith(b"data: {"):
            for choice in json.loads(event.removeprefix(b"data: "))["choices"]:
                self.num_tokens += len(choice.get("token_ids") or [])


def test_hostile_images_end_nothing_but_their_requests(fleet: Fleet) -> None:
    pids = [process.pid for process in fleet.processes]
    stream = Stream(fleet)
    attacks = [(name, chat(part(make())), words) for name, (make, words) in ATTACKS.items() if name != "nothing"]
    with ThreadPoolExecutor(4) as threads:
        answers = threads.map(lambda attack: post(fleet, CHAT, attack[1]), attacks * 2)
        for (name, _, words), (status, text) in zip(attacks * 2, answers, strict=True):
            assert status == 400, (name, text)
            assert "messages[0].content[0]" in text, name
            assert words.replace("×", "\\u00d7") in text or words in text, (name, text)
            assert len(text) < 1000, name
    status, text = post(fleet, CHAT, chat(part(PHOTO)))
    assert status == 200, text
    stream.finish()
    assert [process.pid for process in fleet.processes] == pids
    assert all(process.child.process.poll() is None for process in fleet.processes)


NO_URLS: tuple[Any, ...] = (None, 5, True, [], {}, "data:;base64,")
NO_SOURCES: tuple[Any, ...] = (None, 5, [], {}, {"type": "base64"})
NO_IMAGES: tuple[Any, ...] = (None, 5, True, [], {}, "", "x", "data:", "data:,")
WRONG: dict[str, tuple[str, dict[str, Any], int]] = {
    **{f"image_url {value!r}": (CHAT, url(value), 400) for value in NO_IMAGES},
    **{f"url {value!r}": (CHAT, url({"url": value}), 400) for value in NO_URLS},
    **{f"source {value!r}": (MESSAGES, block(value), 400) for value in NO_SOURCES},
    "data 5": (MESSAGES, block({"type": "base64", "media_type": "image/png", "data": 5}), 400),
    "too many images": (CHAT, chat(*[part(PHOTO)] * (MAX_IMAGES + 1)), 400),
    "a data: URL of 29 MB": (CHAT, url({"url": "data:image/png;base64," + "A" * 29_000_000}), 400),
    "a data: URL of 133 MB": (CHAT, url({"url": "data:image/png;base64," + "A" * 133_000_000}), 413),
}


@pytest.mark.slow
def test_wrong_and_huge_images_are_refused(fleet: Fleet) -> None:
    stream = Stream(fleet)
    for name, (path, body, expected) in WRONG.items():
        status, text = post(fleet, path, body)
        assert status == expected, (name, status, text[:300])
        assert len(text) < 1000, name
    many = chat(*[part(PHOTO)] * MAX_IMAGES)
    counted = block({"type": "base64", "media_type": "image/jpeg", "data": base64.b64encode(PHOTO).decode()})
    del counted["max_tokens"]
    status, text = post(fleet, COUNT, counted)
    assert status == 200, text
    status, text = post(fleet, CHAT, many)
    assert (status == 200) or "context_length_exceeded" in text, text
    stream.finish()
