"""The fault table for single ranks: a prefill node of two stages and a decode node of two shards.

    fault                            outcome
    a rank of either killed          its node ends within 5 s, all of it, and names the rank; then as for a node killed
    a rank of P stopped for long     D computes the prompt itself: the same tokens
    a rank of D stopped for long     the client hears of it
    stopped for a moment, or slow    the same tokens, and nobody is lost

After each: 5 s later no node holds a block, nodes that were lost are connected again by themselves, and the next
request is handed off and answered as ever. Never a wrong token. Rank 0 is in the engine process.

    python -m pytest tests/e2e/test_rank_fault_table.py      all of the table, in minutes; scripts/test runs a few rows
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import psutil
import pytest
from checkpoints import make_checkpoint
from fleet import NodeProcess
from stages import GIVEN_BACK, WAIT_SECONDS, Pair, held_at, is_prefix, start_pair

from pdserve.pb import pdserve_pb2 as pb

END_SECONDS = 5.0
MOMENT = 0.6  # seconds that an engine, or a rank, may stand still without being given up
DEADLINE_MS = 1500

PARTS = ("engine", "rank 1")  # of a node: those that its ranks are in
SECOND = {"prefill": "rank 1 (stage 1, shard 0)", "decode": "rank 1 (stage 0, shard 1)"}
STAGES = ("computing", "reading", "before Release", "decoding")
FAULTS = ("killed", "stopped", "paused", "slow")
LASTING = FAULTS[:2]
EVERYDAY = {
    ("prefill", "killed", "rank 1", "reading"),
    ("decode", "stopped", "rank 1", "decoding"),
}

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("faults") / "model", "qwen3", num_hidden_layers=2)
    # A step of two ranks takes several times as long as one of a single rank.
    with start_pair(checkpoint, [], ["--pp", "2"], ["--tp", "2"], num_tokens=50) as pair:
        yield pair


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    for node in (started.prefill, started.decode):  # so that a row that fails does not fail those after it
        if node.child.state == "ended":
            node.restart()
        for part in (*PARTS, *PARTS):
            node.go_on(part)


def rows(role: str) -> list[object]:
    """All (fault, part, stage); those of EVERYDAY are part of every run."""
    return [
        pytest.param(fault, part, stage, marks=[] if (role, fault, part, stage) in EVERYDAY else pytest.mark.slow)
        for fault in FAULTS
        for part in PARTS
        for stage in STAGES
    ]


@pytest.mark.parametrize(("fault", "part", "stage"), rows("prefill"))
def test_requests_survive_a_failed_rank_of_the_prefill_node(fault: str, part: str, stage: str, pair: Pair) -> None:
    with held_at(stage, pair) as held:
        back = strike(fault, pair.prefill, part)
        held.release()
        assert held.result.wait().tokens == pair.expected
        pair.decode.wait_idle(GIVEN_BACK)
    back()
    pair.prefill.wait_idle(GIVEN_BACK)
    pair.check_served()


@pytest.mark.parametrize(("fault", "part", "stage"), rows("decode"))
def test_requests_survive_a_failed_rank_of_the_decode_node(fault: str, part: str, stage: str, pair: Pair) -> None:
    with held_at(stage, pair) as held:
        back = strike(fault, pair.decode, part)
        held.release()
        if fault in LASTING:
            pair.decodes.wait_until(lambda: held.result.ended.is_set() or held.client.error is not None, WAIT_SECONDS)
            assert held.result.failure is None or held.result.failure.code == pb.Failure.NODE_FAILED
            assert is_prefix(held.result, pair.expected)
        else:
            assert held.result.wait().tokens == pair.expected
        pair.prefill.wait_idle(GIVEN_BACK)
    back()
    pair.decode.wait_idle(GIVEN_BACK)
    pair.check_served()


def test_deadline_error_names_the_rank_without_a_read_report(pair: Pair) -> None:
    with held_at("reading", pair, timeout_ms=DEADLINE_MS) as held:
        pair.decode.stop("rank 1")
        held.release()
        assert held.result.ended.wait(WAIT_SECONDS)
        assert held.result.failure is not None
        assert held.result.failure.code == pb.Failure.DEADLINE
        assert f"{SECOND['decode']} has not ended" in held.result.failure.message
    pair.decode.go_on("rank 1")
    for node in (pair.prefill, pair.decode):
        node.wait_idle(GIVEN_BACK)
    pair.check_served()


def strike(fault: str, node: NodeProcess, part: str) -> Callable[[], None]:
    """Do it. Returns what brings the node back, or waits until it is."""
    (process,) = node.processes(part)
    match fault:
        case "killed":
            role = node.child.module.removesuffix("_node")
            return kill(process, node, "the engine process" if part == "engine" else SECOND[role])
        case "stopped":
            node.stop(part)
            return lambda: node.go_on(part)
        case "paused":
            node.stop(part)
            timer = threading.Timer(MOMENT, node.go_on, [part])
            timer.start()
            return timer.join
        case _:
            return slow_down(process)


def kill(process: psutil.Process, node: NodeProcess, who: str) -> Callable[[], None]:
    """Returns what waits for the end of the whole node, and starts it again."""
    processes = node.processes()
    process.kill()

    def back() -> None:
        _, alive = psutil.wait_procs(processes[1:], END_SECONDS)
        assert alive == []
        node.wait_ended(END_SECONDS)
        assert f"{who} was killed by SIGKILL" in node.child.last_lines[-1]
        node.restart()

    return back


def slow_down(process: psutil.Process) -> Callable[[], None]:
    """From now on it runs for a third of the time only. Returns what ends that."""
    over = threading.Event()

    def run() -> None:
        while not over.wait(0.01):
            process.suspend()
            time.sleep(0.02)
            process.resume()

    thread = threading.Thread(target=run)
    thread.start()

    def end() -> None:
        over.set()
        thread.join()

    return end
