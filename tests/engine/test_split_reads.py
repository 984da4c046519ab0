"""Split reads: a node computes the first tokens of a prompt while it reads the KV of later ones from disk.

Steps take a millisecond per token, and so does the disk: it reads the second half of a prefix. The first half takes two
steps. Transfers end when a test says so.
"""

from __future__ import annotations

from typing import Any

import pytest
from slow_disk import SlowDisk
from test_disk_tier import KINDS, disk_of, files_of, filled, tier_of
from tiered_node import ask, memory_of, rest, words
from toy import reference
from toy_node import BLOCK, Node

from pdserve.disk_kv import DiskOrder, DiskWork
from pdserve.ipc.messages import Batch, Cancel, Fetched, Mode, Pause, Prefilled, Resume
from pdserve.sampling_params import SamplingParams

PROMPT = words(1)
END = len(PROMPT) // BLOCK * BLOCK  # tokens of the prefix on disk
MEETING = END // 2
RID = 9
PER_TOKEN = 1e-3  # seconds
FOUR = SamplingParams(max_tokens=4)


class Splitting:
    """A node that has the prefix of a prompt on disk only, and begins with the prompt."""

    def __init__(self, sampling: SamplingParams = FOUR, mode: Mode = Mode.LOCAL, **options: Any) -> None:
        self.node = slow_node(**options)
        self.totals = self.node.scheduler.totals
        self.computed = self.node.runner.num_tokens
        self.preempted = self.totals.preemptions
        self.hits = self.totals.disk_kv_hit_tokens
        self.prefilled: list[Prefilled] = []
        self.fetched: list[Fetched] = []
        self.node.submit(RID, PROMPT, sampling, mode)
        self.step(2)

    def step(self, count: int = 4) -> None:
        for _ in range(count):
            batch: Batch = self.node.step()
            self.prefilled += batch.prefilled
            self.fetched += batch.fetched

    @property
    def reads(self) -> list[DiskOrder]:
        """Reads in flight."""
        return [order for _, order in disk_of(self.node).orders.values() if order.work is DiskWork.READ]

    @property
    def num_computed(self) -> int:
        return self.node.runner.num_tokens - self.computed

    @property
    def num_waiting(self) -> int:
        return self.node.scheduler.status().waiting

    def compute(self) -> None:
        """Compute the first part."""
        self.step(6)
        assert self.num_computed == MEETING, "no token behind the meeting point is computed before the read ends"
        assert self.num_waiting == 1, "it has left the steps"

    def land(self, *, fails: bool = False) -> None:
        """End the read."""
        (order,) = self.reads
        disk_of(self.node).land(order.order_id, fails=fails)

    def fetch(self) -> None:
        """Copy the blocks read from disk to the device."""
        for _ in range(4):
            self.step()
            memory_of(self.node).finish()

    def finish(self, *, num_computed: int, num_outputs: int = 4) -> None:
        """Run to the end. The node has computed ``num_computed`` tokens of the prompt, and all tokens are right."""
        for _ in range(40):
            self.step(2)
            memory_of(self.node).finish()
        assert self.node.tokens[RID, 0] == reference(PROMPT, 0, num_outputs)
        assert self.num_computed == num_computed + num_outputs - 1
        assert self.totals.preemptions == self.preempted
        self.close()

    def evict(self) -> None:
        """Evict what may leave host memory, as stores do that fill it."""
        host = tier_of(self.node)._host.areas.kv.host
        host.give_back(host.take(host.total))

    def close(self) -> None:
        rest(self.node)
        assert not tier_of(self.node)._unfetched
        self.node.assert_all_free()
        self.node.close()


def slow_node(**options: Any) -> Node:
    """Return a node with prompts on disk, which reads as fast as it computes."""
    node = filled(seconds=lambda plan: PER_TOKEN * plan.num_tokens, **options)
    tier = tier_of(node)
    tier._clock = lambda: 0.0
    tier._cost.add(10.0, 10 * BLOCK * PER_TOKEN)
    return node


REST = len(PROMPT) - END


