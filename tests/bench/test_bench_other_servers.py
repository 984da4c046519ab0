"""``pdserve bench`` of servers that are not pdserve, and its histogram."""

from __future__ import annotations

from itertools import pairwise

import pytest
from openai_peer import Peer

from cli.bench.report import bins
from cli.main import main

FEW = ["--num-prompts", "3", "--num-warmups", "1", "--random-input-len", "5", "--random-output-len", "2-4"]


@pytest.mark.parametrize(
    ("event", "said"),
    [
        ('{"choices":[{"text":"a"}]}', "the server does not say"),
        (
            '{"choices":[{"text":"a"}],"usage":{"prompt_tokens":4,"prompt_tokens_details":{"cached_tokens":1}}}',
            "3 of 12 prompt tokens, 25 %",
        ),
        ('{"choices":[{"text":"a"}],"usage":{"completion_tokens":1}}', "3 answers; the server ignores ignore_eos"),
    ],
)
def test_other_servers_are_measured(event: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Peer(200, event=event) as server:
        assert main(["bench", f"{server.url}/v1", *FEW]) == 0
    assert said in capsys.readouterr().out
    assert len(server.bodies) == 4
    assert len({tuple(prompt) for prompt in server.prompts}) == 4


def test_refused_requests_are_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with Peer(503) as server:
        assert main(["bench", server.url, *FEW]) == 1
        assert main(["bench", server.url, *FEW, "--num-warmups", "0"]) == 1
    said = capsys.readouterr()
    assert "every request of the warm-up failed, the first one with: HTTP 503" in said.err
    assert "failed: HTTP 503" in said.out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--random-input-len", "9-3"], "use a number of tokens such as 128, or 64-256"),
        (["--plot", "plot.pdf"], "use a file name that ends with .png or .svg"),
        (["--request-rate", "0"], "use a number above 0"),
        (["--vocab", "1"], "--vocab 1 is too small; use 2 or more"),
    ],
)
def test_invalid_flag_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "127.0.0.1:9", *flags]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0], [1e-7, 0.01, 0.02, 0.04], [0.01 * n for n in range(1, 300)]])
def test_bins_count_every_value_up_to_the_greatest(values: list[float]) -> None:
    found = bins(values)
    assert sum(number for _, _, number in found) == len(values)
    assert found[0][0] == 0.0
    assert found[-1][1] == pytest.approx(max(*values, 1e-6))
    assert all(high == pytest.approx(low) for (_, high, _), (low, _, _) in pairwise(found))
