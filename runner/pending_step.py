"""Steps between their launch and their result."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pdserve.protocols import PendingStep
from pdserve.records import StepOutput


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A pdserve.protocols.PendingStep of which the device has nothing left to compute."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output


@dataclass(frozen=True, slots=True)
class ComputedStep:
    """A pdserve.protocols.PendingStep that samples nothing: no tokens are awaited, but its KV is."""

    output: StepOutput
    computed: torch.cuda.Event

    def result(self) -> StepOutput:
        self.computed.synchronize()
        return self.output


def step_without_samples(step: int, device: torch.device) -> PendingStep:
    """The step whose forward pass has just been given to the device."""
    output = StepOutput(step)
    if device.type != "cuda":
        return FinishedStep(output)
    computed = torch.cuda.Event()
    computed.record()
    return ComputedStep(output, computed)
