"""How fast a node is, as it measures itself and tells routers."""

from __future__ import annotations

import msgspec

HALF_LIFE = 10.0  # seconds, of what is believed of times that are not measured any more


class CostLine(msgspec.Struct, frozen=True, array_like=True):
    """Seconds: ``base``, and ``slope`` for each of something. All zeros: nothing has been measured."""

    base: float = 0.0
    slope: float = 0.0

    def __bool__(self) -> bool:
        return self.base > 0.0 or self.slope > 0.0

    def at(self, count: float) -> float:
        return self.base + self.slope * count

    def aged(self, seconds: float) -> CostLine:
        """As far as it is believed when nothing has been measured for so long: what seems slow is not used, and would
        seem so for ever.
        """
        share = 0.5 ** min(seconds / HALF_LIFE, 10.0)
        return CostLine(self.base * share, self.slope * share)


class Throughput(msgspec.Struct, frozen=True, array_like=True):
    """What takes a node how long."""

    prompt: CostLine = CostLine()  # a step, by the prompt tokens that it computes
    decode: CostLine = CostLine()  # a step that only decodes, by sequences
    read: CostLine = CostLine()  # reading KV, by tokens
