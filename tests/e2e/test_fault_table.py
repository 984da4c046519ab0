"""The fault table: what may happen to whom, at each stage of a handoff.

    fault                              outcome
    prefill node killed, stopped       D computes the prompt itself: the same tokens, at the latest --peer-timeout later
    decode node killed, stopped        the client hears of it, or gets the same tokens; P holds nothing for it
    client gone, deadline passed       nothing more is said but the failure

After each: 5 s later no node holds a block, a node that was stopped or restarted is connected again by itself, and the
next request is handed off and answered as ever. Never a wrong token.

    python -m pytest tests/e2e/test_fault_table.py      all of the table, in four minutes; scripts/test runs a few rows
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from checkpoints import make_checkpoint
from fleet import PARTS, NodeProcess
from stages import GIVEN_BACK, STAGES, WAIT_SECONDS, Held, Pair, held_at, is_prefix, start_pair

from pdserve.pb import pdserve_pb2 as pb

DEADLINE = 1.5  # seconds; an engine that a stage keeps stopped for longer would count as stuck


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("faults") / "model", "qwen3", num_hidden_layers=2)
    with start_pair(checkpoint) as pair:
        yield pair


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    for node in (started.prefill, started.decode):  # so that a row that fails does not fail those after it
        if node.child.state == "ended":
            node.restart()
        for part in PARTS:
            node.go_on(part)


def rows(everyday: dict[str, str]) -> list[object]:
    """All pairs of (fault, stage); those of ``everyday`` are part of every run, and "" is no stage."""
    return [
        pytest.param(fault, stage, marks=[] if everyday.get(fault) == stage else pytest.mark.slow)
        for fault in everyday
        for stage in STAGES
    ]


# ---------------------------------------------------------------- the prefill node


@pytest.mark.parametrize(
    ("fault", "stage"),
    rows({"killed": "computing", "node": "", "front": "", "engine": "before Release"}),
)
def test_prefill_node_faults_end_as_the_table_says(fault: str, stage: str, pair: Pair) -> None:
    """Killed and started again; or stopped, all of it or a part, and going on in the same life."""
    with held_at(stage, pair) as held:
        back = strike(fault, pair.prefill)
        held.release()
        assert held.result.wait().tokens == pair.expected
        pair.decode.wait_idle(GIVEN_BACK)
    back()
    pair.prefill.wait_idle(GIVEN_BACK)
    pair.check_served()


# ---------------------------------------------------------------- the decode node


@pytest.mark.parametrize(
    ("fault", "stage"),
    rows({"killed": "", "node": "last announced", "front": "", "engine": "decoding"}),
)
def test_decode_node_faults_end_as_the_table_says(fault: str, stage: str, pair: Pair) -> None:
    with held_at(stage, pair) as held:
        back = strike(fault, pair.decode)
        held.release()
        pair.prefill.wait_idle(GIVEN_BACK)
        if fault == "engine":
            assert failure_code(held) == pb.Failure.NODE_FAILED
        else:
            held.client.join()
            assert held.client.error is not None, "the connection of a front that does not answer is closed"
        assert is_prefix(held.result, pair.expected)
    back()
    pair.decode.wait_idle(GIVEN_BACK)
    pair.check_served()


def strike(fault: str, node: NodeProcess) -> Callable[[], None]:
    """Do it; returns how to bring the node back."""
    if fault == "killed":
        node.kill()
        return node.restart
    node.stop(fault)
    return lambda: node.go_on(fault)


# ---------------------------------------------------------------- the client


@pytest.mark.parametrize(
    ("fault", "stage"),
    rows({"cancelled": "announced", "gone": "reading", "late": "before Prefill"}),
)
def test_client_faults_end_as_the_table_says(fault: str, stage: str, pair: Pair) -> None:
    """It cancels, or it goes away and its stream ends with it, or its deadline passes."""
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
            node.wait_idle(GIVEN_BACK)
        assert not held.result.finish, "it went on after its end"
        assert is_prefix(held.result, pair.expected)
    pair.check_served()


def failure_code(held: Held) -> int:
    assert held.result.ended.wait(WAIT_SECONDS)
    assert held.result.failure is not None
    return held.result.failure.code
