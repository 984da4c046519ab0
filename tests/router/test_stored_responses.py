"""--response-store through the official SDK: earlier responses and background responses."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from machine import patience
from router_process import MODEL, RouterProcess, router_process, wait_for
from scripted_node import Conversation, ScriptedNode

from router.gate.api_keys import key_entry, new_key
from router.gate.keys import Client
from router.responses_api.response_database import ResponseDatabase, StoreLimits
from router.text.tokenizer import Tokenizer

KEYS = {name: new_key() for name in ("alice", "bob")}
TOOLS: Any = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'


@pytest.fixture(scope="module")
def storing_router(
    reading_dir: Path, scripted_node: ScriptedNode, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RouterProcess]:
    folder = tmp_path_factory.mktemp("store")
    (folder / "keys.toml").write_text("".join(key_entry(name, key) for name, key in KEYS.items()))
    flags = ["--decode", scripted_node.address, "--api-keys", str(folder / "keys.toml")]
    flags += ["--response-store", f"sqlite:{folder / 'responses.db'}", "--response-store-size", "400K"]
    with router_process(reading_dir, flags) as process:
        yield process


def sdk_of(router: RouterProcess, name: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{router.url}/v1", api_key=KEYS[name], max_retries=0, timeout=patience(20))


@pytest.fixture(scope="module")
def alice(storing_router: RouterProcess) -> Iterator[openai.OpenAI]:
    with sdk_of(storing_router, "alice") as sdk:
        yield sdk


class Speech:
    """The node's output in one test: a first text at once, the rest after ``finish``."""

    def __init__(self, node: ScriptedNode, tokenizer: Tokenizer, salt: str) -> None:
        self._node = node
        self._tokenizer = tokenizer
        self._salt = Client(name="alice", tenant="alice").cache_salt(salt)
        self._goes_on = asyncio.Event()
        self.fields: dict[str, Any] = {"model": MODEL, "extra_body": {"cache_salt": salt}}

    def say(self, text: str, then: str | None = None) -> dict[str, Any]:
        """``then`` None: the text is all. Returns fields of a request."""

        async def script(conversation: Conversation) -> None:
            self._send(conversation, text)
            if then is not None:
                await self._goes_on.wait()
                self._send(conversation, then)
            conversation.token(self._tokenizer.encode("<|im_end|>")[0], finish="stop")

        self._node.scripts[self._salt] = script
        return self.fields

    def go_on(self) -> None:
        self._node.do(self._goes_on.set)

    def wait_cancelled(self) -> None:
        self._node.wait_cancelled(self._salt)

    @property
    def prompt(self) -> str:
        """The latest prompt."""
        return self._tokenizer.decode(self._node.seen[self._salt].prompt)

    def _send(self, conversation: Conversation, text: str) -> None:
        for token_id in self._tokenizer.encode(text, add_special_tokens=False):
            conversation.token(token_id)


@pytest.fixture
def node(request: pytest.FixtureRequest, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer) -> Speech:
    return Speech(scripted_node, reading_tokenizer, request.node.name)


def wait_for_status(sdk: openai.OpenAI, response_id: str, status: str) -> Any:
    wait_for(lambda: sdk.responses.retrieve(response_id).status == status)
    return sdk.responses.retrieve(response_id)


@pytest.mark.parametrize("stream", [False, True])
def test_response_is_stored_until_it_is_deleted(
    storing_router: RouterProcess, alice: openai.OpenAI, node: Speech, stream: bool
) -> None:
    created: Any = alice.responses.create(input="Hi", stream=stream, **node.say("<think>Hm.</think>Hello"))
    if stream:
        created = list(created)[-1].response
    assert created.store
    assert alice.responses.retrieve(created.id) == created
    with sdk_of(storing_router, "bob") as bob:
        for call in (
            bob.responses.retrieve,
            bob.responses.delete,
            bob.responses.cancel,
            bob.responses.input_items.list,
        ):
            with pytest.raises(openai.NotFoundError, match="of this API key"):
                call(created.id)
    alice.responses.delete(created.id)
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(created.id)
    with pytest.raises(openai.BadRequestError) as refused:
        alice.responses.create(input="Hi", previous_response_id=created.id, **node.fields)
    assert refused.value.code == "previous_response_not_found"


def test_response_with_store_false_is_not_stored(alice: openai.OpenAI, node: Speech) -> None:
    response = alice.responses.create(input="Hi", store=False, **node.say("Hello"))
    assert not response.store
    with pytest.raises(openai.NotFoundError):
        alice.responses.retrieve(response.id)


def test_previous_response_is_continued(alice: openai.OpenAI, node: Speech) -> None:
    fields = node.say(f"Sure.{CALL}")
    first: Any = alice.responses.create(input="One", instructions="Be brief.", tools=TOOLS, **fields)
    output: Any = {"type": "function_call_output", "call_id": first.output[-1].call_id, "output": "42"}
    second = alice.responses.create(input=[output], previous_response_id=first.id, **node.say("Two"))
    assert second.previous_response_id == first.id
    alice.responses.create(input="Three", previous_response_id=second.id, instructions="Be long.", **node.fields)
    turns = [
        "system\nBe long.",
        "user\nOne",
        "assistant\nSure.<tool_call>f:é</tool_call>",
        "tool\n42",
        "assistant\nTwo",
    ]
    expected = "".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in [*turns, "user\nThree"])
    assert node.prompt.startswith(expected)


