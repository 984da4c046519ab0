"""Disk behind host memory: no order of events yields a token from a block that was not read whole and right.

The toy model's tokens show whether its KV is right. Transfers end when a test says so.
"""

from __future__ import annotations

import random
from array import array
from functools import partial
from typing import Any

import pytest
from fast_set import sampled
from slow_disk import Files, SlowDisk
from slow_host_memory import SlowHostMemory
from tiered_node import ask, memory_of, rest, words
from toy import reference
from toy_node import BLOCK, Node

from engine.tiers.disk_tier import DiskTier
from engine.tiers.host_tier import HostTier
from pdserve.hashing import BlockHashes, root_hash
from pdserve.ipc.cache_changes import Medium
from pdserve.ipc.messages import Cancel, EventBatch, Fetched, Mode, Pause, Resume, UseWeights
from pdserve.kv.disk_transfers import BlockName, DiskOrder, DiskWork
from pdserve.kv.host_copies import HostRoom
from pdserve.sampling_params import SamplingParams

ROOM = HostRoom(30, 8)  # blocks of host memory: two prompts of 50 tokens
KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "states": {"state_slots": 5},
    "windows": {"windows": (None, 9), "num_blocks": 40, "room": HostRoom(60)},
}


def disk_of(node: Node) -> SlowDisk:
    assert isinstance(node.disk, SlowDisk)
    return node.disk


def tier_of(node: Node) -> DiskTier:
    tier = node.scheduler.connector.tiers
    assert isinstance(tier, HostTier)
    assert isinstance(tier.source, DiskTier)
    return tier.source


def make_node(
    num_blocks: int = 24, room: HostRoom = ROOM, files: Files | None = None, version: str = "v1", **options: Any
) -> Node:
    disk = partial(SlowDisk, files={} if files is None else files)
    node = Node(num_blocks, 2, 1, host=room, host_memory=SlowHostMemory, kv_checksum=True, disk=disk, **options)
    node.obey(UseWeights(version))
    return node


def filled(rids: range = range(1, 6), **options: Any) -> Node:
    """Return a node whose first prompts are on disk only."""
    node = make_node(**options)
    for rid in rids:
        ask(node, rid, words(rid))
    return node


def measured(node: Node) -> None:
    """Let the node read once: the first read is a small one."""
    ask(node, 90, words(2))


def begin_read(node: Node, rid: int, prompt: list[int]) -> DiskOrder:
    """Submit a prompt whose prefix is on disk. Return the read that it waits for."""
    node.submit(rid, prompt, SamplingParams(max_tokens=4), Mode.LOCAL)
    node.step()
    node.step()
    (order,) = (order for _, order in disk_of(node).orders.values() if order.work is DiskWork.READ)
    return order


@pytest.mark.parametrize("kind", KINDS)
def test_prefix_that_left_host_memory_comes_back_from_disk(kind: str) -> None:
    node = filled(**KINDS[kind])
    measured(node)
    for rid in (6, 7, 8):
        ask(node, rid, words(rid))
    totals = node.scheduler.totals
    before = totals.disk_kv_hit_tokens
    assert ask(node, 9, [*words(1), 7, 8, 9]) <= 3 + 2 * BLOCK
    assert totals.disk_kv_hit_tokens - before >= 40
    assert (totals.disk_kv_corrupt_blocks, totals.disk_kv_failures) == (0, 0)
    node.assert_all_free()
    node.close()


def test_unknown_disk_is_measured_by_a_small_read() -> None:
    node = make_node(num_blocks=60, room=HostRoom(90))
    for rid in range(1, 7):
        ask(node, rid, words(rid, 150))
    order = begin_read(node, 9, words(1, 150))
    assert len(order.names) == 16
    rest(node)
    assert node.tokens[9, 0] == reference(words(1, 150), 0, 4)
    node.close()


def test_saved_and_lost_time_is_counted() -> None:
    """Steps take a millisecond per token, the first read ten of the test's clock, the second one a second."""
    now = 0.0
    node = filled(seconds=lambda plan: 1e-3 * plan.num_tokens)
    tier_of(node)._clock = lambda: now
    totals = node.scheduler.totals
    reported = list[Fetched]()
    step = node.step

    def recorded() -> EventBatch:
        batch = step()
        reported.extend(batch.fetched)
        return batch

    node.step = recorded  # type: ignore[method-assign]
    order = begin_read(node, 7, words(1))
    now += 0.01
    rest(node)
    num_tokens = len(order.names) * BLOCK
    assert totals.disk_kv_saved_seconds == pytest.approx(num_tokens * 1e-3 - 0.01)
    assert totals.host_kv_saved_seconds > 0.0
    disk, host = reported
    assert (disk.rid, disk.medium, disk.num_tokens) == (7, Medium.DISK, num_tokens)
    assert (disk.seconds, disk.expected, disk.computing) == pytest.approx((0.01, 0.0, num_tokens * 1e-3))
    assert (host.rid, host.medium, host.num_tokens) == (7, Medium.HOST, num_tokens)
    begin_read(node, 8, words(2))
    now += 1.0
    rest(node)
    assert totals.disk_kv_lost_seconds > 0.5
    assert [fetched.medium for fetched in reported[2:]] == [Medium.DISK, Medium.HOST]
    assert 0.0 < reported[2].expected < reported[2].computing < reported[2].seconds == pytest.approx(1.0)
    assert 0.0 < totals.disk_kv_expected_saved_seconds < 0.1
    node.close()


