"""Sessions of Codex CLI and Claude Code: their requests, with a history that grows by the answers of the server.

A record, such as tests/e2e/sessions/codex.json, has the fields of all requests, and turns of one request each.
Words of tools and of the user are the record's; the answers are the server's. Requests are greedy, with short answers.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import httpx
import msgspec
from fleet import MODEL_NAME

Fields = dict[str, Any]

ABORTED = "aborted"  # result of a call without one in the record


class Turn(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One request. ``user``, ``result`` and ``also`` are added to the history before it."""

    user: str | list[Fields] | None = None  # a text, or parts in the form of the protocol
    result: str | list[Fields] | None = None  # result of the call in the last answer
    failed: bool = False  # the call failed
    also: list[Fields] = []  # messages that the program adds by itself
    call: str = ""  # the tool that the answer must call, or "any"; "": the model may choose
    reasoning: str = ""  # later requests repeat it before the answer
    least: int = 0  # least output tokens
    most: int = 100  # most output tokens
    refused: bool = False  # the server refuses the user's image, and the client repeats the request without it
    cancelled: bool = False  # the client closes the connection amid the answer, then repeats the request
    counted: bool = False  # the client first asks for the number of input tokens


class Record(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    headers: dict[str, str]
    request: Fields  # fields of all requests
    opening: list[Fields]  # history before the first turn
    turns: list[Turn]


@dataclass(frozen=True)
class Answer:
    """A complete answer: the stream has had its last event, and no error."""

    items: list[Fields]  # items or content blocks, as the protocol has them
    said: list[tuple[str, str]]  # per item: name of the called tool, or "", and text or arguments
    input_tokens: int
    cached_tokens: int  # input tokens found in the prefix cache
    output_tokens: int
    within_limit: bool  # False: cut at the limit of output tokens
    warnings: list[str]

    @property
    def called(self) -> list[str]:
        return [name for name, _ in self.said if name]


class Session(ABC):
    """A program's side of a session."""

    path: ClassVar[str]
    image: ClassVar[str]  # type of an image in the history
    placeholders: ClassVar[str]  # warning about so many images

    def __init__(self, record: Path) -> None:
        self.record = msgspec.json.decode(record.read_bytes(), type=Record)
        self._history = list(self.record.opening)
        self._open_calls: list[Fields] = []  # calls of the last answer without a result

    def request(self, turn: Turn) -> Fields:
        """Begin a turn: add its messages to the history, and return the body of its request."""
        assert self._open_calls or turn.result is None, "the last answer has no call"
        self._history += self._messages(turn, ABORTED if turn.result is None else turn.result)
        self._open_calls = []
        return self._body(turn)

    def request_without_image(self, turn: Turn) -> Fields:
        """Remove images from the newest message, and return the body of the turn's request."""
        newest = self._history[-1]
        content = [part for part in newest["content"] if part["type"] != self.image]
        assert len(content) < len(newest["content"]), "the newest message has no image"
        self._history[-1] = {**newest, "content": content}
        return self._body(turn)

    def refusal(self, client: httpx.Client, body: Fields) -> str:
        """Send a request that the server refuses. Return the message of the error."""
        response = client.post(self.path, json=body, headers=self.record.headers)
        assert response.status_code == 400, response.text
        return str(response.json()["error"]["message"])

    def stream(self, client: httpx.Client, body: Fields) -> Generator[Fields]:
        """Send a request and yield the events of its answer. Closing the iterator closes the connection."""
        with client.stream("POST", self.path, json=body, headers=self.record.headers) as response:
            assert response.status_code == 200, response.read()
            for block in _blocks(response):
                if not block.startswith(":"):
                    kind, data = block.split("\n")
                    yield (event := json.loads(data.removeprefix("data: ")))
                    assert kind == f"event: {event['type']}"

    def end(self, turn: Turn, answer: Answer) -> None:
        """Add an answer to the history."""
        self._history += self._answered(turn, answer)
        self._open_calls = [item for item, (name, _) in zip(answer.items, answer.said, strict=True) if name]

    def _body(self, turn: Turn) -> Fields:
        body = {"model": MODEL_NAME, **self.record.request, **self._with_history(), "temperature": 0}
        return {**body, **self._limits(turn), **({"tool_choice": self._forced(turn.call)} if turn.call else {})}

    @abstractmethod
    def text_of(self, event: Fields) -> str:
        """Return the text that an event adds to the answer."""

    @abstractmethod
    def answer_of(self, events: Sequence[Fields]) -> Answer: ...

    @abstractmethod
    def _messages(self, turn: Turn, result: str | list[Fields]) -> list[Fields]:
        """Return the messages that a turn adds to the history before its request."""

    @abstractmethod
    def _with_history(self) -> Fields:
        """Return the fields that depend on the history."""

    @abstractmethod
    def _limits(self, turn: Turn) -> Fields: ...

    @abstractmethod
    def _forced(self, tool: str) -> Any:
        """Return the ``tool_choice`` that forces a call of a tool."""

    @abstractmethod
    def _answered(self, turn: Turn, answer: Answer) -> list[Fields]:
        """Return an answer as later requests repeat it."""


class Codex(Session):
    path = "/v1/responses"
    image = "input_image"
    placeholders = "the model reads text only: {} images are placeholders"

    def text_of(self, event: Fields) -> str:
        return str(event["delta"]) if event["type"] == "response.output_text.delta" else ""

    def answer_of(self, events: Sequence[Fields]) -> Answer:
        assert [event["sequence_number"] for event in events] == list(range(len(events)))
        last = events[-1]
        assert last["type"] in ("response.completed", "response.incomplete"), last
        response = last["response"]
        items = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert items == response["output"]
        said = [self._said(item) for item in items]
        assert "".join(map(self.text_of, events)) == "".join(text for name, text in said if not name)
        usage = response["usage"]
        assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
        return Answer(
            items,
            said,
            input_tokens=usage["input_tokens"],
            cached_tokens=usage["input_tokens_details"]["cached_tokens"],
            output_tokens=usage["output_tokens"],
            within_limit=response["status"] == "completed",
            warnings=response.get("warnings", []),
        )

    def _said(self, item: Fields) -> tuple[str, str]:
        match item["type"]:
            case "message":
                return "", item["content"][0]["text"]
            case "function_call":
                return item["name"], item["arguments"]
            case "custom_tool_call":
                return item["name"], item["input"]
            case kind:
                assert kind == "local_shell_call", item
                return "local_shell", json.dumps(item["action"])

    def _messages(self, turn: Turn, result: str | list[Fields]) -> list[Fields]:
        results = [
            {"type": f"{call['type']}_output", "call_id": call["call_id"], "output": result}
            for call in self._open_calls
        ]
        parts = [{"type": "input_text", "text": turn.user}] if isinstance(turn.user, str) else turn.user
        user = [{"type": "message", "role": "user", "content": parts}] if parts else []
        return [*results, *turn.also, *user]

    def _with_history(self) -> Fields:
        return {"input": list(self._history)}

    def _limits(self, turn: Turn) -> Fields:
        return {"max_output_tokens": turn.most, "min_tokens": turn.least}

    def _forced(self, tool: str) -> Any:
        if tool == "any":
            return "required"
        kind = next(
            offered["type"]
            for offered in self.record.request["tools"]
            if tool in (offered.get("name"), offered["type"])
        )
        return {"type": kind} if kind == tool else {"type": kind, "name": tool}

    def _answered(self, turn: Turn, answer: Answer) -> list[Fields]:
        """Without ids of items, as for servers that store nothing."""
        summary = [{"type": "summary_text", "text": turn.reasoning}]
        reasoning = {"type": "reasoning", "summary": summary, "content": None, "encrypted_content": None}
        items = [{name: value for name, value in item.items() if name != "id"} for item in answer.items]
        return [*([reasoning] if turn.reasoning else []), *items]


class ClaudeCode(Session):
    path = "/v1/messages?beta=true"
    image = "image"
    placeholders = "the model reads text only: {} blocks of type 'image' are placeholders"

    def count_tokens(self, client: httpx.Client, body: Fields) -> int:
        """Return the input tokens of a request as the server counts them beforehand."""
        fields = {name: body[name] for name in ("model", "system", "messages", "tools", "thinking", "output_config")}
        path = self.path.replace("?", "/count_tokens?")
        response = client.post(path, json=fields, headers=self.record.headers)
        assert response.status_code == 200, response.text
        return int(response.json()["input_tokens"])

    def text_of(self, event: Fields) -> str:
        return str(event["delta"].get("text", "")) if event["type"] == "content_block_delta" else ""

    def answer_of(self, events: Sequence[Fields]) -> Answer:
        start, *middle, end, stop = [event for event in events if event["type"] != "ping"]
        assert (start["type"], end["type"], stop) == ("message_start", "message_delta", {"type": "message_stop"})
        blocks: list[Fields] = []
        texts: list[str] = []
        for event in middle:
            match event:
                case {"type": "content_block_start", "content_block": block}:
                    blocks.append(dict(block))
                    texts.append("")
                case {"type": "content_block_delta", "delta": delta}:
                    texts[event["index"]] += delta["text" if blocks[-1]["type"] == "text" else "partial_json"]
                case _:
                    assert event == {"type": "content_block_stop", "index": len(blocks) - 1}
        usage = end["usage"]
        reason = end["delta"]["stop_reason"]
        assert reason in ("end_turn", "tool_use", "max_tokens")
        for block, text in zip(blocks, texts, strict=True):
            if block["type"] == "text":
                block["text"] = text
            elif reason != "max_tokens":  # else it may be cut
                block["input"] = json.loads(text)
        return Answer(
            blocks,
            said=[(block.get("name", ""), text) for block, text in zip(blocks, texts, strict=True)],
            input_tokens=usage["input_tokens"] + usage["cache_read_input_tokens"],
            cached_tokens=usage["cache_read_input_tokens"],
            output_tokens=usage["output_tokens"],
            within_limit=reason != "max_tokens",
            warnings=start["message"].get("warnings", []),
        )

    def _messages(self, turn: Turn, result: str | list[Fields]) -> list[Fields]:
        content = [
            {"type": "tool_result", "tool_use_id": call["id"], "content": result, "is_error": turn.failed}
            for call in self._open_calls
        ]
        content += [{"type": "text", "text": turn.user}] if isinstance(turn.user, str) else turn.user or []
        return [*turn.also, {"role": "user", "content": content}]

    def _with_history(self) -> Fields:
        """Return the history after a hash that differs per request, with Anthropic's cache mark at its end."""
        first, *system = self.record.request["system"]
        first = {**first, "text": first["text"].replace("00000", f"{len(self._history):05}")}
        *messages, last = self._history
        marked = {**last["content"][-1], "cache_control": {"type": "ephemeral"}}
        last = {**last, "content": [*last["content"][:-1], marked]}
        return {"system": [first, *system], "messages": [*messages, last]}

    def _limits(self, turn: Turn) -> Fields:
        return {"max_tokens": turn.most, "min_tokens": turn.least}

    def _forced(self, tool: str) -> Any:
        choice = {"type": "any"} if tool == "any" else {"type": "tool", "name": tool}
        return {**choice, "disable_parallel_tool_use": True}

    def _answered(self, turn: Turn, answer: Answer) -> list[Fields]:
        thinking = {"type": "thinking", "thinking": turn.reasoning, "signature": "unsigned"}
        return [{"role": "assistant", "content": [*([thinking] if turn.reasoning else []), *answer.items]}]


def _blocks(response: httpx.Response) -> Iterator[str]:
    """Yield the events of a stream as they are, without the empty line that ends each."""
    rest = b""
    for data in response.iter_bytes():
        *blocks, rest = (rest + data).split(b"\n\n")
        yield from (block.decode() for block in blocks)
    assert not rest, rest
