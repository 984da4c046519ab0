"""The fault table: faults of nodes and clients at each stage of a handoff, and their outcome.

    fault                              outcome
    prefill node killed, stopped       D computes the prompt itself, at most --peer-timeout later: the same tokens
    decode node killed, stopped        the client gets a failure, or the same tokens; P holds no block for it
    client gone, deadline passed       no output but the failure

After each row: within 5 s no node holds a block; a stopped or restarted node reconnects by itself; the next request is
handed off and has the right tokens. No row ever yields a wrong token.

The table holds as well for nodes with host memory and disk: if both nodes have a prefix of the prompt in host memory,
and if D has one in its cache, which P pulls.

    python -m pytest tests/e2e/test_fault_table.py      the whole table: simulated, with a model, and twice with tiers

It takes 16 minutes. scripts/test runs a few rows on simulated nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from checkpoints import make_checkpoint
from fleet import PARTS, NodeProcess
from machine import patience
from stages import (
    RELEASE_SECONDS,
    STAGES,
    TIER_FLAGS,
    WAIT_SECONDS,
    WARM,
    Held,
    Pair,
    held_at,
    is_prefix,
    start_pair,
)

from pdserve.pb import pdserve_pb2 as pb

# Simulated tokens do not depend on KV: tests/nodes/test_handoff_faults.py shows that wrong KV yields no token.
SIMULATED = ("--engine", "simulated", "--sim-costs", "step=0.005,read=0.01")
DEADLINE = 1.5  # seconds; an engine that a stage stops for longer would count as stuck


@pytest.fixture(
    scope="module",
    params=[
        pytest.param("simulated", id=""),
        *(pytest.param(variant, marks=pytest.mark.slow) for variant in ("model", "host memory", "pulls")),
    ],
)
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    directory = tmp_path_factory.mktemp("faults")
    checkpoint = make_checkpoint(directory / "model", "qwen3", num_hidden_layers=2)
    if request.param in ("simulated", "model"):
        with start_pair(checkpoint, SIMULATED if request.param == "simulated" else ()) as pair:
            yield pair
        return
    decode = directory / "decode"
    decode.touch()
    flags = [*TIER_FLAGS, "--disk-kv", str(directory), "--disk-kv-size", "1G"]
    source = ["--kv-source", f"file://{decode}"]
    always = ["--handoff-min-tokens", "0"]
    with start_pair(checkpoint, flags, source, always) as pair:
        decode.write_text(pair.decode.address)
        pair.warm = request.param
        pair.wait_connected()
        yield pair


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    for node in (started.prefill, started.decode):  # a failed row must not fail the next ones
        if node.child.state == "ended":
            node.restart()
        for part in PARTS:
            node.resume(part)


def rows(fast: dict[str, str]) -> list[object]:
    """Return all pairs of (fault, stage), all but those of ``fast`` marked slow; stage "" matches no pair."""
    return [
        pytest.param(fault, stage, marks=[] if fast.get(fault) == stage else pytest.mark.slow)
        for fault in fast
        for stage in STAGES
    ]


def test_prefixes_come_from_where_the_variant_says(pair: Pair) -> None:
    counters = [
        (pair.prefill, "host_kv_hit_tokens"),
        (pair.decode, "host_kv_hit_tokens"),
        (pair.prefill, "pulled_tokens"),
    ]
    before = [node.counter(name) for node, name in counters]
    pair.check_served()
    p_hits, d_hits, p_pulled = (node.counter(name) - then for (node, name), then in zip(counters, before, strict=True))
    assert (p_hits > 0, d_hits > 0, p_pulled) == {
        "": (False, False, 0),
        "host memory": (True, True, 0),
        "pulls": (False, False, WARM),
    }[pair.warm]


# ---------------------------------------------------------------- the prefill node


@pytest.mark.parametrize(
    ("fault", "stage"),
    rows({"killed": "computing", "node": "", "frontend": "", "engine": "before Release"}),
)
def test_prefill_node_faults_end_as_the_table_says(fault: str, stage: str, pair: Pair) -> None:
    """The node is killed and restarted; or it or one of its processes is stopped and resumed in the same epoch."""
    with held_at(stage, pair) as held:
        recover = inject(fault, pair.prefill)
        held.release()
        assert held.result.wait().tokens == pair.expected
        pair.decode.wait_idle(RELEASE_SECONDS)
    recover()
    pair.prefill.wait_idle(RELEASE_SECONDS)
    pair.check_served()


# ---------------------------------------------------------------- the decode node


@pytest.mark.parametrize(
    ("fault", "stage"),
    rows({"killed": "", "node": "last announced", "frontend": "", "engine": "decoding"}),
)
def test_decode_node_faults_end_as_the_table_says(fault: str, stage: str, pair: Pair) -> None:
    with held_at(stage, pair) as held:
        recover = inject(fault, pair.decode)
        held.release()
        pair.prefill.wait_idle(RELEASE_SECONDS)
        if fault == "engine":
            assert failure_code(held) == pb.Failure.NODE_FAILED
        else:
            held.client.join()
            assert held.client.error is not None, "the connection of a frontend that does not answer is closed"
        assert is_prefix(held.result, pair.expected)
    recover()
    pair.decode.wait_idle(RELEASE_SECONDS)
    pair.check_served()


def inject(fault: str, node: NodeProcess) -> Callable[[], None]:
    """Inject a fault; return the function that recovers the node."""
    if fault == "killed":
        node.kill()
        return node.restart
    node.stop(fault)
    return lambda: node.resume(fault)


# ---------------------------------------------------------------- the client


@pytest.mark.parametrize(
    ("fault", "stage"),
    rows({"cancelled": "announced", "gone": "reading", "late": "before Prefill"}),
)
def test_client_faults_end_as_the_table_says(fault: str, stage: str, pair: Pair) -> None:
    """The client cancels, or closes its stream, or its deadline passes."""
    with held_at(stage, pair, timeout_ms=int(DEADLINE * 1000) if fault == "late" else 0) as held:
        match fault:
            case "cancelled":
                held.client.cancel(held.result)
            case "gone":
                held.client.close()
            case "late":
                assert failure_code(held) == pb.Failure.DEADLINE
        held.release()
        for node in (pair.prefill, pair.decode):
            node.wait_idle(RELEASE_SECONDS)
        assert not held.result.finish, "the request continued after its end"
        assert is_prefix(held.result, pair.expected)
    pair.check_served()


def failure_code(held: Held) -> int:
    assert held.result.ended.wait(patience(WAIT_SECONDS))
    assert held.result.failure is not None
    return held.result.failure.code