def test_prompts_with_one_prefix_wait_for_one_read() -> None:
    node = filled()
    measured(node)
    order = begin_read(node, 7, words(1))
    node.submit(8, [*words(1), 1, 2], SamplingParams(max_tokens=4), Mode.LOCAL)
    node.step()
    node.step()
    assert [order.order_id for _, order in disk_of(node).orders.values() if order.work is DiskWork.READ] == [
        order.order_id
    ]
    rest(node)
    for rid, prompt in ((7, words(1)), (8, [*words(1), 1, 2])):
        assert node.tokens[rid, 0] == reference(prompt, 0, 4)
    node.assert_all_free()
    node.close()


@pytest.mark.parametrize("kind", KINDS)
def test_restarted_node_finds_its_files(kind: str) -> None:
    files: Files = {}
    filled(files=files, **KINDS[kind]).close()
    node = make_node(files=files, **KINDS[kind])
    assert ask(node, 1, words(1)) <= 2 + 2 * BLOCK
    assert ask(node, 2, words(2)) <= 2 + 2 * BLOCK
    node.close()


def test_two_nodes_share_files() -> None:
    files: Files = {}
    writer = make_node(files=files)
    reader = make_node(files=files)
    ask(writer, 1, words(1))
    disk_of(reader).scan()
    assert ask(reader, 1, words(1)) == 2
    writer.close()
    reader.close()


def test_other_weights_find_nothing() -> None:
    files: Files = {}
    filled(files=files).close()
    other = make_node(files=files, version="v2")
    assert ask(other, 1, words(1)) == 50
    other.close()


def test_changed_weights_use_their_own_files() -> None:
    """Blocks that are written or read during the change belong to the old ones."""
    node = filled()
    begin_read(node, 6, words(1))
    node.obey(Cancel(6))
    node.scheduler.forget_cached()
    node.step()
    assert tier_of(node).num_blocks == 0
    node.obey(UseWeights("v2"))
    rest(node)
    assert tier_of(node).num_blocks == 0
    assert ask(node, 7, words(1)) == 50
    assert {version for version, _ in disk_of(node).files} == {"v1", "v2"}
    node.close()


def test_nothing_is_written_before_the_weights_are_known() -> None:
    node = make_node(version="")
    ask(node, 1, words(1))
    assert not disk_of(node).files
    node.obey(UseWeights("v1"))
    rest(node)
    assert len(disk_of(node).files) >= 12
    node.close()


def test_node_reports_what_it_has_anywhere() -> None:
    """A prefix counts as cached on the device, in host memory and on disk, what other nodes have written included."""
    files: Files = {}
    node = make_node(files=files)
    other = make_node(files=files)
    reported: set[bytes] = set()
    step = node.step

    def recorded() -> EventBatch:
        batch = step()
        assert not reported & set(batch.cached)
        assert reported >= set(batch.evicted)
        reported.update(batch.cached)
        reported.difference_update(batch.evicted)
        return batch

    def had() -> set[bytes]:
        areas = tier_of(node)._host.areas
        index = tier_of(node)._parts[tier_of(node)._host.areas.kv].index
        keys = {*areas.kv.host._entries, *index._found, *index._before}
        return {block_hash for _, block_hash in keys} | areas.kv.pool.cached(0).keys()

    node.step = recorded  # type: ignore[method-assign]
    for rid in range(1, 6):
        ask(node, rid, words(rid))
    assert reported == had()
    ask(other, 1, words(11))
    for name in files_of(node, words(1))[3:6]:
        del files["v1", name]
    disk_of(node).scan()
    rest(node)
    assert reported == had()
    assert len(reported) == 6 * 13 - 3
    ask(node, 6, words(11))
    assert reported == had()
    node.scheduler.forget_cached()
    rest(node)
    assert not reported
    node.close()
    other.close()


# ---------------------------------------------------------------- faults


def files_of(node: Node, prompt: list[int]) -> list[BlockName]:
    """Return the names of a prompt's blocks, in order."""
    by_hash = {name.block_hash: name for _, name in disk_of(node).files if not name.slot}
    hashes = BlockHashes(BLOCK, root_hash("")).upto(array("I", prompt), len(prompt))
    return [by_hash[block_hash] for block_hash in hashes]


