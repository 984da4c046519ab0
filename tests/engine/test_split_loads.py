"""Splits: a node computes the first tokens of a prompt while it pulls the KV of later ones, and goes on behind both."""

from __future__ import annotations

import time
from array import array

import pytest
from test_itl_target import Model, node_with_streams
from toy import reference
from toy_node import BLOCK, DEPTHS, Node

from pdserve.ipc.messages import (
    Cancel,
    ComputeBeside,
    Connect,
    EventBatch,
    FreeLease,
    KVConfirmed,
    LeaseCached,
    Leased,
    Mode,
    Pause,
    Prefilled,
    PrefillLocally,
    Resume,
    StartRead,
    ToEngine,
)
from pdserve.records import Peer
from pdserve.sampling_params import SamplingParams

each_depth = pytest.mark.parametrize("depth", DEPTHS, ids=str)
each_mode = pytest.mark.parametrize("mode", [Mode.PULL_AND_LEASE, Mode.HANDOFF], ids=str)
PROMPT = list(range(100, 160))
TURN = [*PROMPT, 7, 8, 9]
RID = 99
LEASE = 98
MEETING = 24  # tokens
END = 60  # tokens
FOUR = SamplingParams(max_tokens=4)


class Splitting:
    """A source that has served a prompt, and a reader that computes the first tokens of the next turn.

    A step of the reader computes one block of it at most.
    """

    def __init__(self, depth: tuple[int, int] = (1, 1), mode: Mode = Mode.HANDOFF, cached: int = 0) -> None:
        """The reader has the first ``cached`` tokens in its prefix cache."""
        self.source = Node(64, *depth, kv_checksum=True)
        self.reader = Node(64, *depth, kv_checksum=True, batch_tokens=8, max_num_seqs=4)
        for node, prompt in ((self.source, PROMPT), (self.reader, PROMPT[:cached])):
            if prompt:
                node.submit(1, prompt, SamplingParams(max_tokens=1), Mode.LOCAL)
                node.run()
        self.computed = self.reader.runner.num_tokens
        self.mode = mode
        self.parts: list[Leased] = []
        self.reader.obey(Connect(Peer("source", self.source.epoch, (self.source.kv,))))
        self.reader.submit(RID, TURN, FOUR, mode)
        self.cached = cached
        assert [reservation.cached_tokens for _ in range(3) for reservation in self.reader.step().reserved] == [cached]
        self.reader.obey(ComputeBeside(RID, MEETING))

    def read(self) -> None:
        """Order the read of what the source has behind the meeting point."""
        token_ids = array("I", TURN[:-1]).tobytes()
        self.source.obey(LeaseCached(LEASE, token_ids, "", skip_tokens=MEETING))
        (leased,) = [lease for _ in range(4) for lease in self.source.step().leased]
        assert (leased.num_tokens, len(leased.block_ids)) == (END, (END - MEETING) // BLOCK)
        self.obey(StartRead(RID, self.source.epoch, leased.block_ids, END, leased.digests, pull=True))

    def arrive(self) -> None:
        """Read, and step until the digests are compared."""
        self.read()
        waits = {"reads", "checked"}
        while waits:
            batch = self.step()
            waits = {name for name in waits if not getattr(batch, name)}
            assert not any(check.num_corrupt for check in batch.checked)
            time.sleep(0.001)
        self.source.obey(FreeLease(LEASE))

    def step(self) -> EventBatch:
        batch = self.reader.step()
        self.parts += batch.leased
        return batch

    def compute(self) -> None:
        """Run steps until the first part is computed."""
        while self.reader.runner.num_tokens - self.computed < MEETING - self.cached:
            self.step()
        self.settle()

    def settle(self, steps: int = 4) -> None:
        for _ in range(steps):
            self.step()

    def obey(self, message: ToEngine) -> None:
        self.reader.obey(message)

    @property
    def num_computed(self) -> int:
        """Tokens of the turn that the reader has computed, outputs included."""
        return self.reader.runner.num_tokens - self.computed

    def finish(self, *, num_computed: int) -> None:
        """Run to the end. The reader has computed ``num_computed`` tokens of the prompt, and all tokens are right."""
        num_outputs = 4 if self.mode is Mode.HANDOFF else 1
        while len(self.reader.tokens[RID, 0]) < num_outputs:
            self.step()
        self.settle()
        assert self.reader.tokens[RID, 0] == reference(TURN, 0, num_outputs)
        assert self.num_computed == num_computed + num_outputs - 1
        if self.mode.for_peer:
            assert [block for part in self.parts for block in part.block_ids]
            assert self.reader.kv_of(self.parts) == TURN
            assert [part.last for part in self.parts] == [*(False for _ in self.parts[1:]), True]
        self.obey(FreeLease(RID))
        self.close()

    def close(self) -> None:
        while self.reader.scheduler.status().quarantined:
            self.step()
            time.sleep(0.001)  # the connector's thread copies
        for node in (self.source, self.reader):
            node.run()
            node.assert_all_free()
            node.close()


REST = len(TURN) - END  # tokens behind what the source has


@each_depth
@each_mode
@pytest.mark.parametrize("cached", [0, 8])
@pytest.mark.parametrize("first", ["pull", "steps"])
def test_prompt_goes_on_behind_both_parts_whichever_ends_first(
    depth: tuple[int, int], mode: Mode, cached: int, first: str
) -> None:
    world = Splitting(depth, mode, cached)
    if first == "steps":
        world.compute()
        assert world.num_computed == MEETING - cached, "no token behind the meeting point is computed before the end"
    world.arrive()
    world.obey(KVConfirmed(RID, END, ()))
    world.finish(num_computed=MEETING - cached + REST)


@each_depth
@each_mode
@pytest.mark.parametrize("steps", [0, 1, 5])
def test_prompt_is_computed_if_the_source_has_nothing(depth: tuple[int, int], mode: Mode, steps: int) -> None:
    """No token is computed twice, also if a step is in flight."""
    world = Splitting(depth, mode)
    world.settle(steps)
    world.obey(KVConfirmed(RID, 0, ()))
    world.finish(num_computed=len(TURN))


@each_depth
@each_mode
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("reads", ["none", "in flight", "ended"])
def test_prompt_whose_pull_is_given_up_is_computed_here(
    depth: tuple[int, int], mode: Mode, steps: int, reads: str
) -> None:
    """The node keeps the computed KV and drops the KV that was read. It does not reuse blocks of a read in flight."""
    world = Splitting(depth, mode)
    world.settle(steps)
    if reads == "in flight":
        world.read()
    elif reads == "ended":
        world.arrive()
    world.obey(PrefillLocally(RID))
    if reads == "in flight":
        world.source.obey(FreeLease(LEASE))
    world.finish(num_computed=len(TURN))


@each_depth
@pytest.mark.parametrize("steps", [0, 1, 5])
@pytest.mark.parametrize("reads", [False, True])
def test_cancelled_prompt_holds_nothing(depth: tuple[int, int], steps: int, reads: bool) -> None:
    world = Splitting(depth)
    world.settle(steps)
    if reads:
        world.read()
    world.obey(Cancel(RID))
    world.obey(KVConfirmed(RID, END, ()))  # too late
    world.source.obey(FreeLease(LEASE))
    world.settle()
    world.close()


@pytest.mark.parametrize("ends", ["confirmed", "nothing", "given up"])
def test_paused_prompt_goes_on_after_its_load(ends: str) -> None:
    world = Splitting()
    world.settle(1)
    world.obey(Pause(RID))
    if ends == "confirmed":
        world.arrive()
        world.obey(KVConfirmed(RID, END, ()))
    elif ends == "nothing":
        world.obey(KVConfirmed(RID, 0, ()))
    else:
        world.read()
        world.obey(PrefillLocally(RID))
        world.source.obey(FreeLease(LEASE))
    world.settle(12)
    assert not world.reader.tokens[RID, 0]
    assert world.reader.scheduler.status().paused == 1
    world.obey(Resume(RID))
    world.finish(num_computed=MEETING + REST if ends == "confirmed" else len(TURN))


def test_tokens_that_were_computed_do_not_count_as_cached() -> None:
    world = Splitting(cached=8)
    world.arrive()
    world.obey(KVConfirmed(RID, END, ()))
    prefilled: list[Prefilled] = []
    while not prefilled:
        prefilled = world.step().prefilled
    assert [event.cached_tokens for event in prefilled] == [8 + END - MEETING]
    world.finish(num_computed=MEETING - 8 + REST)


def test_streams_decode_beside_a_split() -> None:
    world = Splitting()
    world.reader.submit(5, [3] * 6, SamplingParams(max_tokens=20), Mode.LOCAL)
    world.settle(3)
    world.arrive()
    world.obey(KVConfirmed(RID, END, ()))
    while len(world.reader.tokens[5, 0]) < 20:
        world.step()
    assert world.reader.tokens[5, 0] == reference([3] * 6, 0, 20)
    world.computed += 6 + 19
    world.finish(num_computed=MEETING + REST)


def test_first_part_is_computed_in_full_steps_if_nothing_decodes() -> None:
    """The stream will not come before its prompt is computed."""
    model = Model()
    node = node_with_streams(model, (1, 1), streams=1)
    node.obey(Cancel(0))
    node.submit(9, [9] * 6000, SamplingParams(max_tokens=2), Mode.HANDOFF)
    node.step()
    node.obey(ComputeBeside(9, 4000))
    model.steps.clear()
    node.run()
    assert [[*step.chunks.values()] for step in model.steps] == [[2000], [2000]]
    node.obey(Cancel(9))
    node.run()
    node.assert_all_free()
    node.close()
