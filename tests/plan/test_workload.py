"""Length distributions and traces."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cli.numbers import percentile
from cli.plan.workload import read_trace, workload_of, workload_of_trace
from pdserve.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "figures"),
    [
        ("2048", {"mean": 2048, "p50": 2048, "p99": 2048}),
        ("256-1024", {"mean": 640, "p50": 640, "p99": 1016}),
        ("p50=900,p99=8000", {"p50": 900, "p99": 8000}),
        ("p10=100,p90=1000", {"p10": 100, "p50": 316, "p90": 1000}),
        ("mean=1500,p99=8000", {"mean": 1500, "p99": 8000}),
        ("mean=2000,sigma=0.8", {"mean": 2000, "p50": 1452, "p90": 4048}),
        ("mean=2000,sigma=0", {"mean": 2000, "p99": 2000}),
    ],
)
def test_lengths_follow_the_requested_distribution(text: str, figures: dict[str, float]) -> None:
    prompts = workload_of(text, "1", 0.0).prompts
    for name, value in figures.items():
        length = sum(prompts) / len(prompts) if name == "mean" else percentile(prompts, int(name[1:]))
        assert length == pytest.approx(value, rel=0.02), name


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("0", "length '0' is invalid; use 2048"),
        ("9-3", "length '9-3' is invalid"),
        ("mean=10,sigma=9", "with a sigma up to 4"),
        ("many", "length 'many' is invalid"),
        ("9999999", "in tokens up to 1048576"),
        ("p99=100,p50=9", "the second value must be a percentile above p50"),
        ("p50=100,p99=9", "not below the first"),
        ("mean=10,p99=100000", "no log-normal distribution has p99 at 10000.0 times its mean"),
    ],
)
def test_invalid_lengths_are_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        workload_of(text, "1", 0.0)
    with pytest.raises(ConfigError, match="cached share 1 is not within"):
        workload_of("10", "1", 1.0)


def write_trace(path: Path, *requests: tuple[float, int, int, list[int]]) -> Path:
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path.write_text("\n".join(json.dumps(dict(zip(names, request, strict=True))) for request in requests))
    return path


def test_trace_gives_arrivals_lengths_and_cached_prefixes(tmp_path: Path) -> None:
    trace = write_trace(
        tmp_path / "trace",
        (1000, 1024, 10, [1, 2]),
        (1500, 1500, 0, [1, 2, 3]),
        (3000, 1024, 5, [4, 2]),
        (4000, 1024, 5, [1, 2]),
    )
    workload, rate = workload_of_trace(list(read_trace(trace)))
    assert (workload.prompts, workload.outputs) == ((1024, 1500, 1024, 1024), (10, 1, 5, 5))
    assert workload.cached == (0, 1024, 0, 1023)  # the last token is always computed
    first, second, third, _ = (job.prompt_ids() for job in workload.jobs(rate))
    assert second[: 4 * 1024] == first
    assert third[: 4 * 512] != first[: 4 * 512]
    assert third[4 * 512 :] == first[4 * 512 :]
    assert len(second) == 4 * 1500
    assert (rate, workload.gaps) == (1.0, (1.0, 0.5, 1.5, 1.0))


def test_invalid_trace_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        list(read_trace(tmp_path / "nothing"))
    (tmp_path / "text").write_text('{"timestamp": 1}')
    with pytest.raises(ConfigError, match="line 1: Object missing required field"):
        list(read_trace(tmp_path / "text"))
    (tmp_path / "deep").write_text('{"other": ' + "[" * 3000)
    with pytest.raises(ConfigError, match="line 1: "):
        list(read_trace(tmp_path / "deep"))
    with pytest.raises(ConfigError, match="it needs two at different times"):
        workload_of_trace(list(read_trace(write_trace(tmp_path / "one", (0, 8, 8, [1])))))