@pytest.mark.parametrize("first", ["read", "steps"])
def test_prompt_goes_on_behind_both_parts_whichever_ends_first(first: str) -> None:
    world = Splitting()
    (order,) = world.reads
    assert [name.block_hash for name in order.names] == [
        name.block_hash for name in files_of(world.node, PROMPT)[MEETING // BLOCK :]
    ]
    if first == "steps":
        world.compute()
    world.land()
    world.finish(num_computed=MEETING + REST)


def test_counts_of_a_split_read_are_true() -> None:
    """Tokens that were read count as cached; tokens that were computed meanwhile do not."""
    world = Splitting()
    admitted, cached = world.totals.admitted_prompt_tokens, world.totals.prefix_cached_tokens
    now, tier = 0.0, tier_of(world.node)
    tier._clock = lambda: now
    saved, expected = world.totals.disk_kv_saved_seconds, world.totals.disk_kv_expected_saved_seconds
    now = 0.02
    world.compute()
    now = 0.025
    world.land()
    world.fetch()
    assert world.totals.admitted_prompt_tokens == admitted
    assert world.totals.prefix_cached_tokens - cached == END - MEETING
    assert world.totals.disk_kv_hit_tokens - world.hits == END - MEETING
    assert [each.cached_tokens for each in world.prefilled] == [END - MEETING]
    disk, host = world.fetched
    assert (disk.num_tokens, disk.computed_tokens, host.num_tokens) == (END - MEETING, MEETING, END - MEETING)
    assert (disk.seconds, disk.expected, disk.computing) == pytest.approx((0.025, MEETING * 1e-3, MEETING * 1e-3))
    assert world.totals.disk_kv_saved_seconds - saved == pytest.approx(MEETING * 1e-3 - 0.005), "it waited for 5 ms"
    assert expected == pytest.approx(MEETING * 1e-3)
    world.finish(num_computed=MEETING + REST)


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("ends", ["fails", "is late", "is gone"])
def test_prompt_whose_read_brings_nothing_is_computed(steps: int, ends: str) -> None:
    """No token is computed twice."""
    world = Splitting()
    world.step(steps)
    (order,) = world.reads
    if ends == "is late":
        disk_of(world.node).late(order.order_id)
        world.finish(num_computed=len(PROMPT))
        return
    if ends == "is gone":
        del disk_of(world.node).files["v1", order.names[0]]
        world.land()
        world.finish(num_computed=len(PROMPT))
        return
    world.land(fails=True)
    world.finish(num_computed=len(PROMPT) - BLOCK)  # the first block of the read has come


def landed() -> Splitting:
    """Return a node whose read has ended while it computes the first part."""
    world = Splitting(batch_tokens=2 * BLOCK)
    world.land()
    world.step(1)
    (sequence,) = world.node.scheduler._live.of_request(RID)
    assert sequence.split is not None
    return world


def test_what_was_read_is_not_evicted_while_the_first_part_is_computed() -> None:
    world = landed()
    world.evict()
    world.finish(num_computed=MEETING + REST)


@pytest.mark.parametrize("ends", [Cancel(RID), Pause(RID)], ids=["cancelled", "paused"])
def test_what_was_read_for_a_prompt_that_does_not_go_on_may_be_evicted(ends: Cancel | Pause) -> None:
    world = landed()
    world.node.obey(ends)
    rest(world.node)
    world.evict()
    host = tier_of(world.node)._host.areas.kv.host
    assert host.num_free == host.total
    world.node.obey(Cancel(RID))
    world.close()


@pytest.mark.parametrize("steps", [0, 1, 6])
@pytest.mark.parametrize("lands", [False, True])
def test_cancelled_prompt_holds_nothing(steps: int, lands: bool) -> None:
    world = Splitting()
    world.step(steps)
    if lands:
        world.land()
        world.step(1)
    world.node.obey(Cancel(RID))
    world.close()


@pytest.mark.parametrize("steps", [0, 1, 2, 3, 6])
@pytest.mark.parametrize("lands", [False, True])
def test_paused_prompt_goes_on_when_it_is_resumed(steps: int, lands: bool) -> None:
    world = Splitting()
    world.step(steps)
    world.node.obey(Pause(RID))
    if lands:
        world.land()
    world.step(6)
    assert not world.node.tokens[RID, 0]
    world.node.obey(Resume(RID))
    rest(world.node)
    assert world.node.tokens[RID, 0] == reference(PROMPT, 0, 4)
    world.close()


@pytest.mark.parametrize("first", ["read", "steps"])
def test_several_choices_continue_behind_a_split_read(first: str) -> None:
    world = Splitting(SamplingParams(max_tokens=4, n=3), num_blocks=40)
    if first == "steps":
        world.compute()
    world.land()
    rest(world.node)
    assert [world.node.tokens[RID, choice] for choice in range(3)] == [
        reference(PROMPT, choice, 4) for choice in range(3)
    ]
    assert world.num_computed < 3 * len(PROMPT)
    world.close()


def test_prompts_with_one_prefix_wait_for_one_split_read() -> None:
    world = Splitting(num_blocks=40)
    other = [*PROMPT, 1, 2]
    world.node.submit(8, other, FOUR, Mode.LOCAL)
    world.step()
    assert len(world.reads) == 1
    world.land()
    rest(world.node)
    assert world.node.tokens[RID, 0] == reference(PROMPT, 0, 4)
    assert world.node.tokens[8, 0] == reference(other, 0, 4)
    world.close()


def test_streams_decode_beside_a_split_read() -> None:
    world = Splitting(num_blocks=40)
    world.node.submit(50, [3] * 6, SamplingParams(max_tokens=20), Mode.LOCAL)
    world.step(8)
    world.land()
    rest(world.node)
    assert world.node.tokens[50, 0] == reference([3] * 6, 0, 20)
    assert world.node.tokens[RID, 0] == reference(PROMPT, 0, 4)
    assert world.num_computed == MEETING + REST + 3 + 6 + 19
    world.close()


def test_first_part_that_is_evicted_costs_only_time() -> None:
    world = Splitting()
    world.compute()
    large = words(77, 80)
    world.node.submit(50, large, FOUR, Mode.LOCAL)
    while len(world.node.tokens[50, 0]) < 4:
        world.step(1)
        memory_of(world.node).finish()
    assert world.node.tokens[50, 0] == reference(large, 0, 4)
    world.land()
    rest(world.node)
    assert world.node.tokens[RID, 0] == reference(PROMPT, 0, 4)
    world.close()


def test_preempted_first_part_costs_only_time() -> None:
    """A stream that was admitted before needs the blocks."""
    node = slow_node(num_blocks=24, full_step=BLOCK)
    stream, prompt, split = words(77, 42), SamplingParams(max_tokens=24), 0
    node.submit(50, stream, prompt, Mode.LOCAL)
    while not node.tokens[50, 0]:
        node.step()
        memory_of(node).finish()
    node.submit(RID, PROMPT, FOUR, Mode.LOCAL)
    preempted = node.scheduler.totals.preemptions
    for _ in range(30):
        (sequence,) = node.scheduler._live.of_request(RID)
        split += sequence.split is not None
        if node.scheduler.totals.preemptions > preempted:
            break
        node.step()
        memory_of(node).finish()
    assert split, "the read is not split"
    assert node.scheduler.totals.preemptions > preempted
    assert sequence.split is None
    rest(node)
    assert node.tokens[RID, 0] == reference(PROMPT, 0, 4)
    assert node.tokens[50, 0] == reference(stream, 0, 24)
    node.assert_all_free()
    node.close()


def test_flipped_byte_behind_the_meeting_point_is_found() -> None:
    world = Splitting()
    (order,) = world.reads
    disk_of(world.node).files["v1", order.names[2]][3] ^= 1
    world.compute()
    world.land()
    world.finish(num_computed=len(PROMPT) - 2 * BLOCK)
    assert world.totals.disk_kv_corrupt_blocks == 1


@pytest.mark.parametrize("mode", [Mode.LEASE, Mode.HANDOFF])
def test_reads_for_handoffs_are_not_split(mode: Mode) -> None:
    """The disk is as fast as to compute: nothing is read."""
    world = Splitting(mode=mode)
    assert not world.reads
    assert all(sequence.split is None for sequence in world.node.scheduler._live.of_request(RID))
    world.node.close()


@pytest.mark.parametrize("kind", ["states", "windows"])
def test_reads_of_states_and_windows_are_not_split(kind: str) -> None:
    world = Splitting(**KINDS[kind])
    assert not world.reads
    rest(world.node)
    assert world.node.tokens[RID, 0] == reference(PROMPT, 0, 4)
    world.node.close()


def test_prompt_behind_others_waits_for_the_whole_read_or_computes_all() -> None:
    """All of it would come before the node can begin."""
    node = slow_node(num_blocks=60)
    tier_of(node)._cost.add(1000.0, 1000 * BLOCK * PER_TOKEN / 4)
    node.submit(50, words(77, 120), FOUR, Mode.LOCAL)
    node.step()
    node.submit(RID, PROMPT, FOUR, Mode.LOCAL)
    node.step()
    node.step()
    assert isinstance(node.disk, SlowDisk)
    (order,) = (order for _, order in node.disk.orders.values() if order.work is DiskWork.READ)
    assert len(order.names) == END // BLOCK
    rest(node)
    assert node.tokens[RID, 0] == reference(PROMPT, 0, 4)
    node.close()


def test_disk_that_is_far_slower_is_not_read() -> None:
    node = slow_node()
    tier_of(node)._cost.add(1000.0, 1000 * BLOCK * PER_TOKEN * 10)
    before = node.scheduler.totals.disk_kv_load_bytes
    assert ask(node, RID, PROMPT) == len(PROMPT)
    assert node.scheduler.totals.disk_kv_load_bytes == before
    node.close()
