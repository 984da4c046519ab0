"""Client traffic: a sample each second, and rates and quantiles over windows of samples. Pure."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence

import msgspec

from pdserve.metrics import quantile
from router.dashboard.live import LiveHistory, LiveTraffic, Quantiles

# Outcomes that count as failures; client errors do not.
FAILURES = ("overloaded_error", "timeout_error", "node_error", "server_error")

_COLUMNS = LiveHistory.__struct_fields__
# Windows of rates, quantiles and history, in seconds. History and latest figures use equal windows.
_RATE_WINDOW = 10
_QUANTILE_WINDOW = 60
_HISTORY = 300


class TrafficSample(msgspec.Struct, frozen=True):
    """Counters since the router's start, next to gauges (running, waiting, kv_*, handoff_*)."""

    at: float  # seconds of a monotonic clock
    running: int
    waiting: int
    outcomes: Mapping[str, int]
    prompt_tokens: int
    cached_tokens: int
    ttft: Sequence[int]  # counts per fine bucket of the histogram
    itl: Sequence[int]
    kv_prefill: float | None
    kv_decode: float | None
    handoff_p50: float | None = None
    handoff_p99: float | None = None
    kv_read_rate: float | None = None

    @property
    def output_tokens(self) -> int:
        """First tokens and their successors; first tokens of further choices are missing."""
        return sum(self.ttft) + sum(self.itl)


class TrafficLog:
    """``ttft_bounds`` and ``itl_bounds`` are the bucket bounds of the samples."""

    def __init__(self, ttft_bounds: Sequence[float], itl_bounds: Sequence[float]) -> None:
        self._bounds = ttft_bounds, itl_bounds
        self._samples: deque[TrafficSample] = deque(maxlen=_QUANTILE_WINDOW + 1)
        self._points: deque[dict[str, float | None]] = deque(maxlen=_HISTORY)
        self.second = -1  # second of the latest sample; -1: no sample

    def add(self, second: int, sample: TrafficSample) -> None:
        self._samples.append(sample)
        self.second = second
        requests, failures, output_tokens = _rates(sample, self._since(_RATE_WINDOW))
        point: dict[str, float | None] = {
            "seconds": second,
            "requests": requests,
            "failures": failures,
            "output_tokens": output_tokens,
            "running": sample.running,
            "waiting": sample.waiting,
            "kv_prefill": sample.kv_prefill,
            "kv_decode": sample.kv_decode,
            "handoff_p50": sample.handoff_p50,
            "handoff_p99": sample.handoff_p99,
            "kv_read_rate": sample.kv_read_rate,
        }
        for name, times in zip(("ttft", "itl"), self._times(self._since(_QUANTILE_WINDOW)), strict=True):
            point |= {f"{name}_p50": times.p50, f"{name}_p99": times.p99}
        self._points.append(point)

    def traffic(self) -> LiveTraffic:
        """Rates and quantiles at the latest sample, which must exist."""
        now = self._samples[-1]
        then = self._since(_RATE_WINDOW)
        earlier = self._since(_QUANTILE_WINDOW)
        request_rate, failure_rate, output_token_rate = _rates(now, then)
        prompts = now.prompt_tokens - earlier.prompt_tokens
        ttft, itl = self._times(earlier)
        return LiveTraffic(
            running=now.running,
            waiting=now.waiting,
            request_rate=request_rate,
            failure_rate=failure_rate,
            prompt_token_rate=(now.prompt_tokens - then.prompt_tokens) / _elapsed(now, then),
            output_token_rate=output_token_rate,
            cached_share=min(1.0, (now.cached_tokens - earlier.cached_tokens) / prompts) if prompts else None,
            outcomes=dict(sorted(_finished(now, earlier).items())),
            ttft=ttft,
            itl=itl,
        )

    def history(self, after: int = -1) -> LiveHistory:
        """The stored seconds after ``after``."""
        points = [point for point in self._points if (point["seconds"] or 0) > after]
        return msgspec.convert({name: [point[name] for point in points] for name in _COLUMNS}, LiveHistory)

    def _since(self, seconds: int) -> TrafficSample:
        """The latest sample at least ``seconds`` old, or the oldest one."""
        until = self._samples[-1].at - seconds + 0.5
        return next((sample for sample in reversed(self._samples) if sample.at <= until), self._samples[0])

    def _times(self, since: TrafficSample) -> tuple[Quantiles, Quantiles]:
        now = self._samples[-1]
        ttft, itl = self._bounds
        return _quantiles(ttft, now.ttft, since.ttft), _quantiles(itl, now.itl, since.itl)


def _quantiles(bounds: Sequence[float], now: Sequence[int], then: Sequence[int]) -> Quantiles:
    counts = [after - before for after, before in zip(now, then, strict=True)]
    return Quantiles(quantile(bounds, counts, 0.5), quantile(bounds, counts, 0.99))


def _elapsed(now: TrafficSample, then: TrafficSample) -> float:
    return max(now.at - then.at, 1e-9)


def _rates(now: TrafficSample, then: TrafficSample) -> tuple[float, float, float]:
    """Finished requests, failures and output tokens per second."""
    elapsed = _elapsed(now, then)
    finished = _finished(now, then)
    failures = sum(finished[name] for name in FAILURES)
    return finished.total() / elapsed, failures / elapsed, (now.output_tokens - then.output_tokens) / elapsed


def _finished(now: TrafficSample, then: TrafficSample) -> Counter[str]:
    return Counter(now.outcomes) - Counter(then.outcomes)
