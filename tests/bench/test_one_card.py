"""bench/one_card.py: loads, systems, rows that are kept, and what is behind."""

from __future__ import annotations

import math
from argparse import ArgumentParser, Namespace
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import one_card
import pytest
from fleet import copy_without_weights
from goodput import Result, summarize
from loads import Load
from one_card import Results, misses, parse_load, parse_system, table

from cli.bench.http_load import Trace
from pdserve.errors import ConfigError

BURST = Load(math.inf, [], "3")
RATE = Load(2.0, [], "2/s")


def parsed(*argv: str) -> Namespace:
    parser = ArgumentParser()
    one_card.add_flags(parser)
    return parser.parse_args(["m", *argv])


def result_of(system: str, load: Load, step: float) -> Result:
    """Return a result of three requests whose tokens come every ``step`` seconds."""
    traces = [Trace(0.0, 0.0, [step * (n + 1) for n in range(5)], num_tokens=5) for _ in range(3)]
    return summarize(system, load, traces, (5 * step, 0.0), {"ttft": 500.0})


def test_load_has_its_arrivals_and_lengths() -> None:
    args = parsed("--seconds", "50")
    paced = parse_load("8/s", args)
    long = parse_load("4/s:900:30", args)
    burst = parse_load("300", args)
    assert (paced.rate, len(paced.requests), len(long.requests), len(burst.requests)) == (8.0, 400, 200, 300)
    assert paced.requests[-1].at == pytest.approx(50.0)
    assert fmean(len(request.prompt) for request in paced.requests) == pytest.approx(2000, rel=0.1)
    assert fmean(len(request.prompt) for request in long.requests) == pytest.approx(900, rel=0.1)
    assert fmean(request.num_tokens for request in long.requests) == pytest.approx(30, rel=0.1)
    assert {request.at for request in burst.requests} == {0.0}
    assert fmean(request.num_tokens for request in burst.requests) == pytest.approx(256, rel=0.1)
    assert parse_load("8/s", args) == paced
    assert parse_load("8/s", parsed("--seconds", "50", "--seed", "2")) != paced


@pytest.mark.parametrize("text", ["fast", "0/s", "0", "1.5", "4/s:100", "4:100", "-3"])
def test_invalid_load_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is invalid; use RATE/s"):
        parse_load(text, parsed())


def test_systems_are_known_names_or_fleets() -> None:
    assert parse_system("unpaced", 4096)[1].startswith("up --max-model-len 4096 ")
    assert parse_system("lmdeploy", 4096)[1].startswith("lmdeploy --session-len 4096 ")
    assert parse_system("two=2d", 4096) == ("two", "2d")
    for text in ("sglang", "a=b"):
        with pytest.raises(ConfigError, match="is invalid; use"):
            parse_system(text, 4096)


def test_rows_are_kept_by_seed_and_number_of_requests(tmp_path: Path) -> None:
    path = tmp_path / "rows"
    rows = Results(path, seed=1)
    assert rows.lacks("a", BURST)
    rows.add(replace(result_of("a", BURST, 0.1), requests=0))
    rows.add(result_of("a", RATE, 0.1))
    again = Results(path, seed=1)
    assert again.results == rows.results
    assert not again.lacks("a", BURST)
    assert again.lacks("b", BURST)
    assert again.lacks("a", RATE), "the row has other requests"
    assert Results(path, seed=2).lacks("a", BURST)
    path.write_text("{}")
    with pytest.raises(ConfigError, match="cannot be continued"):
        Results(path, seed=1)


def test_only_figures_that_are_more_than_the_margin_behind_are_named() -> None:
    results = [result_of("own", RATE, 0.104), result_of("rival", RATE, 0.1), result_of("other", RATE, 0.05)]
    results += [result_of("own", BURST, 0.2), result_of("rival", BURST, 0.1)]
    assert misses(results, "own", ["rival"]) == ["3, seconds for all: 1 / 0.5 of rival (+100%)"]
    behind = misses(results, "own", ["rival", "other"])
    assert "2/s, TTFT p50: 104 / 50 of other (+108%)" in behind
    assert len(behind) == 9, "all figures at a rate but goodput, and the burst"
    late = [replace(results[0], goodput=0.9), results[1]]
    assert misses(late, "own", ["rival"]) == ["2/s, within objectives: 0.9 / 1 of rival (-10%)"]
    assert misses(results, "own", ["absent"]) == []


def test_table_has_a_row_per_load() -> None:
    results = [result_of("a", RATE, 0.1), result_of("a", BURST, 0.1), result_of("b", RATE, 0.1)]
    _, _, paced, burst = table(results).split("\n")
    assert paced.startswith("| 2/s | 100 / 100 / 100; 100.0 / 100.0 / 100.0; 100 / 100; 30; 100.0 % | 100 /")
    assert burst == "| 3 | 0.5 s; 0.1 s; 30 |  |"


def test_run_measures_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(copy_without_weights(tmp_path))
    flags = ["--results", str(tmp_path / "rows"), "--out", str(tmp_path / "logs"), "--max-model-len", "2000"]
    flags += ["--seconds", "0.5", "--warmup", "1", "--node-flags", "--engine simulated --threads 1"]
    assert one_card.main([model, *flags, "--systems", "pdserve", "--loads", "6/s:40:5"]) == 0
    further = ["--systems", "pdserve", "vllm", "--loads", "6/s:40:5", "3:40:5"]
    assert one_card.main([model, *flags, "--vllm", str(tmp_path / "no-such-program"), *further]) == 1
    captured = capsys.readouterr()
    assert "vllm: error: cannot start" in captured.err
    assert captured.err.count("pdserve, load 6/s:40:5: 3 requests in") == 1
    assert captured.err.count("pdserve, load 3:40:5: 3 requests in") == 1
    assert captured.out.count("| 6/s:40:5 |") == 2
    assert [result.errors for result in Results(tmp_path / "rows", 0).results] == [0, 0]
