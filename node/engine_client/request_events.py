"""Dispatches the engine's events to the requests of its frontend."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Protocol

from pdserve import errors
from pdserve.errors import EngineDied, PdserveError
from pdserve.ipc.messages import (
    DecodeAheadEnded,
    Drafted,
    EventBatch,
    Fetched,
    LastChunk,
    Leased,
    Pooled,
    Prefilled,
    ReadChecked,
    ReadEnded,
    Refused,
    Reserved,
    Scored,
)
from pdserve.logprobs import TokenLogprobs
from pdserve.records import FinishReason

Event = (
    Fetched
    | Prefilled
    | Drafted
    | Scored
    | Pooled
    | Reserved
    | Refused
    | ReadEnded
    | ReadChecked
    | LastChunk
    | Leased
    | DecodeAheadEnded
)


class RequestHandler(Protocol):
    """Receives the output tokens and other events of one request."""

    def on_token(
        self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None
    ) -> None: ...

    def on_event(self, event: Event) -> None: ...


class RequestEvents:
    """The open requests, by their ids."""

    def __init__(self) -> None:
        self._handlers: dict[int, RequestHandler] = {}
        self._rids = itertools.count(1)

    def open(self, handler: RequestHandler) -> int:
        """Return a new request id, whose events go to ``handler``."""
        rid = next(self._rids)
        self._handlers[rid] = handler
        return rid

    def close(self, rid: int) -> None:
        """Drop further events of this request. Idempotent."""
        self._handlers.pop(rid, None)

    def refuse_all(self, error_of: Callable[[int], PdserveError]) -> None:
        """Fail all open requests: the engine does not answer. ``error_of`` returns the error of a request."""
        for rid, handler in list(self._handlers.items()):
            error = error_of(rid)
            handler.on_event(Refused(rid, type(error).__name__, str(error)))

    def dispatch(self, batch: EventBatch) -> None:
        """Pass on the events of a step in their order: prompts, then tokens, then events that follow tokens."""
        self._dispatch(batch.fetched, batch.reserved, batch.refused, batch.reads, batch.checked)
        self._dispatch(batch.scored, batch.prefilled, batch.pooled, batch.drafted, batch.last_chunks)
        for rid, choice, token_id, finish, logprobs in batch.outputs.rows():
            if (handler := self._handlers.get(rid)) is not None:  # else it was closed meanwhile
                handler.on_token(choice, token_id, finish, logprobs)
        self._dispatch(batch.decode_ahead_ended, batch.leased)

    def _dispatch(self, *columns: Iterable[Event]) -> None:
        for event in itertools.chain.from_iterable(columns):
            if (handler := self._handlers.get(event.rid)) is not None:  # else it was closed meanwhile
                handler.on_event(event)


def named_error(kind: str, text: str) -> PdserveError:
    """Return the error that the engine named; an unknown kind is EngineDied."""
    error = getattr(errors, kind, None)
    if isinstance(error, type) and issubclass(error, PdserveError):
        return error(text)
    return EngineDied(f"{kind}: {text}")


def error_of(refused: Refused) -> PdserveError:
    return named_error(refused.kind, refused.message)
