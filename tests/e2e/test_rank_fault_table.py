"""The fault table for single ranks: a prefill node of one or two stages and a decode node of two shards.

    fault                            outcome
    a rank of either killed          its whole node ends within 5 s and names the rank; then as for a killed node
    a rank of P stopped for long     D computes the prompt itself: the same tokens
    a rank of D stopped for long     the client gets a failure
    a rank stopped briefly, or slow  the same tokens, and no node is lost

After each row: within 5 s no node holds a block; lost nodes reconnect by themselves; the next request is handed off and
has the right tokens. No row ever yields a wrong token. Rank 0 is in the engine process.

    python -m pytest tests/e2e/test_rank_fault_table.py      in minutes
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from itertools import product

import psutil
import pytest
from checkpoints import make_checkpoint
from fleet import NodeProcess
from machine import patience
from stages import RELEASE_SECONDS, WAIT_SECONDS, Pair, held_at, is_prefix, start_pair

from pdserve.pb import pdserve_pb2 as pb

END_SECONDS = 5.0
SHORT_STOP = 0.6  # seconds that an engine or a rank may be stopped without counting as lost
DEADLINE_MS = 1500

PARTS = ("engine", "rank 1")  # parts of a node with a rank
SECOND = {"prefill": "rank 1 (stage 1, shard 0)", "decode": "rank 1 (stage 0, shard 1)"}
STAGES = ("computing", "reading", "before Release", "decoding")
FAULTS = ("killed", "stopped", "paused", "slow")
LASTING = FAULTS[:2]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(180)]  # tests/nodes/test_ranks.py has quick ones


@pytest.fixture(scope="module", params=["1", "2"])
def started(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    checkpoint = make_checkpoint(tmp_path_factory.mktemp("faults") / "model", "qwen3", num_hidden_layers=2)
    # A step of two ranks takes several times as long as one of a single rank.
    with start_pair(checkpoint, [], ["--pp", request.param], ["--tp", "2"], num_tokens=50) as pair:
        yield pair


@pytest.fixture
def pair(started: Pair) -> Iterator[Pair]:
    yield started
    for node in (started.prefill, started.decode):  # a failed row must not fail the next ones
        if node.child.state == "ended":
            node.restart()
        for part in (*PARTS, *PARTS):
            node.resume(part)


ROWS = [*product(FAULTS, PARTS, STAGES)]


@pytest.mark.parametrize("started", ["2"], indirect=True)
@pytest.mark.parametrize(("fault", "part", "stage"), ROWS)
def test_requests_survive_a_failed_rank_of_the_prefill_node(fault: str, part: str, stage: str, pair: Pair) -> None:
    with held_at(stage, pair) as held:
        recover = inject(fault, pair.prefill, part)
        held.release()
        assert held.result.wait().tokens == pair.expected
        pair.decode.wait_idle(RELEASE_SECONDS)
    recover()
    pair.prefill.wait_idle(RELEASE_SECONDS)
    pair.check_served()


@pytest.mark.parametrize(("fault", "part", "stage"), ROWS)
def test_requests_survive_a_failed_rank_of_the_decode_node(fault: str, part: str, stage: str, pair: Pair) -> None:
    with held_at(stage, pair) as held:
        recover = inject(fault, pair.decode, part)
        held.release()
        if fault in LASTING:
            pair.decodes.wait_until(lambda: held.result.ended.is_set() or held.client.error is not None, WAIT_SECONDS)
            assert held.result.failure is None or held.result.failure.code == pb.Failure.NODE_FAILED
            assert is_prefix(held.result, pair.expected)
        else:
            assert held.result.wait().tokens == pair.expected
        pair.prefill.wait_idle(RELEASE_SECONDS)
    recover()
    pair.decode.wait_idle(RELEASE_SECONDS)
    pair.check_served()


def test_deadline_error_names_the_rank_without_a_read_report(pair: Pair) -> None:
    with held_at("reading", pair, timeout_ms=DEADLINE_MS) as held:
        pair.decode.stop("rank 1")
        held.release()
        assert held.result.ended.wait(patience(WAIT_SECONDS))
        assert held.result.failure is not None
        assert held.result.failure.code == pb.Failure.DEADLINE
        assert f"{SECOND['decode']} has not ended" in held.result.failure.message
    pair.decode.resume("rank 1")
    for node in (pair.prefill, pair.decode):
        node.wait_idle(RELEASE_SECONDS)
    pair.check_served()


def inject(fault: str, node: NodeProcess, part: str) -> Callable[[], None]:
    """Inject a fault; return a function that recovers the node or waits for its recovery."""
    (process,) = node.processes(part)
    match fault:
        case "killed":
            role = node.child.module.removesuffix("_node")
            return kill(process, node, "the engine process" if part == "engine" else SECOND[role])
        case "stopped":
            node.stop(part)
            return lambda: node.resume(part)
        case "paused":
            node.stop(part)
            timer = threading.Timer(SHORT_STOP, node.resume, [part])
            timer.start()
            return timer.join
        case _:
            return slow_down(process)


def kill(process: psutil.Process, node: NodeProcess, rank: str) -> Callable[[], None]:
    """Kill a rank; return a function that waits for the end of the whole node and restarts it."""
    processes = node.processes()
    process.kill()

    def recover() -> None:
        _, alive = psutil.wait_procs(processes[1:], patience(END_SECONDS))
        assert alive == []
        node.wait_ended(END_SECONDS)
        assert f"{rank} was killed by SIGKILL" in node.child.last_lines[-1]
        node.restart()

    return recover


def slow_down(process: psutil.Process) -> Callable[[], None]:
    """Let a process run only a third of the time; return a function that ends this."""
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
