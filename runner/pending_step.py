"""Steps between launch and result, and copies of their results to the host."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from pdserve.records import StepOutput


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A pdserve.protocols.PendingStep whose output is known; its result waits for the KV alone."""

    output: StepOutput
    computed: torch.cuda.Event | None = None  # None if the device has nothing left to compute

    def result(self) -> StepOutput:
        if self.computed is not None:
            self.computed.synchronize()
        return self.output

    def done(self) -> bool:
        return self.computed is None or self.computed.query()


def step_without_samples(step: int, device: torch.device) -> FinishedStep:
    """Return the step whose forward pass was just launched on ``device``."""
    computed = None
    if device.type == "cuda":
        computed = torch.cuda.Event()
        computed.record()
    return FinishedStep(StepOutput(step), computed)


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor on its way to the host, ordered behind earlier work on the current stream."""

    tensor: Tensor  # on the host, complete once ``arrived`` has happened
    arrived: torch.cuda.Event | None  # None if the device is the host

    @classmethod
    def start(cls, tensor: Tensor) -> HostCopy:
        """Begin to copy ``tensor`` to pinned memory; the host does not wait."""
        if tensor.device.type != "cuda":
            return cls(tensor, None)
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)
        arrived = torch.cuda.Event()
        arrived.record()
        return cls(host, arrived)

    def done(self) -> bool:
        return self.arrived is None or self.arrived.query()

    def wait(self) -> Tensor:
        if self.arrived is not None:
            self.arrived.synchronize()
        return self.tensor