def test_flipped_byte_is_found_and_its_file_removed() -> None:
    node = filled()
    measured(node)
    name = files_of(node, words(1))[5]
    disk_of(node).files["v1", name][3] ^= 1
    hits = node.scheduler.totals.disk_kv_hit_tokens
    assert ask(node, 7, words(1)) == 50 - 5 * BLOCK
    totals = node.scheduler.totals
    assert (totals.disk_kv_corrupt_blocks, totals.host_kv_corrupt_blocks) == (1, 0)
    assert totals.disk_kv_hit_tokens == hits, "blocks count as hits that were not what was written"
    rewritten = disk_of(node).files.get(("v1", name))
    for rid in (8, 9, 10):
        ask(node, rid, words(rid))
    assert ask(node, 11, words(1)) == 2
    assert rewritten is None or totals.disk_kv_corrupt_blocks == 1
    node.close()


def test_missing_file_is_computed() -> None:
    node = filled()
    measured(node)
    del disk_of(node).files["v1", files_of(node, words(1))[5]]
    assert ask(node, 7, words(1)) == 50 - 5 * BLOCK
    assert node.scheduler.totals.disk_kv_corrupt_blocks == 0
    node.close()


def test_failed_read_is_computed() -> None:
    node = filled()
    order = begin_read(node, 7, words(1))
    disk_of(node).land(order.order_id, fails=True)
    rest(node)
    assert node.tokens[7, 0] == reference(words(1), 0, 4)
    assert node.scheduler.totals.disk_kv_failures == 1
    node.assert_all_free()
    node.close()


def test_prompt_does_not_wait_for_a_disk_that_hangs() -> None:
    node = filled()
    order = begin_read(node, 7, words(1))
    for _ in range(5):
        node.step()
    assert not node.tokens[7, 0]
    disk_of(node).late(order.order_id)
    for _ in range(50):
        node.step()
        memory_of(node).finish()
    assert node.tokens[7, 0] == reference(words(1), 0, 4)
    node.submit(8, words(2), SamplingParams(max_tokens=4), Mode.LOCAL)
    for _ in range(50):
        node.step()
        memory_of(node).finish()
    assert node.tokens[8, 0] == reference(words(2), 0, 4), "a further prompt waits for a disk that hangs"
    rest(node)
    node.assert_all_free()
    node.close()


@pytest.mark.parametrize("lands", [False, True])
@pytest.mark.parametrize("ends", [Cancel(7), Pause(7)], ids=["cancelled", "paused"])
def test_blocks_that_were_read_for_a_prompt_that_does_not_go_on_may_be_evicted(
    ends: Cancel | Pause, lands: bool
) -> None:
    node = filled()
    order = begin_read(node, 7, words(1))
    if lands:
        disk_of(node).land(order.order_id)
        node.step()
    node.obey(ends)
    rest(node)
    host = tier_of(node)._host.areas.kv.host
    host.give_back(host.take(host.total))
    assert host.num_free == host.total
    node.obey(Cancel(7))
    rest(node)
    assert not tier_of(node)._unfetched
    node.assert_all_free()
    node.close()


@pytest.mark.parametrize("steps", [0, 1, 2])
@pytest.mark.parametrize("lands", [False, True])
def test_paused_prompt_goes_on_when_it_is_resumed(steps: int, lands: bool) -> None:
    node = filled()
    order = begin_read(node, 7, words(1))
    for _ in range(steps):
        node.step()
    node.obey(Pause(7))
    if lands:
        disk_of(node).land(order.order_id)
    for _ in range(6):
        node.step()
    assert not node.tokens[7, 0]
    node.obey(Resume(7))
    rest(node)
    assert node.tokens[7, 0] == reference(words(1), 0, 4)
    node.assert_all_free()
    node.close()


def test_nothing_is_read_where_computing_is_faster() -> None:
    """Steps take a microsecond per token, and reads a second of this test's clock."""
    now = 0.0
    node = filled(seconds=lambda plan: 1e-6 * plan.num_tokens)
    tier_of(node)._clock = lambda: now
    begin_read(node, 7, words(1))
    now += 1.0
    rest(node)
    for rid in (8, 9, 10):
        ask(node, rid, words(rid))
    before = node.scheduler.totals.disk_kv_load_bytes
    assert ask(node, 11, words(2)) == 50
    assert node.scheduler.totals.disk_kv_load_bytes == before
    node.close()


# ---------------------------------------------------------------- any order of events


