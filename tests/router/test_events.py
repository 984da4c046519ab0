"""Events of a stream, and their two writers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence

import pytest
from starlette.types import Message

from router.dialect.answer_writer import AnswerWriter
from router.dialect.events import Event, batches, parts_of, server_sent
from router.errors import OPENAI_ERRORS
from router.http.endpoints.delivery import HttpWriter
from router.http.endpoints.responses_socket import SocketWriter

TEXTS = ("", "one", "x" * 200_000, "Ünï\n\ncode" * 30_000, "last")


def large(text: str) -> list[Event]:
    """The parts of an event whose JSON comes in pieces, some of which end within a character."""
    data = json.dumps(text, ensure_ascii=False).encode()
    return list(parts_of("kind", (data[at : at + 1001] for at in range(0, len(data), 1001))))


def sent_by(writer: AnswerWriter, sent: list[Message], lists: Sequence[list[Event]]) -> list[Message]:
    async def write() -> list[Message]:
        await writer.begin_events([])
        for number, events in enumerate(lists, 1):
            await writer.send_events(events, last=number == len(lists))
        return sent

    return asyncio.run(write())


@pytest.mark.parametrize("text", TEXTS)
def test_parts_of_a_large_event_join_to_it_and_are_bounded(text: str) -> None:
    parts = large(text)

    assert [part.begins for part in parts] == [True] + [False] * (len(parts) - 1)
    assert [part.ends for part in parts] == [False] * (len(parts) - 1) + [True]
    assert max(len(part.data) for part in parts) < 70_000
    whole = server_sent(Event("kind", json.dumps(text, ensure_ascii=False).encode()))
    assert b"".join(map(server_sent, parts)) == whole


def test_event_without_a_kind_has_no_line_for_it() -> None:
    assert server_sent(Event("", b"[DONE]")) == b"data: [DONE]\n\n"
    assert server_sent(Event("ping", b"{}")) == b"event: ping\ndata: {}\n\n"


def test_batches_have_all_events_in_order() -> None:
    events = [event for text in TEXTS for event in large(text)]
    sent = list(batches(events))
    assert [event for batch in sent for event in batch] == events
    assert all(sum(len(event.data) for event in batch[:-1]) < 64 * 1024 for batch in sent)


def test_both_writers_send_the_same_events() -> None:
    lists = [[part] for text in TEXTS for part in large(text)]
    over_http: list[Message] = []
    over_socket: list[Message] = []

    async def send_http(message: Message) -> None:
        over_http.append(message)

    async def send_socket(message: Message) -> None:
        over_socket.append(message)

    async def receive() -> Message:
        raise AssertionError

    turns = asyncio.Lock()
    sent_by(HttpWriter({}, receive, send_http, errors=OPENAI_ERRORS, turns=turns, keep_alive=0), over_http, lists)
    sent_by(SocketWriter(send_socket, turns), over_socket, lists)

    body = b"".join(message.get("body", b"") for message in over_http)
    events = [json.loads(part.partition(b"data: ")[2]) for part in body.removesuffix(b"\n\n").split(b"\n\nevent: ")]
    assert events == [json.loads(message["text"]) for message in over_socket] == list(TEXTS)
    assert [message["more_body"] for message in over_http[1:]] == [True] * (len(lists) - 1) + [False]
