"""Moves copies of experts between steps, so that they follow the load. Every shard of a stage does it at one step."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from pdserve.records import StepPlan
from runner.distributed.parallel_state import ParallelState
from runner.models.layers.expert_placement import Placement, busiest_load, next_placement
from runner.models.layers.moe import MixtureOfExperts
from runner.step_parts import StepFeature, StepPart

_log = logging.getLogger(__name__)


class ExpertBalance(StepFeature[Any], StepPart[Any]):
    """Reads the counted loads every ``ep_rebalance_steps`` steps, which waits for the device; other steps pay nothing.

    Earlier loads count half with each reading.
    """

    def __init__(self, parallel: ParallelState, layers: Sequence[MixtureOfExperts]) -> None:
        """``layers`` are those of this rank with copies. Connects the shards, so that measured memory includes that."""
        self._parallel, self._interval = parallel, parallel.position.parallel.ep_rebalance_steps
        self._layers = [(layer, layer.copies) for layer in layers if layer.copies is not None]
        self._steps = 0
        position = parallel.position
        others = [shard for shard in range(position.parallel.tp) if shard != position.shard]
        sent, *received = torch.zeros(1 + len(others), 1, device=parallel.device)
        parallel.exchange([(sent, shard) for shard in others], list(zip(received, others, strict=True)))

    def part(self, plan: StepPlan) -> StepPart[Any] | None:
        if plan.step < 0 or not plan.scheduled:  # the warm-up, and plans that only rank 0 may get
            return None
        if not self._steps:
            for _, copies in self._layers:
                copies.load.zero_()
        self._steps += 1
        return self if self._steps % self._interval == 0 else None

    def after_step(self) -> None:
        """Choose the copies anew, and copy the weights of those that are new."""
        # The sum is the same number on all shards, so they agree on the placement.
        loads = self._parallel.all_reduce(torch.stack([copies.load for _, copies in self._layers])).tolist()
        before = after = mean = moved = 0.0
        for (layer, copies), of_layer in zip(self._layers, loads, strict=True):
            placement = next_placement(of_layer, copies.placement)
            mean += sum(of_layer) / len(placement)
            before += busiest_load(of_layer, copies.placement)
            after += busiest_load(of_layer, placement)
            moved += self._move(layer, placement)
            copies.load.div_(2, rounding_mode="floor")
        if moved and self._parallel.position.shard == 0:
            _log.info(
                "%d copies of experts moved: the busiest shard has %.2f times the mean load, before %.2f",
                moved,
                after / mean,
                before / mean,
            )

    def _move(self, layer: MixtureOfExperts, placement: Placement) -> int:
        """Return the number of copies that were moved, of all shards."""
        copies, me = layer.copies, self._parallel.position.shard
        assert copies is not None
        moves = list(copies.moves(placement))
        slots = layer.slot_tensors()
        sends = [(rows[row], to) for source, row, to, _ in moves if source == me for rows in slots]
        receives = [(rows[row], source) for source, _, to, row in moves if to == me for rows in slots]
        self._parallel.exchange(sends, receives)
        if placement != copies.placement:
            copies.place(placement)
        return len(moves)
