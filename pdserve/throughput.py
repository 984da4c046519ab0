"""Measured costs of a node's steps and reads, as the node reports them to routers."""

from __future__ import annotations

import msgspec

HALF_LIFE = 10.0  # seconds after which a measurement that is not repeated counts half


class LinearCost(msgspec.Struct, frozen=True, array_like=True):
    """Seconds as ``base + slope × count``. All zeros: nothing has been measured."""

    base: float = 0.0
    slope: float = 0.0

    def __bool__(self) -> bool:
        return self.base > 0.0 or self.slope > 0.0

    def at(self, count: float) -> float:
        return self.base + self.slope * count

    def aged(self, seconds: float) -> LinearCost:
        """The cost after so many seconds without a measurement: it decays, so that a slow path is tried again."""
        share = 0.5 ** min(seconds / HALF_LIFE, 10.0)
        return LinearCost(self.base * share, self.slope * share)


class Throughput(msgspec.Struct, frozen=True, array_like=True):
    prompt: LinearCost = LinearCost()  # a step, by the prompt tokens that it computes
    decode: LinearCost = LinearCost()  # a step that only decodes, by sequences
    read: LinearCost = LinearCost()  # a KV read, by tokens
