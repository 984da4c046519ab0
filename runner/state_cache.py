"""The recurrent states of one rank: one allocation of slots, and the views that layers index."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pdserve.kv.layout import KVRegion
from pdserve.kv.states import NO_SLOT, HeadStateSpec, StateLayout, StateShare
from pdserve.records import NewSequence, StepOutput, StepPlan
from runner.registered_memory import registrable_zeros
from runner.step_parts import StepFeature, StepPart


class StateCache:
    """Zeroed memory of ``layout``.

    ``delta[l]``  [num_slots, value_heads, value_dim, key_dim] float32, a strided view; none for short convolutions
    ``conv[l]``   [num_slots, channels, conv_width - 1] of the spec's dtype, a strided view
    """

    def __init__(self, layout: StateLayout, device: torch.device, share: StateShare) -> None:
        """``share`` is the rank's part of the model's state. Raises CapacityError if the device has no room."""
        self.layout = layout
        self.share = share
        self.slots = registrable_zeros(layout.total_bytes, device, "recurrent states")
        self.slots = self.slots.view(layout.num_slots, layout.slot_bytes)  # [num_slots, slot_bytes] uint8
        spec = layout.spec
        conv = (spec.channels, spec.conv_width - 1)
        begins = range(0, layout.slot_bytes, spec.layer_bytes)
        self.delta: list[Tensor] = []
        if isinstance(spec, HeadStateSpec):
            delta = (spec.value_heads, spec.value_dim, spec.key_dim)
            self.delta = [self._view(begin, torch.float32, delta) for begin in begins]
        self.conv = [self._view(begin + spec.head_state_bytes, getattr(torch, spec.dtype), conv) for begin in begins]

    def zero(self, slot: int) -> None:
        self.slots[slot].zero_()

    def copy(self, source: int, target: int) -> None:
        """Copy in the order of the current stream."""
        self.slots[target].copy_(self.slots[source], non_blocking=True)

    @torch.inference_mode()
    def clear(self) -> None:
        """Zero every slot."""
        self.slots.zero_()

    @property
    def region(self) -> KVRegion:
        return KVRegion(
            address=self.slots.data_ptr(),
            num_bytes=self.layout.total_bytes,
            device=self.slots.device.type,
            device_id=self.slots.device.index or 0,
        )

    def _view(self, begin: int, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
        """Return the tensor that begins at byte ``begin`` of every slot."""
        num_bytes = dtype.itemsize * torch.Size(shape).numel()
        view: Tensor = self.slots[:, begin : begin + num_bytes].view(dtype).unflatten(1, tuple(shape))
        return view


class StateSlotCopies(StepFeature[object]):
    """Starts sequences with zeros or a copy of another slot, and copies slots behind steps as plans order."""

    def __init__(self, cache: StateCache) -> None:
        self._cache = cache

    def add(self, new: NewSequence) -> None:
        assert new.state_slot != NO_SLOT, f"sequence {new.seq} has no slot for its recurrent state"
        if new.state_from == NO_SLOT:
            self._cache.zero(new.state_slot)
        elif new.state_from != new.state_slot:
            self._cache.copy(new.state_from, new.state_slot)

    def part(self, plan: StepPlan) -> StepPart[object] | None:
        writes = plan.state_copies or plan.state_snapshots
        return _CopiesBehindStep(self._cache, plan.state_copies) if writes else None


class _CopiesBehindStep(StepPart[object]):
    def __init__(self, cache: StateCache, copies: Sequence[tuple[int, int]]) -> None:
        self._cache = cache
        self._copies = copies
        self._done: torch.cuda.Event | None = None

    def after_step(self) -> None:
        for source, target in self._copies:
            self._cache.copy(source, target)
        if self._cache.slots.is_cuda:
            self._done = torch.cuda.Event()
            self._done.record()

    def on_result(self, output: StepOutput) -> StepOutput:
        """Wait for the copies, and for snapshots amid the step: peers may read them from now on."""
        if self._done is not None:
            self._done.synchronize()
        return output
