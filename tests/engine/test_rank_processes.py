"""The leader's end of other ranks: it never waits for one to read, and tells which of them failed first."""

from __future__ import annotations

import queue
import socket
from collections.abc import Iterator
from typing import NoReturn

import msgspec
import pytest

from engine.executor.rank_messages import Failed, FromRank, RankOutput, Step, ToRank
from engine.executor.rank_processes import RankChannel, RankProcesses
from engine.ipc.frames import Frames, framed
from pdserve.config.parallel import ParallelConfig
from pdserve.records import EMPTY_OUTPUT, ModelRunnerOutput, NewSequence, SamplingParams, StepOutput, StepPlan
from pdserve.rpc.protobuf import pack_tokens

# How a crew's thread ends here after a failure; of an engine, the process does.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")

SPLIT = ParallelConfig((2,), 3)
SECONDS = 5.0


class Ranks:
    """Ranks 1 and 2, played by the test, and what their leader makes of them."""

    def __init__(self) -> None:
        self.outputs: queue.SimpleQueue[tuple[int, ModelRunnerOutput]] = queue.SimpleQueue()
        self.failures: queue.SimpleQueue[tuple[str, str]] = queue.SimpleQueue()
        pairs = [socket.socketpair() for _ in range(2)]
        self._links = [
            RankChannel(SPLIT.place(rank), ours, patience=1.0) for rank, (ours, _) in enumerate(pairs, start=1)
        ]
        self.sockets = {rank: theirs for rank, (_, theirs) in enumerate(pairs, start=1)}
        self.crew = RankProcesses(self._links, self._on_failure)
        self.crew.on_output = lambda rank, output: self.outputs.put((rank, output))

    def say(self, rank: int, message: FromRank) -> None:
        self.sockets[rank].sendall(framed(message))

    def close(self) -> None:
        self.crew.close()
        for sock in (*self.sockets.values(), *(link.socket for link in self._links)):
            sock.close()

    def _on_failure(self, kind: str, text: str) -> NoReturn:
        self.failures.put((kind, text))
        raise SystemExit


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    ranks = Ranks()
    yield ranks
    ranks.close()


def test_a_rank_that_does_not_read_holds_nobody_up(ranks: Ranks) -> None:
    prompt = NewSequence(1, pack_tokens(range(10_000)), 10_000, 0, (), SamplingParams(max_tokens=1))
    plans = [Step(StepPlan(number, new=(prompt,))) for number in range(1, 101)]
    for plan in plans:
        ranks.crew.send(plan)
    for sock in ranks.sockets.values():
        sock.settimeout(SECONDS)
        frames: Frames[ToRank] = Frames(msgspec.msgpack.Decoder(ToRank))
        received: list[ToRank] = []
        while len(received) < len(plans):
            received += frames.cut(sock.recv(1 << 16))
        assert received == plans


def test_outputs_are_told_with_their_rank(ranks: Ranks) -> None:
    outputs = [(2, ModelRunnerOutput(StepOutput(1))), (2, EMPTY_OUTPUT), (1, ModelRunnerOutput(StepOutput(1)))]
    for rank, output in outputs:
        ranks.say(rank, RankOutput(output))
        assert ranks.outputs.get(timeout=SECONDS) == (rank, output)


def test_the_cause_is_told_rather_than_what_follows_from_it(ranks: Ranks) -> None:
    """The second rank lost its collective because the first ended; its word may come first."""
    ranks.say(2, Failed("EngineDied", "RuntimeError: connection closed by peer"))
    ranks.say(1, Failed("CapacityError", "no room"))
    assert ranks.failures.get(timeout=SECONDS) == ("CapacityError", "rank 1 (stage 0, shard 1): no room")


@pytest.mark.parametrize(
    ("last", "words"),
    [
        (b"", "has gone"),
        (b"\x03\0\0\0abc", "no message of a rank"),
        (framed(Step(StepPlan(1))), "no message of a rank"),
    ],
    ids=["end", "garbage", "of a leader"],
)
def test_a_rank_that_ends_or_talks_nonsense_fails(ranks: Ranks, last: bytes, words: str) -> None:
    ranks.sockets[2].sendall(last)
    ranks.sockets[2].close()
    kind, text = ranks.failures.get(timeout=SECONDS)
    assert kind == "EngineDied"
    assert text.startswith("rank 2 (stage 0, shard 2)")
    assert words in text


def test_ranks_that_were_dismissed_may_end(ranks: Ranks) -> None:
    ranks.crew.announce_shutdown()
    for sock in ranks.sockets.values():
        sock.close()
    ranks.crew.close()
    assert ranks.failures.empty()
