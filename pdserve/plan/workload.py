"""What is asked for: requests with prompts and outputs of some lengths, that arrive at random or as a trace has it."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from statistics import NormalDist, fmean

import msgspec

from pdserve.errors import ConfigError

BLOCK = 512  # tokens that a hash id of a trace stands for
SAMPLES = 8_000  # requests that stand for a distribution
LONGEST = 1 << 20  # tokens


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival; a value of each of them in every field."""

    prompts: tuple[int, ...]  # tokens
    cached: tuple[int, ...]  # of these, found in a prefix cache
    outputs: tuple[int, ...]  # tokens, at least 1
    gaps: tuple[float, ...]  # before each of them; on average 1, whatever the rate

    @cached_property
    def mean_prompt(self) -> float:
        return fmean(self.prompts)

    @cached_property
    def mean_output(self) -> float:
        return fmean(self.outputs)

    @cached_property
    def mean_decoded(self) -> float:
        """Tokens of an output behind the first one."""
        return fmean(output - 1 for output in self.outputs)

    @cached_property
    def mean_context(self) -> float:
        """Tokens behind a sequence at a moment of its decoding: longer outputs are met more often."""
        steps = sum(output - 1 for output in self.outputs) or 1
        pairs = zip(self.prompts, self.outputs, strict=True)
        return sum((output - 1) * (prompt + output / 2) for prompt, output in pairs) / steps


class TraceRequest(msgspec.Struct, frozen=True):
    """``at`` is in seconds from the beginning, lengths in tokens."""

    at: float
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


class _TraceLine(msgspec.Struct):
    timestamp: float  # ms
    input_length: int
    output_length: int
    hash_ids: tuple[int, ...]


def read_trace(path: Path) -> Iterator[TraceRequest]:
    """A trace in Mooncake's format (github.com/kvcache-ai/Mooncake, FAST25-release/traces). Raises ConfigError.

    JSON lines of ``timestamp``, ``input_length``, ``output_length`` and ``hash_ids``, one for each 512 tokens of the
    prompt; prompts with equal leading ids have those tokens in common.
    """
    try:
        with path.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    item = msgspec.json.decode(line, type=_TraceLine)
                except msgspec.DecodeError as exc:
                    raise ConfigError(f"{path}, line {number}: {exc}; is it one of Mooncake's?") from exc
                yield TraceRequest(item.timestamp / 1000, item.input_length, item.output_length, item.hash_ids)
    except OSError as exc:
        raise ConfigError(f"trace {path} cannot be read ({exc.strerror})") from exc


def workload_of_trace(requests: Sequence[TraceRequest]) -> tuple[Workload, float]:
    """Of requests in the order of their times, and how many there are in a second.

    Cached is what has come before at the head of some prompt, as if all nodes shared a cache that forgets nothing.
    """
    if len(requests) < 2 or requests[-1].at <= requests[0].at:
        raise ConfigError(f"the trace has {len(requests)} requests at one time; a rate needs two at different times")
    seen, cached = set[int](), list[int]()
    for request in requests:
        known = 0
        for number in request.hash_ids:
            if number not in seen:
                break
            known += 1
        seen.update(request.hash_ids)
        cached.append(min(known * BLOCK, request.input_length - 1))
    mean = (requests[-1].at - requests[0].at) / (len(requests) - 1)
    times = [requests[0].at - mean, *(request.at for request in requests)]
    gaps = tuple(max(0.0, after - before) / mean for before, after in pairwise(times))
    prompts = tuple(request.input_length for request in requests)
    outputs = tuple(max(1, request.output_length) for request in requests)
    return Workload(prompts, tuple(cached), outputs, gaps), 1.0 / mean


def workload_of(prompt_tokens: str, output_tokens: str, cached_share: float, samples: int = SAMPLES) -> Workload:
    """Poisson arrivals; lengths as ``quantiles`` reads them, drawn independently. The same every time."""
    if not 0.0 <= cached_share < 1.0:
        raise ConfigError(f"cached share {cached_share:g} is not within 0 … 1; the last token is always computed")
    rng = random.Random(1)
    prompts, outputs = (_drawn(quantiles(text), samples, rng) for text in (prompt_tokens, output_tokens))
    drawn = [rng.expovariate(1.0) for _ in range(samples)]
    mean = fmean(drawn)
    cached = tuple(int(cached_share * prompt) for prompt in prompts)
    return Workload(prompts, cached, outputs, tuple(gap / mean for gap in drawn))


def _drawn(quantile: Callable[[float], float], samples: int, rng: random.Random) -> tuple[int, ...]:
    """All quantiles in a random order, so that a sample's percentiles are those asked for."""
    values = [min(LONGEST, max(1, round(quantile((index + 0.5) / samples)))) for index in range(samples)]
    rng.shuffle(values)
    return tuple(values)


def quantiles(text: str) -> Callable[[float], float]:
    """The length that a share of all are at most, of a distribution written as one of

        2048                 all alike
        256-1024             uniform
        p50=900,p99=8000     log-normal, with these percentiles
        mean=1500,p99=8000   log-normal, with this mean and percentile

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
    raise ConfigError(
        f"length {text!r} is none; write 2048, 256-1024, p50=900,p99=8000 or mean=1500,p99=8000, "
        f"in tokens up to {LONGEST}"
    )


def _log_normal(text: str, first: str, value: int, percent: int, upper: int) -> Callable[[float], float]:
    """Of a normal distribution m + s·z of logarithms: percentiles are linear in s, the mean is exp(m + s²/2)."""
    low = 0 if first == "mean" else int(first[1:])
    if not (50 < percent < 100 and low < percent and 1 <= value <= upper <= LONGEST and (low > 0 or first == "mean")):
        raise ConfigError(f"length {text!r}: the second is a percentile above p50, and not below the first")
    z = NormalDist().inv_cdf(percent / 100)
    ratio = math.log(upper / value)
    if first == "mean":
        if z * z < 2 * ratio:
            raise ConfigError(f"length {text!r}: no log-normal's p{percent} is {upper / value:.1f} times its mean")
        s = z - math.sqrt(z * z - 2 * ratio)
        m = math.log(value) - s * s / 2
    else:
        z_low = NormalDist().inv_cdf(low / 100)
        s = ratio / (z - z_low)
        m = math.log(value) - s * z_low
    return lambda share: math.exp(m + s * NormalDist().inv_cdf(share))
