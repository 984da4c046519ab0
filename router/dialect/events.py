"""Events of a stream. They stay objects until the last step: server-sent events or WebSocket messages."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import msgspec

from router.dialect.json_pieces import in_chunks

_BATCH_BYTES = 64 * 1024


class Event(msgspec.Struct, frozen=True, gc=False):
    """An event, or a part of a large one, of which only the first ``begins`` and only the last ``ends``."""

    kind: str  # empty in OpenAI's completions and chats
    data: bytes  # JSON
    begins: bool = True
    ends: bool = True


def parts_of(kind: str, pieces: Iterable[bytes]) -> Iterator[Event]:
    """Yield an event of any size in parts of about 64 KiB. ``pieces`` are its JSON."""
    chunks = in_chunks(pieces)
    data = next(chunks, b"")
    begins = True
    for following in chunks:
        yield Event(kind, data, begins, ends=False)
        data = following
        begins = False
    yield Event(kind, data, begins)


def batches(events: Iterable[Event]) -> Iterator[list[Event]]:
    """Yield the events in lists of about 64 KiB."""
    batch: list[Event] = []
    size = 0
    for event in events:
        batch.append(event)
        size += len(event.data)
        if size >= _BATCH_BYTES:
            yield batch
            batch = []
            size = 0
    if batch:
        yield batch


def server_sent(event: Event) -> bytes:
    """Return the event as a server-sent event."""
    if event.begins and event.ends and not event.kind:  # the most frequent kind
        return b"data: %b\n\n" % event.data
    head = b"event: %b\ndata: " % event.kind.encode() if event.kind else b"data: "
    return b"%b%b%b" % (head if event.begins else b"", event.data, b"\n\n" if event.ends else b"")
