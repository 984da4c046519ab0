"""What clients have seen of a router of late: a sample each second, and figures over windows of them. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

from pdserve.live import LiveHistory, LiveTraffic, Quantiles
from pdserve.metrics import quantile

#: Outcomes of requests that are no client's doing.
FAILURES = ("overloaded_error", "timeout_error", "node_error", "server_error")

_COLUMNS = LiveHistory.__struct_fields__
_RATES, _MINUTE, _KEPT = 10, 60, 300  # seconds: of rates, of quantiles, of the history


class TrafficSample(msgspec.Struct, frozen=True):
    """All but the first, the gauges and shares are counted since the start."""

    at: float  # seconds, of any clock that is steady
    running: int
    waiting: int
    outcomes: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    ttft: Sequence[int]  # counts of the fine buckets of the tallies
    itl: Sequence[int]
    kv_prefill: float | None
    kv_decode: float | None

    @property
    def output_tokens(self) -> int:
        """That have come: the first ones, and those behind another. (First ones of further choices are missing.)"""
        return sum(self.ttft) + sum(self.itl)


class TrafficLog:
    """``ttft_bounds`` and ``itl_bounds`` are those of the samples' buckets."""

    def __init__(self, ttft_bounds: Sequence[float], itl_bounds: Sequence[float]) -> None:
        self._bounds = ttft_bounds, itl_bounds
        self._samples: deque[TrafficSample] = deque(maxlen=_MINUTE + 1)
        self._points: deque[dict[str, float | None]] = deque(maxlen=_KEPT)
        self.second = -1  # of the latest sample

    def add(self, second: int, sample: TrafficSample) -> None:
        """The sample of a second; some may be left out."""
        self._samples.append(sample)
        self.second = second
        since = self._samples[-2] if len(self._samples) > 1 else sample
        passed = max(sample.at - since.at, 1e-9)
        point: dict[str, float | None] = {
            "seconds": second,
            "requests": sum(_ended(sample, since).values()) / passed,
            "failures": _failures(_ended(sample, since)) / passed,
            "output_tokens": (sample.output_tokens - since.output_tokens) / passed,
            "running": sample.running,
            "waiting": sample.waiting,
            "kv_prefill": sample.kv_prefill,
            "kv_decode": sample.kv_decode,
        }
        for name, times in zip(("ttft", "itl"), self._times(self._since(_RATES)), strict=True):
            point |= {f"{name}_p50": times.p50, f"{name}_p99": times.p99}
        self._points.append(point)

    def traffic(self) -> LiveTraffic:
        """As of the latest sample; there has to be one."""
        now, then, earlier = self._samples[-1], self._since(_RATES), self._since(_MINUTE)
        passed = max(now.at - then.at, 1e-9)
        outcomes = _ended(now, earlier)
        prompts = now.prompt_tokens - earlier.prompt_tokens
        ttft, itl = self._times(earlier)
        return LiveTraffic(
            running=now.running,
            waiting=now.waiting,
            request_rate=sum(_ended(now, then).values()) / passed,
            failure_rate=_failures(_ended(now, then)) / passed,
            prompt_token_rate=(now.prompt_tokens - then.prompt_tokens) / passed,
            output_token_rate=(now.output_tokens - then.output_tokens) / passed,
            cached_share=min(1.0, (now.cached_tokens - earlier.cached_tokens) / prompts) if prompts else None,
            outcomes={name: count for name, count in sorted(outcomes.items()) if count},
            ttft=ttft,
            itl=itl,
        )

    def history(self, after: int = -1) -> LiveHistory:
        """What is kept of the seconds after that one."""
        points = [point for point in self._points if (point["seconds"] or 0) > after]
        return msgspec.convert({name: [point[name] for point in points] for name in _COLUMNS}, LiveHistory)

    def _since(self, seconds: int) -> TrafficSample:
        """The latest sample that is as old, or the oldest one."""
        until = self._samples[-1].at - seconds + 0.5
        return next((sample for sample in reversed(self._samples) if sample.at <= until), self._samples[0])

    def _times(self, since: TrafficSample) -> tuple[Quantiles, Quantiles]:
        """TTFT and ITL of what has come since."""
        now, (ttft, itl) = self._samples[-1], self._bounds
        return _quantiles(ttft, now.ttft, since.ttft), _quantiles(itl, now.itl, since.itl)


def _quantiles(bounds: Sequence[float], now: Sequence[int], then: Sequence[int]) -> Quantiles:
    counts = [after - before for after, before in zip(now, then, strict=True)]
    return Quantiles(quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99))


def _ended(now: TrafficSample, then: TrafficSample) -> Counter[str]:
    return Counter(now.outcomes) - Counter(then.outcomes)


def _failures(outcomes: Mapping[str, int]) -> int:
    return sum(outcomes.get(name, 0) for name in FAILURES)
