"""bench/goodput.py: loads, objectives, counting of tokens, and whole runs."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from pathlib import Path
from statistics import fmean

import goodput
import goodput_fleets
import pytest
from fleet import copy_without_weights
from goodput import is_good, parse_objectives, summarize, table
from loads import Load, make_loads
from openai_peer import TRANSFER, Peer
from systems import GenerateReader, System

from cli.bench.http_load import EventReader, Trace
from pdserve.errors import ConfigError


def parsed(*argv: str) -> Namespace:
    parser = ArgumentParser()
    goodput.add_flags(parser)
    return parser.parse_args(argv)


def test_random_load_has_the_requested_rate_and_lengths() -> None:
    flags = [
        "--rates",
        "4,8",
        "--seconds",
        "100",
        "--prompt-tokens",
        "mean=200,sigma=0.5",
        "--max-output-tokens",
        "300",
    ]
    slow, fast = make_loads(parsed(*flags))
    assert (len(slow.requests), len(fast.requests)) == (400, 800)
    assert fast.requests[-1].at == pytest.approx(100.0)
    assert fmean(len(request.prompt) for request in fast.requests) == pytest.approx(200, rel=0.02)
    assert max(request.num_tokens for request in fast.requests) == 300
    assert all(2048 <= token < 4096 for request in fast.requests for token in request.prompt)
    assert slow.requests[0].prompt[:8] != fast.requests[0].prompt[:8], "a server would find the prompts in its cache"
    assert make_loads(parsed(*flags)) == [slow, fast]
    assert make_loads(parsed(*flags, "--seed", "2")) != [slow, fast]


def test_further_loads_have_lengths_of_their_own() -> None:
    flags = ["--rates", "8", "--seconds", "50", "--prompt-tokens", "mean=200,sigma=0.5"]
    (alone,) = make_loads(parsed(*flags))
    first, further = make_loads(parsed(*flags, "--also", "4:mean=900,sigma=0.5:7"))
    assert first == alone
    assert (further.rate, further.name) == (4.0, "4 (mean=900,sigma=0.5 → 7)")
    assert fmean(len(request.prompt) for request in further.requests) == pytest.approx(900, rel=0.1)
    assert {request.num_tokens for request in further.requests} == {7}


@pytest.mark.parametrize("text", ["4", "4:100", "fast:100:10"])
def test_invalid_further_load_is_refused(text: str) -> None:
    with pytest.raises(SystemExit):
        parsed("--also", text)


def test_trace_load_keeps_arrivals_and_shared_prefixes(tmp_path: Path) -> None:
    rows = [(0, 1024, 10, [1, 2]), (1000, 1500, 20, [1, 2, 3]), (4000, 600, 5, [4, 5])]
    names = ("timestamp", "input_length", "output_length", "hash_ids")
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(dict(zip(names, row, strict=True))) for row in rows))
    (own,) = make_loads(parsed("--trace", str(path)))
    (scaled,) = make_loads(parsed("--trace", str(path), "--rates", "5"))
    assert own.rate == 0.5
    assert [request.num_tokens for request in own.requests] == [10, 20, 5]
    for load, seconds in ((own, 2.0), (scaled, 0.2)):
        first, second, third = load.requests
        assert (second.at - first.at, third.at - second.at) == pytest.approx((seconds / 2, 1.5 * seconds))
        assert [len(request.prompt) for request in load.requests] == [1024, 1500, 600]
        assert second.prompt[:1024] == first.prompt


def trace(*tokens: float, start: float = 0.0, error: str = "") -> Trace:
    return Trace(due=0.0, start=start, tokens=list(tokens), num_tokens=len(tokens), error=error)


@pytest.mark.parametrize(
    ("request_trace", "good"),
    [
        (trace(0.1, 0.11, 0.13), True),
        (trace(0.3, 0.31), False),  # TTFT
        (trace(0.3, 0.31, start=0.2), True),
        (trace(0.1, 0.15, 0.2), False),  # per token
        (trace(0.1, 0.1, 0.1, 0.1, 0.1, 0.18), False),  # longest gap
        (trace(0.1), True),  # a single token has no time per token
        (trace(0.1, 0.11, error="HTTP 503"), False),
    ],
)
def test_request_is_good_if_it_meets_every_objective(request_trace: Trace, good: bool) -> None:
    assert is_good(request_trace, parse_objectives(["ttft:200", "tpot:20", "gap:50"])) is good


@pytest.mark.parametrize("text", ["ttft", "itl:20", "gap:fast"])
def test_invalid_objective_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=f"--goodput '{text}' is invalid; use ttft:MS, tpot:MS, gap:MS"):
        parse_objectives([text])


@pytest.mark.parametrize("text", ["http://h", "a=h:80", "a=vllm-pd:http://h", "a=lmdeploy:h", "a="])
def test_invalid_system_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="is invalid; use"):
        System.of(text)


def test_tokens_are_counted_as_they_arrive() -> None:
    with_ids = Trace(0.0)
    without_ids = Trace(0.0)
    reader = EventReader(with_ids)
    for piece in (
        b'data: {"choices":[{"text":"","token_ids":[7]}]}\n\nda',
        b'ta: {"choices":[{"text":"ab","token_ids":[8,9]}]}\n\n',
        b'data: {"choices":[{"text":"","token_ids":[]}]}\n\n',
        b'data: {"choices":[],"usage":{"completion_tokens":3,"prompt_tokens_details":{"cached_tokens":5}}}\n\n',
        b"data: [DONE]\n\n",
    ):
        reader.feed(piece)
    assert (len(with_ids.tokens), with_ids.num_tokens, with_ids.cached_tokens) == (3, 3, 5)
    reader = EventReader(without_ids)
    reader.feed(b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":""}]}\n\n')
    reader.feed(b'data: {"choices":[{"text":"bc"}]}\n\ndata: {"choices":[],"usage":{"completion_tokens":3}}\n\n')
    assert (len(without_ids.tokens), without_ids.num_tokens) == (2, 3)
    reader.feed(b'data: {"error":{"message":"out of memory"}}\n\n')
    assert "out of memory" in without_ids.error


def lmdeploy_event(ids: list[int], ending: str | None = None) -> str:
    """Return an event as LMDeploy 0.18.0 sends it."""
    reason = {"type": ending} if ending else None
    unset = dict.fromkeys(("output_token_logprobs", "input_token_logprobs", "output_top_logprobs", "routed_experts"))
    meta = {"prompt_tokens": 4, "completion_tokens": len(ids), "finish_reason": reason, **unset}
    return json.dumps({"text": " w" * len(ids), "output_ids": ids, "meta_info": meta})


def test_tokens_of_lmdeploy_are_counted_as_they_arrive() -> None:
    read = Trace(0.0)
    reader = GenerateReader(read)
    stream = f"data: {lmdeploy_event([7])}\n\ndata: {lmdeploy_event([8, 9])}\n\n".encode()
    for start in range(0, len(stream), 50):
        reader.feed(stream[start : start + 50])
    reader.feed(f"data: {lmdeploy_event([], 'length')}\n\ndata: [DONE]\n\n".encode())
    assert (len(read.tokens), read.num_tokens, read.prompt_tokens, read.error) == (3, 3, 4, "")
    reader.feed(f"data: {lmdeploy_event([], 'abort')}\n\n".encode())
    assert "abort" in read.error
    failed = Trace(0.0)
    GenerateReader(failed).feed(b'data: {"error": {"message": "out of memory"}}\n\n')
    assert "out of memory" in failed.error


def test_lmdeploy_receives_token_ids(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--rates", "40", "--seconds", "0.1", "--prompt-tokens", "4", "--output-tokens", "3", "--warmup", "1"]
    with Peer(200, event=lmdeploy_event([5])) as server:
        flags = ["--system", f"lm=lmdeploy:{server.url}", "--json", str(tmp_path / "json"), *words]
        assert goodput.main(flags) == 0
    (result,) = json.loads((tmp_path / "json").read_text())["results"]
    assert (result["requests"], result["errors"]) == (4, 0)
    assert server.paths == {"/generate"}
    assert {len(body["input_ids"]) for body in server.bodies} == {4}
    assert {(body["max_tokens"], body["top_k"]) for body in server.bodies} == {(3, 1)}
    with Peer(200, event=lmdeploy_event([5, 6])) as server:
        assert goodput.main(["--system", f"lm=lmdeploy:{server.url}", *words]) == 1
    assert "6 tokens instead of 3" in capsys.readouterr().err


ONE = Load(1.0, [], "1")
TWO = Load(2.0, [], "2")


def test_slow_client_is_reported() -> None:
    late = [Trace(due=0.0, start=0.2, tokens=[0.3], num_tokens=1)] * 3
    assert "sent 200 ms late" in summarize("a", ONE, late, (10.0, 0.1), {}).warning
    assert "95% of a core" in summarize("a", ONE, [trace(0.1)], (10.0, 9.5), {}).warning
    punctual = summarize("a", ONE, [trace(0.1)], (10.0, 1.0), {})
    assert not punctual.warning
    failed = summarize("b", TWO, [trace(error="HTTP 503")], (10.0, 1.0), {})
    assert "| 1 of 1 |" in table([punctual, failed], ["a", "b"])


def test_systems_receive_the_same_requests(tmp_path: Path) -> None:
    with Peer(200) as first, Peer(200) as second, Peer(200) as prefill, Peer(200) as decode:
        systems = [
            f"both={first.url},{second.url}",
            "gone=http://127.0.0.1:9",
            f"pd=vllm-pd:{prefill.url},{decode.url}",
        ]
        words = [word for system in systems for word in ("--system", system)]
        words += ["--rates", "40,80", "--seconds", "0.1", "--prompt-tokens", "4", "--output-tokens", "3"]
        assert goodput.main([*words, "--warmup", "2", "--json", str(tmp_path / "json")]) == 1, "one does not answer"
    results = json.loads((tmp_path / "json").read_text())["results"]
    measured = [(result["system"], result["rate"], result["requests"], result["errors"]) for result in results]
    assert measured == [(name, rate, round(rate / 10), 0) for name in ("both", "pd") for rate in (40.0, 80.0)]
    assert len(first.bodies) == len(second.bodies) == 7, "12 requests and two of the warm-up in turn"
    assert sorted(first.prompts + second.prompts) == prefill.prompts == decode.prompts
    assert all((body["max_tokens"], body["stream"]) == (1, False) for body in prefill.bodies)
    assert all(body["kv_transfer_params"]["do_remote_decode"] for body in prefill.bodies)
    assert all(body["kv_transfer_params"] == TRANSFER for body in decode.bodies)
    assert len({body["cache_salt"] for body in first.bodies + decode.bodies}) == 6, "one per measurement and warm-up"


def test_system_that_refuses_every_request_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Peer(503) as server:
        assert goodput.main(["--system", f"full={server.url}", "--rates", "9", "--seconds", "1", "--warmup", "1"]) == 1
    assert "full: error: every request of the warm-up failed, the first one with: HTTP 503" in capsys.readouterr().err


def test_prefill_server_without_a_connector_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Peer(200, transfer=None) as server:
        system = f"pd=vllm-pd:{server.url},{server.url}"
        assert goodput.main(["--system", system, "--rates", "9", "--seconds", "1", "--warmup", "1"]) == 1
    assert "prefill: HTTP 200 without kv_transfer_params" in capsys.readouterr().err


def test_answer_without_any_event_of_a_token_is_an_error(capsys: pytest.CaptureFixture[str]) -> None:
    with Peer(200, event='{"choices":[{"text":""}],"usage":{"completion_tokens":1}}') as server:
        flags = ["--rates", "9", "--seconds", "1", "--output-tokens", "1", "--warmup", "1"]
        assert goodput.main(["--system", f"mute={server.url}", *flags]) == 1
    assert "no event with text; the server must support return_token_ids" in capsys.readouterr().err


def test_fleets_are_started_measured_and_stopped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    node = "--engine simulated --threads 1 --kv-cache-memory 64MiB --device cpu"
    flags = ["--fleets", "2d", "up --no-such-flag", "--devices", "cpu", "--node-flags", node, "--out", str(tmp_path)]
    load = ["--rates", "16", "--seconds", "0.5", "--prompt-tokens", "40", "--output-tokens", "5", "--warmup", "1"]
    assert goodput_fleets.main([str(copy_without_weights(tmp_path)), *flags, *load]) == 1
    captured = capsys.readouterr()
    assert "--no-such-flag" in captured.err
    (result,) = json.loads((tmp_path / "goodput.json").read_text())["results"]
    assert (result["system"], result["requests"], result["errors"]) == ("2d", 8, 0)
    assert captured.out == (tmp_path / "goodput.md").read_text()
    assert "| errors | 0 of 8 |" in captured.out
