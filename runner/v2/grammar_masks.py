"""Masks of the tokens that grammars allow, on the device."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from pdserve.records import StepPlan, TokenMask
from runner.step_parts import StepFeature, StepPart
from runner.v2.input_batch import InputBatch
from runner.v2.sampling_metadata import MetadataBuilder


class GrammarMasks(StepFeature[InputBatch]):
    """Copies masks to the device behind the forward pass, which does not wait for them. On the last stage only."""

    def __init__(self, builder: MetadataBuilder) -> None:
        self._builder = builder

    def part(self, plan: StepPlan) -> StepPart[InputBatch] | None:
        return _Part(self._builder, plan.masks) if plan.masks else None


@dataclass
class _Part(StepPart[InputBatch]):
    builder: MetadataBuilder
    masks: tuple[TokenMask, ...]

    def after_forward(self, batch: InputBatch, hidden: Tensor) -> None:
        index_of = {(mask.seq, mask.drafts_before): index for index, mask in enumerate(self.masks)}
        rows = zip(batch.indices.sampled, batch.indices.drafts_before.tolist(), strict=True)
        of_sample = [index_of.get((s.seq, before), -1) for s, before in rows for _ in range(s.num_samples)]
        batch.masks = self.builder.build_masks([mask.words for mask in self.masks], of_sample)
