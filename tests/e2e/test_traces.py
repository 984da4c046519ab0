"""A request through router, D and P is one trace at a real collector, also when a node fails."""

from __future__ import annotations

import itertools
import os
import random
import shutil
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest
from collector import Collector, Span
from fleet import MODEL_NAME, Fleet, NodeProcess, start_fleet
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL

SIMULATED = ("--engine", "simulated")
FAST_EXPORT = {"OTEL_BSP_SCHEDULE_DELAY": "20"}  # milliseconds until spans are exported
LONG = 700  # tokens of a prompt that is handed off in parts
SHORT = 8  # tokens of a prompt that D computes
PARTS = ("--max-batch-tokens", "256")
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"

PREFILL_SPANS: dict[str, Any] = {"queue": {}, "prefill": {}, "lease": {}}
HANDOFF_SPANS: dict[str, Any] = {
    "reserve": {},
    "handoff": {"transfer": {}, "prefill node": PREFILL_SPANS},
    "first step": {},
    "decode": {},
}
LOCAL_SPANS: dict[str, Any] = {"queue": {}, "prefill": {}, "decode": {}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint without weights."""
    directory = tmp_path_factory.mktemp("model")
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(EMBEDDED_MODEL / name, directory / name)
    return directory


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with Collector() as collector:
        yield collector


@pytest.fixture(scope="module")
def fleet(model: Path, collector: Collector) -> Iterator[Fleet]:
    """A P and two D; the router traces only requests whose client asks for it."""
    flags = [*SIMULATED, "--traces", collector.url]
    sampling = ["--traces", collector.url, "--trace-sample", "0"]
    with (
        mock.patch.dict(os.environ, FAST_EXPORT),
        start_fleet(model, 1, 2, True, [*flags, *PARTS], [*flags, "--sim-costs", "step=0.01"], sampling) as fleet,
    ):
        yield fleet


def traced(trace: str = TRACE, sampled: bool = True) -> dict[str, str]:
    return {"traceparent": f"00-{trace}-{PARENT}-{sampled:02x}", "tracestate": "vendor=it"}


def body_of(length: int, num_tokens: int = 8, **fields: Any) -> dict[str, Any]:
    """Return a request with a new prompt. D computes some output tokens, because P samples at most four."""
    prompt = random.choices(range(3, 4096), k=length)
    return {"model": MODEL_NAME, "prompt": prompt, "max_tokens": num_tokens, "ignore_eos": True, **fields}


def send(fleet: Fleet, body: dict[str, Any], headers: dict[str, str]) -> str:
    """Send a request and return its id."""
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=patience(30.0))
    assert answer.status_code == 200, answer.text
    return answer.headers["x-request-id"]


def check_nested(span: Span) -> None:
    """Check that child spans lie within their parents; all processes share one clock here."""
    for child in span.children:
        assert span.start <= child.start <= child.end <= span.end, (span.name, child.name)
        check_nested(child)


def check_contiguous(*spans: Span) -> None:
    for before, after in itertools.pairwise(spans):
        assert before.end == after.start, (before.name, after.name)


def test_handoff_trace_parts_add_up_to_ttft(fleet: Fleet, collector: Collector) -> None:
    body = body_of(LONG)
    root = collector.wait(send(fleet, body, traced()), "generate", "decode node", "prefill node", "lease")
    assert root.raw.trace_id.hex() == TRACE
    assert root.raw.parent_span_id.hex() == PARENT
    assert root.shape == {"prepare": {}, "admission": {}, "generate": {"decode node": HANDOFF_SPANS}}
    check_nested(root)
    assert {span.raw.trace_state for span in root.walk()} == {"vendor=it"}
    assert not [span.name for span in root.walk() if span.failed]

    generate = root.child("generate")
    at_d = generate.child("decode node")
    handoff = at_d.child("handoff")
    at_p = handoff.child("prefill node")
    transfer = handoff.child("transfer")
    services = [span.service for span in (root, generate, at_d, handoff, at_p)]
    assert services == ["pdserve-router", "pdserve-router", "pdserve-decode", "pdserve-decode", "pdserve-prefill"]
    check_contiguous(at_d.child("reserve"), handoff, at_d.child("first step"), at_d.child("decode"))
    check_contiguous(at_p.child("queue"), at_p.child("prefill"))
    first = handoff.events["first tokens"]
    assert at_p.child("prefill").end <= first <= at_d.events["first token"] <= root.events["first token"]
    assert transfer.attributes["pdserve.transfer.parts"] == 3
    assert 0 < transfer.attributes["pdserve.transfer.exposed"] <= (transfer.end - transfer.start) / 1e9

    attributes = root.attributes
    assert attributes["gen_ai.request.model"] == MODEL_NAME
    assert attributes["gen_ai.usage.input_tokens"] == LONG
    assert attributes["gen_ai.usage.output_tokens"] == 8
    assert attributes["http.response.status_code"] == 200
    assert handoff.attributes["pdserve.prefill_node"] == fleet.prefill[0].address
    seconds_before = sum((root.child(name).end - root.child(name).start) / 1e9 for name in ("prepare", "admission"))
    assert seconds_before + (first - at_d.start) / 1e9 < attributes["gen_ai.response.time_to_first_chunk"]


def test_ttft_parts_are_a_histogram(fleet: Fleet, collector: Collector) -> None:
    def totals() -> dict[str, float]:
        sums: dict[str, float] = {}
        for node in fleet.decode:
            for name, value in node.status().counters.items():
                sums[name] = sums.get(name, 0.0) + value
        return sums

    before = totals()
    root = collector.wait(send(fleet, body_of(LONG), traced("1" * 32)), "decode node")
    after = totals()

    def new(kind: str, part: str) -> float:
        name = f'pdserve_ttft_part_seconds_{kind}{{part="{part}"}}'
        return after[name] - before[name]

    parts = ("reserve", "queue", "prefill", "lost")
    assert [new("count", part) for part in parts] == [1, 1, 1, 0]
    at_d = root.child("generate").child("decode node")
    handoff = at_d.child("handoff")
    assert sum(new("sum", part) for part in parts) <= (at_d.events["first token"] - at_d.start) / 1e9
    assert new("sum", "prefill") >= LONG * 24e-6, "at least P's simulated time"
    name = "pdserve_handoff_first_step_seconds_count"
    assert after[name] - before[name] == 1
    assert handoff.attributes["pdserve.handoff.tokens"] == LONG


def test_trace_of_a_short_prompt_has_no_handoff(fleet: Fleet, collector: Collector) -> None:
    root = collector.wait(send(fleet, body_of(SHORT), traced("2" * 32)), "decode node")
    at_d = root.child("generate").child("decode node")
    assert at_d.shape == LOCAL_SPANS
    check_nested(root)
    check_contiguous(*(at_d.child(name) for name in LOCAL_SPANS))


def test_unsampled_requests_send_no_spans(fleet: Fleet, collector: Collector) -> None:
    """Neither the client's sampled flag nor the router's sampling share of 0 selects the first three requests."""
    before = collector.trace_ids()
    send(fleet, body_of(LONG), traced("3" * 32, sampled=False))
    send(fleet, body_of(LONG), {})
    send(fleet, body_of(LONG), {"traceparent": "what is this"})
    last = send(fleet, body_of(LONG), traced("4" * 32))
    collector.wait(last, "lease", "decode node")  # each process exports spans in the order of their ends
    assert collector.trace_ids() - before == {"4" * 32}


def test_spans_end_when_the_client_disconnects(fleet: Fleet, collector: Collector) -> None:
    body = body_of(LONG, 400, stream=True)
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, headers=traced("5" * 32)) as answer:
        next(answer.iter_lines())
    root = collector.wait(answer.headers["x-request-id"], "decode node", "lease")
    at_d = root.child("generate").child("decode node")
    assert root.attributes["error.type"] == "disconnected"
    assert at_d.attributes["pdserve.outcome"] == "cancelled"
    assert not root.failed
    assert at_d.child("handoff").child("prefill node").shape == PREFILL_SPANS


def test_span_status_is_the_error(fleet: Fleet, collector: Collector) -> None:
    body = body_of(SHORT, stop_token_ids=[10**6])
    answer = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=traced("6" * 32))
    assert answer.status_code == 400
    root = collector.wait("6" * 32)
    assert root.attributes["http.response.status_code"] == 400
    assert root.attributes["error.type"] == "invalid_request_error"
    assert not root.failed, "the client's fault"


def test_migrated_request_stays_one_trace(fleet: Fleet, collector: Collector) -> None:
    body = body_of(SHORT, 150, stream=True)
    with httpx.stream("POST", f"{fleet.url}/v1/completions", json=body, headers=traced("8" * 32)) as answer:
        lines = answer.iter_lines()
        next(lines)
        failed_node = running(fleet)
        failed_node.kill()
        assert [*lines][-2] == "data: [DONE]"
    try:
        root = collector.wait(answer.headers["x-request-id"], "decode node")
        lost, again = (child for child in root.children if child.name == "generate")
        assert lost.failed
        assert lost.attributes["pdserve.decode_node"] == failed_node.address
        assert not again.failed
        assert again.child("decode node").attributes["pdserve.outcome"] == "done"
        assert lost.end <= root.events["migration"] <= again.start
        assert not root.failed
    finally:
        failed_node.restart()


def test_failed_handoff_is_a_separate_trace_part(fleet: Fleet, collector: Collector) -> None:
    """P dies before it answers the prefill request."""
    (prefill,) = fleet.prefill

    def handoffs() -> float:
        return sum(node.counter("handoffs") for node in fleet.decode)

    before = handoffs()
    prefill.stop("frontend")
    with ThreadPoolExecutor(1) as thread:
        sent = thread.submit(send, fleet, body_of(LONG), traced("9" * 32))
        fleet.wait_until(lambda: handoffs() > before, 10.0)
        prefill.kill()
        request_id = sent.result()
    try:
        root = collector.wait(request_id, "decode node")
        at_d = root.child("generate").child("decode node")
        assert at_d.shape == {"reserve": {}, "handoff": {}, **LOCAL_SPANS}
        assert at_d.child("handoff").failed
        assert not at_d.failed
        check_contiguous(*(at_d.child(name) for name in LOCAL_SPANS))
        assert at_d.child("handoff").end <= at_d.child("queue").start <= at_d.events["first token"]
    finally:
        prefill.restart()


def running(fleet: Fleet) -> NodeProcess:
    (node,) = (node for node in fleet.decode if node.status().running)
    return node


@pytest.mark.slow
def test_unreachable_collector_is_logged_once_and_blocks_nothing(model: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        port = unused.getsockname()[1]
    export = FAST_EXPORT | {"OTEL_EXPORTER_OTLP_TIMEOUT": f"{patience(1):g}"}
    flags = [*SIMULATED]
    tracing = ["--traces", f"http://127.0.0.1:{port}"]
    with mock.patch.dict(os.environ, export), start_fleet(model, 0, 1, True, (), flags, tracing) as fleet:
        assert fleet.router is not None
        router = fleet.router
        for _ in range(3):
            send(fleet, body_of(SHORT), {})
        fleet.wait_until(lambda: "traces are lost" in router.output, 20.0)
        with Collector(port) as late:
            first = send(fleet, body_of(SHORT), {})
            assert {*late.wait(first).shape} == {"prepare", "admission", "generate"}
        assert router.output.count("traces are lost") == 1
        assert "again" in router.output
        send(fleet, body_of(SHORT), {})