def test_input_items_are_listed_in_pages(alice: openai.OpenAI, node: Speech) -> None:
    one: Any = {"role": "user", "content": "One", "unknown": [[]] * 10_000}
    first = alice.responses.create(input=[one], **node.say("Two"))
    second = alice.responses.create(input="Three", previous_response_id=first.id, **node.fields)
    items: Any = list(alice.responses.input_items.list(second.id, limit=2, order="asc"))
    assert [(item.role, item.content[0].text) for item in items] == [
        *(("user", "One"), ("assistant", "Two"), ("user", "Three"))
    ]
    assert "unknown" not in items[0].model_dump()
    backwards: Any = alice.responses.input_items.list(second.id, limit=1)
    assert [item.id for item in backwards] == [item.id for item in reversed(items)]


def test_item_references_are_replaced(alice: openai.OpenAI, node: Speech) -> None:
    first = alice.responses.create(input="One", **node.say("Two"))
    reference: Any = {"type": "item_reference", "id": first.output[0].id}
    three: Any = {"role": "user", "content": "Three"}
    last = alice.responses.create(input=[reference, three, reference], **node.fields)
    items: Any = list(alice.responses.input_items.list(last.id, limit=1, order="asc"))
    assert [item.content[0].text for item in items] == ["Two", "Three", "Two"], (
        "an item that is there twice ends no page"
    )
    turns = ["assistant\nTwo", "user\nThree", "assistant\nTwo"]
    assert node.prompt.startswith("".join(f"<|im_start|>{turn}<|im_end|>\n" for turn in turns))
    with pytest.raises(openai.BadRequestError, match="'msg_1'"):
        alice.responses.create(input=[{"type": "item_reference", "id": "msg_1"}], **node.fields)


def test_background_response_goes_on_alone(alice: openai.OpenAI, node: Speech) -> None:
    created = alice.responses.create(input="Hi", background=True, **node.say("One", then=" two"))
    assert (created.status, created.output, created.background) == ("in_progress", [], True)
    assert alice.responses.retrieve(created.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="in progress"):
        alice.responses.create(input="Hi", previous_response_id=created.id, **node.fields)
    with pytest.raises(openai.BadRequestError, match="no events"):
        list(alice.responses.retrieve(created.id, stream=True))
    node.go_on()
    ended = wait_for_status(alice, created.id, "completed")
    assert ended.output_text == "One two"
    assert alice.responses.cancel(created.id) == ended


def test_background_response_is_cancelled(alice: openai.OpenAI, node: Speech) -> None:
    fields = node.say("One", then=" two")
    created = alice.responses.create(input="Hi", background=True, stream=True, **fields)
    response_id = next(event.response.id for event in created if event.type == "response.created")
    cancelled = alice.responses.cancel(response_id)
    node.wait_cancelled()
    assert cancelled.status == "cancelled"
    assert list(created) is not None  # the stream ends
    assert alice.responses.cancel(response_id) == alice.responses.retrieve(response_id) == cancelled


def test_background_response_that_cannot_be_stored_is_refused(alice: openai.OpenAI, node: Speech) -> None:
    fields = node.say("One", then=" two")
    with pytest.raises(openai.BadRequestError, match="at most 100000 per response"):
        alice.responses.create(input="Hi", background=True, metadata={"a": "x" * 150_000}, **fields)
    node.wait_cancelled()


def test_only_background_responses_are_cancelled(alice: openai.OpenAI, node: Speech) -> None:
    response = alice.responses.create(input="Hi", **node.say("Hello"))
    with pytest.raises(openai.BadRequestError, match="without background"):
        alice.responses.cancel(response.id)


def test_events_of_a_background_response_are_read_again(alice: openai.OpenAI, node: Speech) -> None:
    fields = node.say("One", then=" two")
    stream = alice.responses.create(input="Hi", background=True, stream=True, **fields)
    seen: list[Any] = []
    for event in stream:
        seen.append(event)
        if event.type == "response.output_text.delta":
            break
    stream.close()
    resumed = alice.responses.retrieve(seen[0].response.id, stream=True, starting_after=seen[-1].sequence_number)
    node.go_on()
    seen += resumed
    assert [event.sequence_number for event in seen] == list(range(len(seen)))
    assert seen[-1].response.output_text == "One two"
    assert list(alice.responses.retrieve(seen[0].response.id, stream=True)) == seen
    assert list(alice.responses.retrieve(seen[0].response.id, stream=True, starting_after=3)) == seen[4:]
    assert list(alice.responses.retrieve(seen[0].response.id, stream=True, starting_after=10**9)) == []


def test_background_response_fails_when_the_router_stops(
    reading_dir: Path, scripted_node: ScriptedNode, tmp_path: Path
) -> None:
    path = tmp_path / "responses.db"
    flags = ["--decode", scripted_node.address, "--response-store", f"sqlite:{path}", "--drain-timeout", "0"]
    scripted_node.scripts["stops"] = _wait_for_cancel
    with router_process(reading_dir, flags) as router:
        body = {"input": "Hi", "background": True, "cache_salt": "stops"}
        created = httpx.post(f"{router.url}/v1/responses", json=body, trust_env=False).json()
        router.process.send_signal(signal.SIGTERM)
        router.process.wait(timeout=patience(20))
    stored = ResponseDatabase(str(path), StoreLimits(1_000_000, 100.0)).read("response", "key ", created["id"])
    assert stored is not None
    assert json.loads(stored)["status"] == "failed"
    assert "shutting down" in json.loads(stored)["error"]["message"]


async def _wait_for_cancel(conversation: Conversation) -> None:
    await conversation.cancelled.wait()


def test_each_tenant_and_each_key_without_one_is_an_owner() -> None:
    clients = [Client(name="a"), Client(name="b"), Client(name="c", tenant="a"), Client(name="d", tenant="b")]
    assert len({client.owner for client in clients}) == 4
    assert Client(name="e", tenant="a").owner == Client(name="c", tenant="a").owner
