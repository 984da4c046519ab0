"""How fast a node is, as it measures itself and tells routers."""

from __future__ import annotations

import msgspec


class Line(msgspec.Struct, frozen=True, array_like=True):
    """Seconds: ``base``, and ``slope`` for each of something. All zeros: nothing has been measured."""

    base: float = 0.0
    slope: float = 0.0

    def __bool__(self) -> bool:
        return self.base > 0.0 or self.slope > 0.0

    def at(self, count: float) -> float:
        return self.base + self.slope * count


class Pace(msgspec.Struct, frozen=True, array_like=True):
    """What takes a node how long."""

    prompt: Line = Line()  # a step, by the prompt tokens that it computes
    decode: Line = Line()  # a step that only decodes, by sequences
    read: Line = Line()  # reading KV, by tokens
