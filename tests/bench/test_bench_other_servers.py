"""``pdserve bench`` of servers that are not pdserve, and its histogram."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from openai_peer import Peer

from cli.bench.report import bins
from cli.main import main


def talk(question: str, answer: str) -> dict[str, Any]:
    return {"conversations": [{"from": "human", "value": question}, {"from": "gpt", "value": answer}]}


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


@pytest.mark.parametrize("field", ["content", "reasoning_content"])
def test_chats_are_measured(field: str) -> None:
    with Peer(200, event=json.dumps({"choices": [{"delta": {field: "a"}}]})) as server:
        assert main(["bench", server.url, *FEW, "--endpoint", "/v1/chat/completions"]) == 0
    assert server.paths == {"/v1/chat/completions"}
    (texts,) = zip(*([message["content"] for message in body["messages"]] for body in server.bodies), strict=True)
    assert {len(text.split()) for text in texts} == {5}
    assert len(set(texts)) == 4


@pytest.mark.parametrize(
    ("data", "lengths"),
    [
        (json.dumps([talk("ask", "answer it" * 4), talk("again", ""), talk("more?", "yes")]), {"ask": 9, "more?": 1}),
        ('{"prompt": "ask", "output_tokens": 3}\n\n{"prompt": "more?"}\n', {"ask": 3, "more?": 256}),
    ],
    ids=["ShareGPT", "lines"],
)
def test_prompts_and_lengths_come_from_a_data_set(data: str, lengths: dict[str, int], tmp_path: Path) -> None:
    (tmp_path / "data").write_text(data)
    with Peer(200) as server:
        assert main(["bench", server.url, "--num-prompts", "3", "--dataset-path", str(tmp_path / "data")]) == 0
    assert {body["prompt"]: body["max_tokens"] for body in server.bodies} == lengths


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
        (["--json", "/no/such/folder/f.json"], "/no/such/folder must be a folder"),
        (["--plot", "/no/such/folder/f.svg"], "/no/such/folder must be a folder"),
        (["--dataset-name", "sharegpt"], "needs --dataset-path FILE"),
        (["--dataset-path", "/no/such/file"], "/no/such/file cannot be read"),
        (["--dataset-path", __file__], "is not a data set"),
    ],
)
def test_invalid_flag_is_one_line(flags: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "127.0.0.1:9", *flags]) != 0
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("values", [[0.5], [0.0, 0.0], [1e-7, 0.01, 0.02, 0.04], [0.01 * n for n in range(1, 300)]])
def test_bins_count_every_value_up_to_the_greatest(values: list[float]) -> None:
    intervals = bins(values)
    assert sum(number for _, _, number in intervals) == len(values)
    assert intervals[0][0] == 0.0
    assert intervals[-1][1] == pytest.approx(max(*values, 1e-6))
    assert all(high == pytest.approx(low) for (_, high, _), (low, _, _) in pairwise(intervals))
