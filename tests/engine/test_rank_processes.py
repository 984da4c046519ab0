"""The leader's side of other ranks: sending never blocks, and the root cause of failures is reported."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from typing import NoReturn

import pytest

from engine.executor.rank_messages import FromRank, RankOutput, Step, ToRank
from engine.executor.rank_processes import Failure, RankChannel, RankProcesses
from pdserve.config.parallel import ParallelConfig
from pdserve.images import EncodedImage
from pdserve.ipc.frames import Frames, framed
from pdserve.ipc.messages import Failed
from pdserve.records import EMPTY_OUTPUT, ModelRunnerOutput, NewSequence, StepOutput, StepPlan
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams

# The thread ends here after a failure; in an engine, the process does.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

SPLIT = ParallelConfig((2,), 3)
SECONDS = 5.0


class Ranks:
    """Ranks 1 and 2, played by the test, and their leader."""

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[tuple[int, ModelRunnerOutput]] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        pairs = [socket.socketpair() for _ in range(2)]
        self._channels = [
            RankChannel(SPLIT.position(rank), ours, timeout=1.0) for rank, (ours, _) in enumerate(pairs, start=1)
        ]
        self.sockets = {rank: theirs for rank, (_, theirs) in enumerate(pairs, start=1)}
        self.processes = RankProcesses(SPLIT.position(0), self._channels, self._on_failure)
        self.processes.on_output = lambda rank, output: self.outputs.put((rank, output))

    def send(self, rank: int, message: FromRank) -> None:
        self.sockets[rank].sendall(framed(message))

    def close(self) -> None:
        self.processes.close()
        for sock in (*self.sockets.values(), *(channel.socket for channel in self._channels)):
            sock.close()

    def _on_failure(self, failure: Failure) -> NoReturn:
        self.failures.put((failure.error, failure.message))
        raise SystemExit


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_sending_does_not_wait_for_a_rank_that_does_not_read(ranks: Ranks) -> None:
    prompt = NewSequence(1, pack_tokens(range(10_000)), 10_000, 0, (), SamplingParams(max_tokens=1))
    plans = [Step(StepPlan(number, new=(prompt,))) for number in range(1, 101)]
    for plan in plans:
        ranks.processes.send(plan)
    for sock in ranks.sockets.values():
        sock.settimeout(SECONDS)
        frames: Frames[ToRank] = Frames(ToRank)
        received: list[ToRank] = []
        while len(received) < len(plans):
            received += frames.cut(sock.recv(1 << 16))
        assert received == plans


def test_later_stages_get_their_own_message() -> None:
    split = ParallelConfig((1, 1), 2)
    pairs = [socket.socketpair() for _ in range(3)]
    channels = [RankChannel(split.position(rank), ours, timeout=1.0) for rank, (ours, _) in enumerate(pairs, start=1)]
    processes = RankProcesses(split.position(0), channels, lambda failure: pytest.fail(failure.message))
    first = Step(StepPlan(1, images=(EncodedImage(bytes(32), 1, 1, b"rgb"),)))
    later = Step(StepPlan(1, images=(EncodedImage(bytes(32), 1, 1, b""),)))
    processes.send(first, later)
    received = [Frames[ToRank](ToRank).cut(theirs.recv(1 << 16)) for _, theirs in pairs]
    assert received == [[first], [later], [later]]
    processes.close()
    for sock in (sock for pair in pairs for sock in pair):
        sock.close()


def test_outputs_carry_their_rank(ranks: Ranks) -> None:
    outputs = [(2, ModelRunnerOutput(StepOutput(1))), (2, EMPTY_OUTPUT), (1, ModelRunnerOutput(StepOutput(1)))]
    for rank, output in outputs:
        ranks.send(rank, RankOutput(output))
        assert ranks.outputs.get(timeout=SECONDS) == (rank, output)


def test_the_root_cause_is_reported_rather_than_its_consequence(ranks: Ranks) -> None:
    """Rank 2 lost its collective because rank 1 exited; its message may come first."""
    ranks.send(2, Failed("EngineDied", "RuntimeError: connection closed by peer"))
    ranks.send(1, Failed("CapacityError", "no room"))
    assert ranks.failures.get(timeout=SECONDS) == ("CapacityError", "rank 1 (stage 0, shard 1): no room")


def test_the_leaders_own_failure_is_logged_and_reported(ranks: Ranks, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(ValueError, match="wrong shape"), ranks.processes.reporting_own_failure():
        raise ValueError("wrong shape")
    assert ranks.failures.get(timeout=SECONDS) == ("EngineDied", "rank 0 (stage 0, shard 0): ValueError: wrong shape")
    assert "Traceback" in caplog.text
    assert "wrong shape" in caplog.text


def test_the_leaders_failure_is_not_reported_where_another_ranks_message_came_before(ranks: Ranks) -> None:
    """Rank 0 lost its collective because rank 1 failed, whose message arrived first."""
    ranks.send(1, Failed("EngineDied", "ValueError: wrong shape"))
    with pytest.raises(RuntimeError), ranks.processes.reporting_own_failure():
        raise RuntimeError("connection closed by peer")
    assert ranks.failures.get(timeout=SECONDS) == ("EngineDied", "rank 1 (stage 0, shard 1): ValueError: wrong shape")


def test_failures_while_ranks_are_closed_are_ignored(ranks: Ranks) -> None:
    ranks.processes.ignore_failures()
    ranks.send(1, Failed("EngineDied", "RuntimeError: connection closed by peer"))
    ranks.processes.close()
    assert ranks.failures.empty()


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (b"", "has gone"),
        (b"\x03\0\0\0abc", "no message of a rank"),
        (framed(Step(StepPlan(1))), "no message of a rank"),
    ],
    ids=["end", "garbage", "of a leader"],
)
def test_a_rank_that_exits_or_sends_garbage_fails(ranks: Ranks, last: bytes, words: str) -> None:
    ranks.sockets[2].sendall(last)
    ranks.sockets[2].close()
    kind, text = ranks.failures.get(timeout=SECONDS)
    assert kind == "EngineDied"
    assert text.startswith("rank 2 (stage 0, shard 2)")
    assert words in text


def test_exits_after_an_announced_shutdown_are_no_failures(ranks: Ranks) -> None:
    ranks.processes.announce_shutdown()
    for sock in ranks.sockets.values():
        sock.close()
    ranks.processes.close()
    assert ranks.failures.empty()
