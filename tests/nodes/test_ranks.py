"""Nodes of two ranks, as processes: they serve, get stuck and end as one."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from pathlib import Path

import psutil
import pytest
from checkpoints import reference_greedy, reference_model
from fleet import Fleet, HttpError, NodeProcess, add_tokenizer
from machine import patience

FLAGS = (
    "--block-size",
    "8",
    "--kv-cache-memory",
    "1MiB",
    "--max-model-len",
    "256",
    "--peer-timeout",
    f"{patience(2.0):g}",
)
RANK_1 = "rank 1 (stage 0, shard 1)"
PROMPT = list(range(3, 40))
END_SECONDS = 5.0


@pytest.fixture
def fleet(checkpoint: Path) -> Iterator[Fleet]:
    add_tokenizer(checkpoint)
    with closing(Fleet()) as fleet:
        yield fleet


def processes_of(node: NodeProcess) -> list[psutil.Process]:
    """Return frontend, engine and ranks."""
    frontend = psutil.Process(node.pid)
    return [frontend, *frontend.children(recursive=True)]


def rank_of(node: NodeProcess) -> psutil.Process:
    (rank,) = [process for process in processes_of(node) if "engine.executor.rank_process" in process.cmdline()]
    return rank


def assert_gone(fleet: Fleet, processes: list[psutil.Process]) -> None:
    def has_ended(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):
            return bool(process.status() == psutil.STATUS_ZOMBIE)
        return True

    fleet.wait_until(lambda: all(map(has_ended, processes)), END_SECONDS)


def last_line(fleet: Fleet, node: NodeProcess) -> str:
    fleet.wait_until(lambda: node.child.state == "ended", END_SECONDS)
    return node.child.last_lines[-1]


def test_two_ranks_serve_as_one_node_and_a_stopped_or_killed_rank_is_named(fleet: Fleet, checkpoint: Path) -> None:
    node = fleet.start_decode(checkpoint, [*FLAGS, "--tp", "2"])
    fleet.start_router(checkpoint, ["--migrations", "0"])  # no other node can take a request
    fleet.wait_ready()
    reference = reference_model(checkpoint)
    for length in (1, 8, 37):
        assert fleet.complete(PROMPT[:length], 12) == reference_greedy(reference, PROMPT[:length], 12)
    rank = rank_of(node)
    rank.suspend()
    fleet.wait_until(lambda: f"{RANK_1} has sent no heartbeat" in node.output, END_SECONDS)
    fleet.wait_until(lambda: not fleet.serves(), END_SECONDS)
    rank.resume()
    fleet.wait_until(fleet.serves, END_SECONDS)
    assert fleet.complete(PROMPT, 12) == reference_greedy(reference, PROMPT, 12)
    node.wait_idle()
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(fleet.complete, PROMPT, 200)
        fleet.wait_until(lambda: node.status().running == 1, END_SECONDS)
        processes = processes_of(node)
        rank.kill()
        assert_gone(fleet, processes)
        with pytest.raises(HttpError) as failed:
            answer.result(patience(END_SECONDS))
    assert failed.value.status == 502
    assert f"{RANK_1} was killed by SIGKILL" in last_line(fleet, node)


@pytest.mark.parametrize(
    ("part", "stopped"), [("frontend", True), pytest.param("engine", False, marks=pytest.mark.slow)]
)
def test_ranks_exit_when_frontend_or_engine_is_killed(fleet: Fleet, checkpoint: Path, part: str, stopped: bool) -> None:
    node = fleet.start_decode(checkpoint, [*FLAGS, "--tp", "2"])
    fleet.wait_ready()
    processes = processes_of(node)
    if stopped:
        rank_of(node).suspend()
    processes[("frontend", "engine").index(part)].kill()
    assert_gone(fleet, processes)


@pytest.mark.slow  # tests/e2e/test_transformers_handoff.py has a quick test
def test_every_rank_reads_its_part_of_the_kv(fleet: Fleet, checkpoint: Path) -> None:
    prefill = fleet.start_prefill(checkpoint, FLAGS)
    node = fleet.start_decode(checkpoint, [*FLAGS, "--tp", "2", "--handoff-min-tokens", "0"])
    fleet.start_router(checkpoint)
    fleet.wait_ready()
    reference = reference_model(checkpoint)
    for length in (1, 8, 37):
        assert fleet.complete(PROMPT[:length], 12) == reference_greedy(reference, PROMPT[:length], 12)
    assert node.counter("handoffs") == 3
    assert node.counter("handoff_recomputes") == node.counter("kv_read_failures") == 0
    node.wait_idle()
    prefill.wait_idle()


@pytest.mark.slow
def test_sigterm_ends_all_ranks(fleet: Fleet, checkpoint: Path) -> None:
    node = fleet.start_decode(checkpoint, [*FLAGS, "--tp", "2"])
    fleet.wait_ready()
    processes = processes_of(node)
    node.signal(signal.SIGTERM)
    assert_gone(fleet, processes)
    fleet.wait_until(lambda: node.child.state == "ended", END_SECONDS)
    assert node.child.process.returncode == 0
    assert not any(word in node.output for word in ("Traceback", "ERROR", "SIGKILL"))
