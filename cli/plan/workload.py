"""A workload: lengths of prompts and outputs, and arrivals that are random or follow a trace."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import NormalDist, fmean

import msgspec

from cli.virtual_fleet.jobs import Job, Run
from pdserve.errors import ConfigError, shown

BLOCK = 512  # tokens per hash id of a trace
SAMPLES = 8_000  # requests that represent a distribution
LONGEST = 1 << 20  # tokens
MAX_SIGMA = 4.0


@dataclass(frozen=True)
class Workload:
    """Requests in order of arrival; each field has a value per request."""

    prompts: tuple[int, ...]  # tokens
    cached: tuple[int, ...]  # prompt tokens found in a prefix cache
    outputs: tuple[int, ...]  # tokens, at least 1
    gaps: tuple[float, ...]  # time since the previous request, in mean gaps
    shared: tuple[tuple[Run, ...], ...]  # beginnings of prompts: the same runs are the same tokens

    def first(self, count: int) -> Workload:
        """Return the first ``count`` requests, or all if there are fewer."""
        return Workload(
            self.prompts[:count], self.cached[:count], self.outputs[:count], self.gaps[:count], self.shared[:count]
        )

    def jobs(self, rate: float) -> list[Job]:
        """Return the requests for a virtual fleet, at ``rate`` requests per second."""
        times = accumulate(gap / rate for gap in self.gaps)
        fields = zip(times, self.prompts, self.outputs, self.shared, strict=True)
        return [Job(at, prompt, output, shared) for at, prompt, output, shared in fields]

    @cached_property
    def mean_prompt(self) -> float:
        return fmean(self.prompts)

    @cached_property
    def mean_output(self) -> float:
        return fmean(self.outputs)

    @cached_property
    def mean_decoded(self) -> float:
        """Mean output tokens after the first one."""
        return fmean(output - 1 for output in self.outputs)

    @cached_property
    def mean_context(self) -> float:
        """Mean context of a decoding sequence, weighted by its decode steps."""
        steps = sum(output - 1 for output in self.outputs) or 1
        pairs = zip(self.prompts, self.outputs, strict=True)
        return sum((output - 1) * (prompt + output / 2) for prompt, output in pairs) / steps


class TraceRequest(msgspec.Struct, frozen=True):
    """A request of a trace; lengths are in tokens."""

    timestamp: float  # ms since the start of the trace
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]

    @property
    def at(self) -> float:
        """Seconds since the start of the trace."""
        return self.timestamp / 1000


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """Read a trace in Mooncake's format (github.com/kvcache-ai/Mooncake, FAST25-release/traces).

    Each JSON line has ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, one id per 512 prompt
    tokens. Prompts with equal leading ids share these tokens. Raises ConfigError.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    yield msgspec.json.decode(line, type=TraceRequest)
                except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
                    raise ConfigError(f"{path}, line {number}: {exc}; use a trace in Mooncake's format") from exc
    except OSError as exc:
        raise ConfigError(f"trace {path} cannot be read ({exc.strerror})") from exc


def workload_of_trace(requests: Sequence[TraceRequest]) -> tuple[Workload, float]:
    """Return the workload of a trace and its requests per second.

    Cached prompt tokens assume one unlimited cache for all nodes. Virtual fleets have caches of their own.
    """
    if len(requests) < 2 or requests[-1].at <= requests[0].at:
        raise ConfigError(f"the trace has {len(requests)} requests at one time; it needs two at different times")
    contents: dict[int, int] = {}  # token ids by hash id
    cached = list[int]()
    for request in requests:
        new = next((index for index, number in enumerate(request.hash_ids) if number not in contents), None)
        blocks = len(request.hash_ids) if new is None else new
        cached.append(min(blocks * BLOCK, request.input_length - 1))
        for number in request.hash_ids:
            contents.setdefault(number, len(contents))
    mean = (requests[-1].at - requests[0].at) / (len(requests) - 1)
    times = [requests[0].at - mean, *(request.at for request in requests)]
    gaps = tuple(max(0.0, after - before) / mean for before, after in pairwise(times))
    prompts = tuple(request.input_length for request in requests)
    outputs = tuple(max(1, request.output_length) for request in requests)
    shared = tuple(_runs(request, contents) for request in requests)
    return Workload(prompts, tuple(cached), outputs, gaps, shared), 1.0 / mean


