"""The adapters of a step: slots that are filled before it, and the slot of each of its tokens."""

from __future__ import annotations

from typing import Any

import numpy as np

from pdserve.adapters.adapter import NO_ADAPTER_SLOT
from pdserve.records import NewSequence, ScheduledSequence, StepPlan
from runner.adapters.host_adapters import HostAdapters
from runner.step_parts import StepFeature

ADAPTER_COPIES = 2  # to the device, in a step: tiles of all tokens, and of those with logits


class AdapterSteps(StepFeature[Any]):
    """Works for every runner: it needs the plan alone. It launches all work before the forward pass."""

    def __init__(self, adapters: HostAdapters) -> None:
        self._adapters = adapters
        self._slots = adapters.slots
        self._slot_of: dict[int, int] = {}  # by sequence; others have the base
        self._written: tuple[tuple[ScheduledSequence, ...], int] = ((), 0)  # sequences and decodes of the last ``_put``

    def add(self, new: NewSequence) -> None:
        self._written = ((), 0)
        if new.adapter_slot != NO_ADAPTER_SLOT:
            self._slot_of[new.seq] = new.adapter_slot

    def remove(self, seq: int) -> None:
        self._written = ((), 0)
        self._slot_of.pop(seq, None)

    def part(self, plan: StepPlan) -> None:
        for adapter in plan.adapters:
            self._slots.write(adapter.slot, self._adapters.parts(adapter.digest))
        step = (plan.scheduled, plan.num_decodes)
        if plan.scheduled and step != self._written:
            self._put(plan)
            self._written = step

    def _put(self, plan: StepPlan) -> None:
        """Set the slots of all tokens, and of those with logits: all of a decode, the last of a prompt that samples."""
        slots = np.array([self._slot_of.get(item.seq, NO_ADAPTER_SLOT) for item in plan.scheduled], dtype=np.int32)
        lengths = np.array([item.num_tokens for item in plan.scheduled])
        kept = np.array([min(item.num_samples, 1) for item in plan.scheduled])
        kept[: plan.num_decodes] = lengths[: plan.num_decodes]
        self._slots.tokens.put(np.repeat(slots, lengths), np.repeat(slots, kept))
