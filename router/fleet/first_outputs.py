"""FirstOutputs: the first output of each choice of a request, kept until all choices have one.

A node resumes the choices whose output it gets, and starts all of them if it gets none. First outputs may arrive in
parts; if the node ended between two parts, the other choices would be lost.
"""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.pb import pdserve_pb2 as pb
from router.errors import MalformedOutput


class FirstOutputs:
    def __init__(self, num_choices: int) -> None:
        self._missing = set(range(num_choices))
        self._outputs: list[pb.Output] = []

    def add(self, output: pb.Output) -> Sequence[pb.Output]:
        """Return all outputs once each choice has one, until then none.

        Raises MalformedOutput for a choice that has one.
        """
        if output.choice not in self._missing:
            raise MalformedOutput("choice", f"choice {output.choice} before the first of choice {min(self._missing)}")
        self._missing.remove(output.choice)
        self._outputs.append(output)
        return () if self._missing else self._outputs
