"""Step parts: work that some plans ask for beside output tokens. Steps without parts pay nothing for them.

    feature, one per runner:  add(sequence) · remove(sequence) · part(plan) → the part of one step, or None
    part, one per step:       before_forward → forward pass → after_forward → sampling → on_result

| feature        | does                                            | file                         |
|----------------|-------------------------------------------------|------------------------------|
| PromptScoring  | log-probabilities of prompt tokens              | sampling/prompt_logprobs.py  |
| PromptPooling  | vectors of prompts, on nodes that generate nothing | pooling.py                |
| AdapterSteps   | slots of adapters and of tokens                 | adapters/adapter_steps.py    |
| ImageEncoding  | embeddings and positions of images              | image_encoding.py            |
| BlockDigests   | digests of KV blocks                            | kv_digest.py                 |
| BlockCopies    | copies of KV blocks for new sequences           | kv_cache.py                  |
| GrammarMasks   | masks of allowed tokens on the device           | v2/grammar_masks.py          |
| ReturnedTokens | tokens from the last pipeline stage to the first | v1/ and v2/returned_tokens.py |
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from torch import Tensor

from pdserve.protocols import PendingStep
from pdserve.records import NewSequence, StepOutput, StepPlan

#: A runner's own record of the batch that it computes.
BatchT_contra = TypeVar("BatchT_contra", contravariant=True)


class StepPart(Generic[BatchT_contra]):
    """One step's share of a feature. Hooks run in the order below; each does nothing by default."""

    #: Whether ``after_forward`` needs the hidden states of all tokens; such a step runs without a CUDA graph.
    needs_all_hidden_states = False

    def before_forward(self, batch: BatchT_contra) -> None:
        """Launch work behind the copy of the step's inputs and before the forward pass."""

    def after_forward(self, batch: BatchT_contra, hidden: Tensor) -> None:
        """Launch work behind the forward pass. ``hidden`` [tokens, hidden_size] are its hidden states."""

    def after_step(self) -> None:
        """Launch work behind the whole step, also if the plan scheduled no sequence."""

    def on_result(self, output: StepOutput) -> StepOutput:
        """Return the output with this part's result. May wait for the device."""
        return output


class StepFeature(Generic[BatchT_contra]):
    """Follows sequences from plan to plan and makes the parts of steps."""

    def add(self, new: NewSequence) -> None:
        """Start to follow a sequence."""

    def remove(self, seq: int) -> None:
        """Stop to follow a sequence; an unknown one is ignored."""

    def weights_changed(self) -> None:
        """Forget what was computed with other weights. No step is in flight."""

    def part(self, plan: StepPlan) -> StepPart[BatchT_contra] | None:
        """Return the part of this step, None if the plan does not ask for the feature."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class StepWithParts:
    """A pdserve.protocols.PendingStep whose output the parts complete."""

    step: PendingStep
    parts: Sequence[StepPart[Any]]

    def done(self) -> bool:
        return self.step.done()

    def result(self) -> StepOutput:
        output = self.step.result()
        for part in self.parts:
            output = part.on_result(output)
        return output
