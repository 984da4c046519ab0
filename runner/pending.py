"""Steps between their launch and their result."""

from __future__ import annotations

from dataclasses import dataclass

from pdserve.records import StepOutput


@dataclass(frozen=True, slots=True)
class FinishedStep:
    """A pdserve.protocols.PendingStep of a runner that computes while it launches."""

    output: StepOutput

    def result(self) -> StepOutput:
        return self.output
