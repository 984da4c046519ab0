"""Clients and agents that send images to a prefill node and a decode node, with a small random model that sees.

Whole sessions of Codex CLI and Claude Code with screenshots, by the records of test_recorded_sessions.py: an image in a
message, and one in the output of a tool. Each image is encoded once, however many requests repeat it.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import openai
import pytest
from agent_sessions import Answer, ClaudeCode, Codex, Session
from collector import Collector
from fleet import MODEL_NAME, Fleet, start_fleet
from image_checkpoints import CELL, make_image_checkpoint, random_image
from machine import patience
from test_recorded_sessions import SESSIONS, connected
from test_traces import FAST_EXPORT, check_contiguous, traced
from websockets.sync.client import connect

from cli.main import main

pytestmark = pytest.mark.timeout(600)

FLAGS = ("--dtype", "float32", "--kv-cache-memory", "256MiB")
CONTEXT = 32_768
PROGRAMS: dict[str, type[Session]] = {"codex": Codex, "claude_code": ClaudeCode}
#: Turns of the records: with images, and some before and after them.
TURNS = {"codex": (0, 14, 15, 16, 17, 28, 29), "claude_code": (0, 15, 16, 17, 22, 23, 29)}
TINY = (
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg=="  # in the records
)


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory, collector: Collector) -> Iterator[Fleet]:
    """A router that traces the requests whose client asks for it, a prefill node and a decode node."""
    model = tmp_path_factory.mktemp("sees") / "model"
    make_image_checkpoint(model, "qwen3_vl", max_position_embeddings=CONTEXT)
    traces = ("--traces", collector.url)
    decode_flags = (*FLAGS, *traces, "--handoff-min-tokens", "0")
    router_flags = ("--tool-call-parser", "hermes", "--response-store", "memory", *traces, "--trace-sample", "0")
    with (
        mock.patch.dict(os.environ, FAST_EXPORT),
        start_fleet(model, 1, 1, True, (*FLAGS, *traces), decode_flags, router_flags) as fleet,
    ):
        yield fleet


@pytest.fixture(scope="module")
def client(fleet: Fleet) -> Iterator[openai.OpenAI]:
    with (
        httpx.Client(trust_env=False) as http,
        openai.OpenAI(
            base_url=f"{fleet.url}/v1", api_key="none", max_retries=0, timeout=patience(60), http_client=http
        ) as client,
    ):
        yield client


def png(rows: int, columns: int, seed: int) -> str:
    """Return base64 of a new image of so many tokens."""
    file = io.BytesIO()
    random_image(rows * CELL, columns * CELL, seed).save(file, "PNG")
    return base64.b64encode(file.getvalue()).decode()


def url(rows: int, columns: int, seed: int) -> str:
    return f"data:image/png;base64,{png(rows, columns, seed)}"


def encoded(fleet: Fleet) -> float:
    return sum(node.counter("images_encoded") for node in fleet.nodes)


# ---------------------------------------------------------------- SDKs


def test_openai_sdk_chats_about_images(client: openai.OpenAI, fleet: Fleet) -> None:
    before = encoded(fleet)
    content: Any = [
        {"type": "text", "text": "Compare"},
        {"type": "image_url", "image_url": {"url": url(3, 4, 1), "detail": "high"}},
        {"type": "image_url", "image_url": {"url": url(2, 5, 2)}},
    ]
    fields: dict[str, Any] = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "temperature": 0}
    answer = client.chat.completions.create(**fields, max_tokens=8)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.model_dump()["image_tokens"] == 3 * 4 + 2 * 5
    chunks = client.chat.completions.create(**fields, max_tokens=8, stream=True)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == answer.choices[0].message.content
    assert encoded(fleet) == before + 2
    card = client.models.retrieve(MODEL_NAME).model_dump()
    assert card["architecture"]["input_modalities"] == ["text", "image"]


def test_openai_sdk_continues_responses_with_images(client: openai.OpenAI, fleet: Fleet) -> None:
    before = encoded(fleet)
    image: Any = {"type": "input_image", "image_url": url(4, 4, 3), "detail": "auto"}
    question: Any = {"role": "user", "content": [{"type": "input_text", "text": "What?"}, image]}
    fields: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_output_tokens": 8}
    first = client.responses.create(input=[question], **fields)
    stored = client.responses.create(input="Sure?", previous_response_id=first.id, **fields)
    said: Any = {"role": "assistant", "content": first.output_text}
    whole = client.responses.create(input=[question, said, {"role": "user", "content": "Sure?"}], **fields)
    assert stored.output_text == whole.output_text
    assert stored.usage is not None
    assert whole.usage is not None
    assert stored.usage.input_tokens == whole.usage.input_tokens
    (item,) = [item for item in client.responses.input_items.list(first.id) if item.type == "message"]
    assert item.model_dump()["content"][1]["image_url"] == image["image_url"]
    assert encoded(fleet) == before + 1


def test_turns_over_a_websocket_see_earlier_images(client: openai.OpenAI, fleet: Fleet) -> None:
    image = {"type": "input_image", "image_url": url(2, 7, 4)}
    question = {"role": "user", "content": [image, {"type": "input_text", "text": "What?"}]}
    fields: dict[str, Any] = {"model": MODEL_NAME, "temperature": 0, "max_output_tokens": 8, "store": False}

    def turn(**more: Any) -> Any:
        socket.send(json.dumps({"type": "response.create", **fields, **more}), text=True)
        while (event := json.loads(socket.recv(timeout=patience(60))))["type"] not in ENDS:
            pass
        assert event["type"] != "response.failed", event
        return event["response"]

    address = fleet.url.replace("http", "ws", 1)
    with connect(f"{address}/v1/responses", proxy=None, open_timeout=patience(20), close_timeout=1) as socket:
        first = turn(input=[question])
        second = turn(input="Sure?", previous_response_id=first["id"])
    said: Any = {"role": "assistant", "content": first["output"][0]["content"][0]["text"]}
    whole = client.responses.create(input=[question, said, {"role": "user", "content": "Sure?"}], **fields)
    assert second["output"][0]["content"][0]["text"] == whole.output_text
    assert second["usage"]["input_tokens"] == whole.usage.input_tokens


ENDS = ("response.completed", "response.incomplete", "response.failed", "error")


def test_trace_shows_the_images_of_a_request(fleet: Fleet, collector: Collector) -> None:
    content = [{"type": "image_url", "image_url": {"url": url(3, 3, seed)}} for seed in (5, 6)]
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": 8}
    with connected(fleet) as client:
        answer = client.post("/v1/chat/completions", json=body, headers=traced())
    assert answer.status_code == 200, answer.text
    root = collector.wait(answer.headers["x-request-id"], "generate", "decode node", "prefill node", "lease")
    loaded = root.child("prepare").child("images")
    at_p = root.child("generate").child("decode node").child("handoff").child("prefill node")
    assert root.attributes["pdserve.image_tokens"] == 18
    assert loaded.attributes["pdserve.images"] == at_p.child("images").attributes["pdserve.images"] == 2
    check_contiguous(at_p.child("images"), at_p.child("queue"), at_p.child("prefill"))


def test_bench_reports_tokens_of_images(fleet: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = tmp_path / "bench.json"
    load = ["--num-prompts", "3", "--num-warmups", "1", "--random-input-len", "8", "--random-output-len", "2"]
    images = ["--image", "96x64x2", "--image", "128x128"]
    assert main(["bench", fleet.url, *load, *images, "--json", str(figures)]) == 0
    measured = json.loads(figures.read_text())
    assert (measured["images"], measured["image_tokens"]) == (9, 3 * (6 + 6 + 16))
    said = capsys.readouterr().out
    assert "84 of the prompts' tokens" in said
    assert "images of 2 × 96 × 64, 128 × 128" in said


# ---------------------------------------------------------------- agents


@pytest.mark.parametrize("program", [pytest.param("codex", marks=pytest.mark.slow), "claude_code"])
def test_agents_session_sees_its_images_and_encodes_each_once(program: str, fleet: Fleet, tmp_path: Path) -> None:
    images = [png(5, 8, seed=len(program)), png(6, 4, seed=len(program) + 1)]
    before = encoded(fleet)
    session = PROGRAMS[program](seeing_record(program, images, tmp_path))
    answers: list[Answer] = []
    seen = 0
    with connected(fleet) as client:
        for turn in session.record.turns:
            body = session.request(turn)
            counted = session.count_tokens(client, body) if isinstance(session, ClaudeCode) else None
            answer = session.answer_of(list(session.stream(client, body)))
            assert counted in (None, answer.input_tokens)
            assert [text for text in answer.warnings if "image" in text] == []
            if turn.call:
                assert answer.called == [turn.call]
            number = json.dumps(body).count(f'"type": "{session.image}"')
            if number == seen and answers:
                assert answer.cached_tokens > answers[-1].input_tokens - 40  # blocks of 16, and a part of the answer
            seen = number
            session.end(turn, answer)
            answers.append(answer)
    assert seen == 2
    assert encoded(fleet) == before + 2
    for node in fleet.nodes:
        node.wait_idle(60.0)


def seeing_record(program: str, images: list[str], folder: Path) -> Path:
    """Write the record of a session at a model that sees: no image is refused, and each is another one."""
    text = (SESSIONS / f"{program}.json").read_text()
    assert text.count(TINY) == len(images)
    for image in images:
        text = text.replace(TINY, image, 1)
    record = json.loads(text)
    turns = [record["turns"][number] for number in TURNS[program]]
    record["turns"] = [{name: value for name, value in turn.items() if name != "refused"} for turn in turns]
    path = folder / f"{program}.json"
    path.write_text(json.dumps(record))
    return path