class World:
    """A node with little memory, conversations over shared prefixes, and a disk that lasts, fails and lies.

    Time is modelled: an event takes a millisecond, and a step one per token.
    """

    def __init__(self, seed: int, kind: str) -> None:
        self.random = random.Random(seed)
        options = {**KINDS[kind], "room": HostRoom(45 * len(KINDS[kind].get("windows", (None,))), 9)}
        self.node = make_node(max_num_seqs=4, seconds=lambda plan: 1e-3 * plan.num_tokens, **options)
        self.now = 0.0
        tier_of(self.node)._clock = tier_of(self.node)._host._clock = lambda: self.now
        self.expected: dict[int, tuple[list[int], int]] = {}  # prompt and outputs of open requests
        self.conversations = [words(seed * 10 + place, 9) for place in range(5)]
        self.num_checked = 0
        self.paused: set[int] = set()  # rids
        self._rid = 0

    def submit(self) -> None:
        chance = self.random
        place = chance.randrange(len(self.conversations))
        prompt = self.conversations[place]
        if len(prompt) > 50:
            prompt = prompt[: chance.randrange(8, 30)]
        prompt = self.conversations[place] = [*prompt, *chance.choices(range(900), k=chance.randrange(1, 12))]
        self._rid += 1
        num_outputs = chance.randrange(1, 9)
        self.expected[self._rid] = prompt, num_outputs
        priority = chance.choice([0, 0, 1])
        self.node.submit(self._rid, prompt, SamplingParams(max_tokens=num_outputs), Mode.LOCAL, priority=priority)

    def event(self) -> None:
        chance = self.random
        memory = memory_of(self.node)
        disk = disk_of(self.node)
        self.now += 1e-3
        choice = chance.random()
        if choice < 0.1 and len(self.expected) < 5:
            self.submit()
        elif choice < 0.11 and self.expected:
            rid = chance.choice(list(self.expected))
            del self.expected[rid]
            self.node.obey(Cancel(rid))
        elif choice < 0.116 and self.expected:
            rid = chance.choice(list(self.expected))
            self.node.obey(Resume(rid) if rid in self.paused else Pause(rid))
            self.paused ^= {rid}
        elif choice < 0.128 and disk.files:
            self.harm(disk, chance.choice(list(disk.files)))
        elif choice < 0.133:
            disk.scan()
        elif choice < 0.3:
            if disk.orders:
                order_id = chance.choice(list(disk.orders))
                if chance.random() < 0.1 and disk.orders[order_id][1].work is DiskWork.READ:
                    disk.late(order_id)
                else:
                    disk.land(order_id, fails=chance.random() < 0.05)
        elif choice < 0.6:
            if memory.copies:
                memory.land(chance.choice(list(memory.copies)))
        else:
            self.node.step()
        self.check()

    def harm(self, disk: SlowDisk, key: tuple[str, BlockName]) -> None:
        match self.random.randrange(4):
            case 0:
                del disk.files[key]
            case 1:
                del disk.files[key][-1:]
            case _:
                file = disk.files[key]
                if file:
                    file[self.random.randrange(len(file))] ^= 1 << self.random.randrange(8)

    def check(self) -> None:
        node = self.node
        host = tier_of(node)._host.areas.kv.host
        stored = {entry.block for entry in host._entries.values()}
        for _, order in disk_of(node).orders.values():
            places = {place for name, place in zip(order.names, order.places, strict=True) if not name.slot}
            if order.work is DiskWork.READ:
                assert not stored & places, "a block of host memory is found before it was read"
                for copy in memory_of(node).copies.values():
                    assert not places & set(copy.order.host_blocks), "a copy uses memory that a read writes"
            elif order.work is DiskWork.WRITE:
                for copy in memory_of(node).copies.values():
                    assert copy.order.load or not places & set(copy.order.host_blocks), "a copy changes what is written"
        for rid, (prompt, num_outputs) in list(self.expected.items()):
            if len(node.tokens[rid, 0]) == num_outputs:
                assert node.tokens[rid, 0] == reference(prompt, 0, num_outputs)
                del self.expected[rid]
                self.num_checked += 1

    def end(self) -> None:
        for rid in self.paused:
            self.node.obey(Resume(rid))
        rest(self.node)
        self.check()
        assert not self.expected
        self.node.assert_all_free()
        assert not tier_of(self.node)._unfetched
        host = tier_of(self.node)._host.areas.kv.host
        retired = self.node.scheduler.totals.host_kv_corrupt_blocks
        assert host.num_free + host.num_stored == host.total - retired
        self.node.close()


@pytest.mark.parametrize("kind", sampled(KINDS, every=2))
def test_no_order_of_events_yields_a_wrong_token(kind: str) -> None:
    num_read = 0
    for seed in range(5):
        world = World(seed, kind)
        for _ in range(1200):
            world.event()
        world.end()
        assert world.num_checked > 20
        num_read += world.node.scheduler.totals.disk_kv_load_bytes
    assert num_read > 0
