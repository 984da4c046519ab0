"""FirstOutputs: the outputs of a prompt of several choices, kept until each choice has one.

A node resumes the choices whose output it gets, and starts all of them if it gets none. First outputs may arrive in
parts; if the node ended between two parts, or sent a malformed one, the other choices would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.pb import pdserve_pb2 as pb


class FirstOutputs:
    """Without choices, outputs pass at once."""

    def __init__(self, num_choices: int) -> None:
        self._missing = set(range(num_choices))
        self._kept: list[pb.Output] = []

    def add(self, output: pb.Output) -> Sequence[pb.Output]:
        """Take an output of one of the choices. Return all that may be handled now, in their order."""
        if not self._missing:
            return (output,)
        self._missing.discard(output.choice)
        self._kept.append(output)
        if self._missing:
            return ()
        first = self._kept
        self._kept = []
        return first
