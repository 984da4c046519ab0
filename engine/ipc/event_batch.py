"""Collects the events of one iteration of the step loop, for one message to the frontend."""

from __future__ import annotations

from array import array
from collections.abc import Collection
from dataclasses import dataclass, field, fields
from typing import Any

from engine.ipc.messages import (
    Batch,
    DecodeAheadEnded,
    Leased,
    OutputTokens,
    Prefilled,
    ReadEnded,
    Refused,
    Reserved,
    Scored,
    Status,
)
from pdserve.records import FinishReason, Sample, TokenLogprobs
from pdserve.transports import Connected


@dataclass(slots=True)
class _OutputColumns:
    """The columns of OutputTokens, growing."""

    rids: list[int] = field(default_factory=list)
    choices: list[int] = field(default_factory=list)
    token_ids: array[int] = field(default_factory=lambda: array("I"))
    finish: dict[int, FinishReason] = field(default_factory=dict)
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)


@dataclass(slots=True)
class EventBatch:
    """Filled by the scheduler during an iteration, then sent as one message."""

    scored: list[Scored] = field(default_factory=list)
    prefilled: list[Prefilled] = field(default_factory=list)
    decode_ahead_ended: list[DecodeAheadEnded] = field(default_factory=list)
    reserved: list[Reserved] = field(default_factory=list)
    refused: list[Refused] = field(default_factory=list)
    reads: list[ReadEnded] = field(default_factory=list)
    leased: list[Leased] = field(default_factory=list)
    connected: list[Connected] = field(default_factory=list)
    failed_peers: list[tuple[str, str]] = field(default_factory=list)
    status_changed: bool = False  # the status alone is worth a message: blocks came or went
    _outputs: _OutputColumns = field(default_factory=_OutputColumns)

    def __bool__(self) -> bool:
        return bool(self._outputs.rids or self.status_changed) or any(getattr(self, name) for name in _LISTS)

    @property
    def num_outputs(self) -> int:
        return len(self._outputs.rids)

    def add_output(self, rid: int, choice: int, sample: Sample, finish: FinishReason | None) -> None:
        outputs = self._outputs
        if finish is not None:
            outputs.finish[len(outputs.rids)] = finish
        if sample.logprobs is not None:
            outputs.logprobs[len(outputs.rids)] = sample.logprobs
        outputs.rids.append(rid)
        outputs.choices.append(choice)
        outputs.token_ids.append(sample.token_id)

    def refuse(self, rid: int, kind: str, text: str) -> None:
        self.refused.append(Refused(rid, kind, text))

    def take(self, status: Status, cached: Collection[bytes], evicted: Collection[bytes]) -> Batch:
        """Return all events as one message, with the changes of the prefix cache. The batch is empty afterwards."""
        outputs, self._outputs = self._outputs, _OutputColumns()
        columns = tuple(outputs.rids), tuple(outputs.choices), outputs.token_ids.tobytes()
        lists: dict[str, Any] = {name: tuple(getattr(self, name)) for name in _LISTS}
        for name in _LISTS:
            getattr(self, name).clear()
        self.status_changed = False
        tokens = OutputTokens(*columns, outputs.finish, outputs.logprobs)
        return Batch(status, outputs=tokens, cached=tuple(cached), evicted=tuple(evicted), **lists)


# The fields of EventBatch that become fields of Batch as they are.
_LISTS = tuple(each.name for each in fields(EventBatch) if each.name in Batch.__struct_fields__)