def _runs(request: TraceRequest, contents: Mapping[int, int]) -> tuple[Run, ...]:
    sizes = (min(BLOCK, request.input_length - begin) for begin in range(0, request.input_length, BLOCK))
    return tuple(Run(contents[number], size) for number, size in zip(request.hash_ids, sizes, strict=False))


def workload_of(
    prompt_tokens: str, output_tokens: str, cached_share: float, samples: int = SAMPLES, seed: int = 1
) -> Workload:
    """Return a workload with Poisson arrivals and independent lengths (see ``quantiles``).

    The cached share of each prompt is the beginning of one long text, which fills the prefix cache of each node.
    """
    if not 0.0 <= cached_share < 1.0:
        raise ConfigError(f"cached share {cached_share:g} is not within 0 … 1; the last token is never cached")
    rng = random.Random(seed)
    prompts = _drawn(quantiles(prompt_tokens), samples, rng)
    outputs = _drawn(quantiles(output_tokens), samples, rng)
    drawn = [rng.expovariate(1.0) for _ in range(samples)]
    mean = fmean(drawn)
    cached = tuple(int(cached_share * prompt) for prompt in prompts)
    shared = tuple((Run(0, count),) if count else () for count in cached)
    return Workload(prompts, cached, outputs, tuple(gap / mean for gap in drawn), shared)


def _drawn(quantile: Callable[[float], float], samples: int, rng: random.Random) -> tuple[int, ...]:
    """Return evenly spaced quantiles in random order, so the sample has exactly the requested percentiles."""
    values = [min(LONGEST, max(1, round(quantile((index + 0.5) / samples)))) for index in range(samples)]
    rng.shuffle(values)
    return tuple(values)


def quantiles(text: str) -> Callable[[float], float]:
    """Return the quantile function of lengths given as one of

        2048                 constant
        256-1024             uniform
        p50=900,p99=8000     log-normal with these percentiles
        mean=1500,p99=8000   log-normal with this mean and percentile
        mean=2000,sigma=0.8  log-normal with this mean and standard deviation of the logarithm

    Raises ConfigError.
    """
    if re.fullmatch(r"\d+", text) and 1 <= (length := int(text)) <= LONGEST:
        return lambda share: length
    if match := re.fullmatch(r"(\d+)-(\d+)", text):
        low, high = map(int, match.groups())
        if 1 <= low <= high <= LONGEST:
            return lambda share: low + (high - low) * share
    if match := re.fullmatch(r"(mean|p\d+)=(\d+),p(\d+)=(\d+)", text):
        return _log_normal(text, match[1], int(match[2]), int(match[3]), int(match[4]))
    if match := re.fullmatch(r"mean=(\d+),sigma=(\d*\.?\d+)", text):
        mean = int(match[1])
        sigma = float(match[2])
        if 1 <= mean <= LONGEST and sigma <= MAX_SIGMA:
            return _log_normal_of(math.log(mean) - sigma * sigma / 2, sigma)
    raise ConfigError(
        f"length {shown(text)} is invalid; use 2048, 256-1024, p50=900,p99=8000, mean=1500,p99=8000 or "
        f"mean=2000,sigma=0.8, in tokens up to {LONGEST} with a sigma up to {MAX_SIGMA:g}"
    )


def _log_normal(text: str, first: str, value: int, percent: int, upper: int) -> Callable[[float], float]:
    """Fit the normal distribution m + s·z of the logarithms: percentiles are linear in s, the mean is exp(m + s²/2)."""
    low = 0 if first == "mean" else int(first[1:])
    if not (50 < percent < 100 and low < percent and 1 <= value <= upper <= LONGEST and (low > 0 or first == "mean")):
        raise ConfigError(
            f"length {text!r}: the second value must be a percentile above p50 and not below the first value"
        )
    z = NormalDist().inv_cdf(percent / 100)
    ratio = math.log(upper / value)
    if first == "mean":
        if z * z < 2 * ratio:
            raise ConfigError(
                f"length {text!r}: no log-normal distribution has p{percent} at {upper / value:.1f} times its mean"
            )
        s = z - math.sqrt(z * z - 2 * ratio)
        m = math.log(value) - s * s / 2
    else:
        z_low = NormalDist().inv_cdf(low / 100)
        s = ratio / (z - z_low)
        m = math.log(value) - s * z_low
    return _log_normal_of(m, s)


def _log_normal_of(m: float, s: float) -> Callable[[float], float]:
    return lambda share: math.exp(m + s * NormalDist().inv_cdf(share))
