"""Host memory behind the prefix cache: no order of events yields a token from blocks that a copy writes, or reads late.

The toy model's tokens show whether its KV is right. Copies land block by block when a test says so.
"""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from fast_set import sampled
from slow_host_memory import SlowCopy, SlowHostMemory
from tiered_node import ask, memory_of, rest, words
from toy import reference
from toy_node import BLOCK, DEPTHS, Node

from engine.tiers.host_tier import HostTier
from pdserve.hashing import BlockHashes, root_hash
from pdserve.ipc.messages import Cancel, FreeLease, LeaseCached, Leased, Mode, Pause, Reserved, Resume, Submit
from pdserve.kv.host_copies import HostRoom
from pdserve.sampling_params import SamplingParams

ROOM = HostRoom(90, 20)


def tier_of(node: Node) -> HostTier:
    assert isinstance(node.scheduler.connector.tiers, HostTier)
    return node.scheduler.connector.tiers


def make_node(num_blocks: int = 24, depth: tuple[int, int] = (2, 1), room: HostRoom = ROOM, **options: Any) -> Node:
    return Node(num_blocks, *depth, host=room, host_memory=SlowHostMemory, **options)


# ---------------------------------------------------------------- what comes back


@pytest.mark.parametrize("checksum", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"state_slots": 5}, {"windows": (None, 9)}, {"windows": (7,)}],
    ids=["full", "states", "windows", "all windows"],
)
def test_evicted_prefix_comes_back(options: dict[str, Any], checksum: bool) -> None:
    """The device holds one conversation. Whatever its other ones take, few tokens of the first are computed again."""
    node = make_node(40 if "windows" in options else 24, kv_checksum=checksum, **options)
    assert ask(node, 1, words(1)) == 50
    for rid in (2, 3, 4):
        ask(node, rid, words(rid))
    assert ask(node, 5, [*words(1), 7, 8, 9]) <= 3 + 2 * BLOCK
    assert node.scheduler.totals.host_kv_hit_tokens >= 40
    node.assert_all_free()
    node.close()


def test_without_host_memory_it_is_computed_again() -> None:
    node = make_node(room=HostRoom(0))
    for rid in (1, 2, 3, 4):
        ask(node, rid, words(rid))
    assert ask(node, 5, words(1)) == 50
    node.close()


def test_preempted_sequence_comes_back() -> None:
    """Two sequences need more than the device has. What the second loses comes from host memory."""
    node = make_node(18, max_num_seqs=2)
    for rid in (1, 2):
        node.submit(rid, words(rid, 24), SamplingParams(max_tokens=20), Mode.LOCAL)
    rest(node)
    for rid in (1, 2):
        assert node.tokens[rid, 0] == reference(words(rid, 24), 0, 20)
    assert node.scheduler.totals.preemptions > 0
    assert node.scheduler.totals.host_kv_hit_tokens > 0
    node.close()


def test_salts_keep_clients_apart() -> None:
    node = make_node()
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    for rid, salt, hits in ((4, "other", 0), (5, "", 48)):
        node.obey(Submit(rid, array("I", words(1)).tobytes(), SamplingParams(max_tokens=1), Mode.LOCAL, salt))
        rest(node)
        assert node.scheduler.totals.host_kv_hit_tokens == hits
    node.close()


def test_prompt_for_a_peer_is_fetched_and_leased() -> None:
    node = make_node()
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    node.submit(4, words(1), SamplingParams(max_tokens=1), Mode.LEASE, skip=8)
    rest(node)
    assert node.tokens[4, 0] == reference(words(1), 0, 1)
    assert len(node.leased[4]) == 11
    assert node.scheduler.totals.host_kv_hit_tokens == 48
    node.obey(FreeLease(4))
    rest(node)
    node.assert_all_free()
    node.close()


def test_reservation_of_a_handoff_begins_behind_what_was_fetched() -> None:
    node = make_node()
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    node.submit(4, words(1), SamplingParams(max_tokens=1), Mode.HANDOFF)
    reserved: list[Reserved] = []
    while not reserved:
        memory_of(node).finish()
        reserved = node.step().reserved
    assert reserved == [Reserved(4, 48)]
    node.obey(Cancel(4))
    rest(node)
    node.assert_all_free()
    node.close()


@pytest.mark.parametrize("checksum", [False, True])
def test_pulled_prefix_is_fetched_and_leased(checksum: bool) -> None:
    """The lease is taken back for a prompt that needs the blocks."""
    node = make_node(kv_checksum=checksum)
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    pull = LeaseCached(rid=9, token_ids=array("I", words(1)).tobytes(), cache_salt="", skip_tokens=8)
    node.engine.handle([pull])
    leased: list[Leased] = []
    while not leased:
        memory_of(node).finish()
        leased = node.step().leased
    assert (len(leased[0].block_ids), leased[0].num_tokens, leased[0].last) == (10, 48, True)
    assert [node.runner.cache[block, 0, 0, 0, 0, 0] for block in leased[0].block_ids] == words(1)[8:48:BLOCK]
    node.submit(4, words(4, 80), SamplingParams(max_tokens=1), Mode.LOCAL)
    while not node.step().revoke:
        memory_of(node).finish()
    node.obey(FreeLease(9))
    rest(node)
    assert node.tokens[4, 0] == reference(words(4, 80), 0, 1)
    node.assert_all_free()
    node.close()


def test_pull_that_ends_amid_its_fetch_leases_nothing() -> None:
    node = make_node()
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    node.engine.handle([LeaseCached(rid=9, token_ids=array("I", words(1)).tobytes(), cache_salt="", skip_tokens=8)])
    node.step()
    assert any(copy.order.load for copy in memory_of(node).copies.values())
    node.obey(FreeLease(9))
    rest(node)
    node.assert_all_free()
    node.close()


# ---------------------------------------------------------------- faults


def flip(memory: SlowHostMemory, host_block: int) -> None:
    memory.blocks[host_block * len(memory.blocks) // memory.room.num_blocks] ^= 1


def stored(node: Node, prompt: list[int], index: int) -> int:
    """Return the host block of a block of a prompt."""
    hashes = BlockHashes(BLOCK, root_hash("")).upto(array("I", prompt), len(prompt))
    entry = tier_of(node).areas.kv.host.find((0, hashes[index]))
    assert entry is not None
    return entry.block


def test_changed_byte_is_found_and_its_block_computed_again() -> None:
    node = make_node(kv_checksum=True)
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    faulty = stored(node, words(1), 5)
    flip(memory_of(node), faulty)
    assert ask(node, 4, words(1)) == 50 - 5 * BLOCK
    assert node.scheduler.totals.host_kv_corrupt_blocks == 1
    for rid in (5, 6, 7):
        ask(node, rid, words(rid))
    assert ask(node, 8, words(1)) == 2
    assert stored(node, words(1), 5) != faulty, "faulty memory is used again"
    node.close()


def test_without_checksums_the_answer_would_be_wrong() -> None:
    """The test above finds what it is for."""
    node = make_node()
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    flip(memory_of(node), stored(node, words(1), 5))
    with pytest.raises(AssertionError):
        ask(node, 4, words(1))
    node.close()


def begin_fetch(node: Node, rid: int, prompt: list[int]) -> SlowCopy:
    """Submit a prompt whose prefix is in host memory. Return the load that it waits for."""
    node.submit(rid, prompt, SamplingParams(max_tokens=4), Mode.LOCAL)
    node.step()
    node.step()
    (copy,) = (copy for copy in memory_of(node).copies.values() if copy.order.load)
    return copy


def test_request_cancelled_amid_its_fetch_frees_no_block_before_the_copy_ends() -> None:
    node = make_node()
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    copy = begin_fetch(node, 4, words(1))
    memory_of(node).land(copy.order.copy_id)
    node.obey(Cancel(4))
    assert node.scheduler.pool.count_free(copy.order.blocks) == 0
    ask(node, 5, words(5, 20))  # meanwhile another request is served
    rest(node)
    node.assert_all_free()
    assert ask(node, 6, words(1)) == 2
    node.close()


def test_failed_fetch_is_computed() -> None:
    node = make_node()
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    copy = begin_fetch(node, 4, words(1))
    memory_of(node).land(copy.order.copy_id)
    memory_of(node).fail(copy.order.copy_id)
    rest(node)
    assert node.tokens[4, 0] == reference(words(1), 0, 4)
    assert node.scheduler.totals.host_kv_hit_tokens == 0
    node.assert_all_free()
    node.close()


def test_changed_weights_empty_host_memory_and_end_copies_without_effect() -> None:
    node = make_node()
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    begin_fetch(node, 4, words(1))
    node.obey(Cancel(4))
    node.scheduler.forget_cached()
    rest(node)
    assert node.scheduler.connector.tiers.host_blocks == (ROOM.num_blocks, 0)
    assert ask(node, 5, words(1)) == 50
    node.close()


def test_nothing_is_fetched_where_computing_is_faster() -> None:
    """Steps take a microsecond per token, and copies a millisecond of this test's clock."""
    now = 0.0
    node = make_node(seconds=lambda plan: 1e-6 * plan.num_tokens)
    tier_of(node)._clock = lambda: now
    for rid in (1, 2, 3):
        ask(node, rid, words(rid))
    begin_fetch(node, 4, words(1))
    now += 1e-3
    rest(node)
    assert node.scheduler.totals.host_kv_hit_tokens == 48
    for rid in (5, 6, 7):
        ask(node, rid, words(rid))
    assert ask(node, 8, words(1)) == 50
    now += 600.0  # an old measurement is tried again
    for rid in (9, 10, 11):
        ask(node, rid, words(rid))
    assert ask(node, 12, words(1)) == 2
    node.close()


def test_blocks_kept_for_a_waiting_prompt_give_way_to_one_that_runs() -> None:
    """A prompt has been fetched, but no place among the running sequences is free. These grow into its blocks."""
    node = make_node(22, max_num_seqs=2)
    for rid in (1, 2, 3):
        ask(node, rid, words(rid, 30))
    node.submit(4, words(4, 20), SamplingParams(max_tokens=50), Mode.LOCAL)
    node.step()
    begin_fetch(node, 5, words(1, 30))
    rest(node)
    for rid, length, num_outputs in ((4, 20, 50), (5, 30, 4)):
        prompt = words(4, 20) if rid == 4 else words(1, 30)
        assert node.tokens[rid, 0] == reference(prompt, 0, num_outputs), length
    node.assert_all_free()
    node.close()


# ---------------------------------------------------------------- any order of events


class World:
    """A node with few blocks, conversations over shared prefixes, and copies that last."""

    def __init__(self, seed: int, depth: tuple[int, int], **options: Any) -> None:
        self.random = random.Random(seed)
        windows = options.get("windows", (None,))
        self.node = make_node(30 * len(windows), depth, HostRoom(70, 9), max_num_seqs=4, **options)
        self.expected: dict[int, tuple[list[int], int, int]] = {}  # prompt, choices and outputs of open requests
        self.leases: set[int] = set()
        self.conversations = [words(seed * 10 + place, 9) for place in range(4)]
        self.paused: set[int] = set()
        self.num_checked = 0
        self._rid = 0

    @property
    def open(self) -> list[int]:
        return [rid for rid in self.expected if rid not in self.leases]

    def submit(self) -> None:
        chance = self.random
        place = chance.randrange(len(self.conversations))
        prompt = self.conversations[place]
        if len(prompt) > 60:
            prompt = prompt[: chance.randrange(8, 30)]
        prompt = self.conversations[place] = [*prompt, *chance.choices(range(900), k=chance.randrange(1, 12))]
        self._rid += 1
        num_outputs = chance.randrange(1, 9)
        mode = chance.choice([Mode.LOCAL, Mode.LOCAL, Mode.LEASE])
        n = chance.choice([1, 1, 1, 2]) if mode is Mode.LOCAL else 1
        num_outputs = num_outputs if mode is Mode.LOCAL else 1
        sampling = SamplingParams(max_tokens=num_outputs, n=n)
        self.expected[self._rid] = prompt, n, num_outputs
        if mode is Mode.LEASE:
            self.leases.add(self._rid)
        self.node.submit(self._rid, prompt, sampling, mode)

    def event(self) -> None:
        chance = self.random
        memory = memory_of(self.node)
        choice = chance.random()
        if choice < 0.12 and len(self.expected) < 6:
            self.submit()
        elif choice < 0.15 and self.expected:
            rid = chance.choice(list(self.expected))
            del self.expected[rid]
            self.leases.discard(rid)
            self.paused.discard(rid)
            self.node.obey(FreeLease(rid))
        elif choice < 0.18 and self.open:
            rid = chance.choice(self.open)
            self.node.obey(Resume(rid) if rid in self.paused else Pause(rid))
            self.paused ^= {rid}
        elif choice < 0.6:
            if memory.copies:
                copy_id = chance.choice(list(memory.copies))
                memory.fail(copy_id) if chance.random() < 0.01 else memory.land(copy_id)
        else:
            self.node.step()
        self.check()

    def check(self) -> None:
        node = self.node
        memory = memory_of(self.node)
        tier = tier_of(self.node)
        pool = node.scheduler.pool
        busy = node.runner.writing.keys()
        targets: set[int] = set()
        for copy in memory.copies.values():
            blocks = copy.order.blocks
            assert not pool.count_free(blocks), "a block is free that a copy reads or writes"
            assert not busy & set(blocks), "a step writes to a block that a copy reads or writes"
            if copy.order.load:
                assert not node.runner.used & set(blocks), "a sequence uses a block before it is loaded"
                cached = pool._key_of.keys() & set(blocks)
                assert not cached, "a block is found in the prefix cache before it is loaded"
            else:
                assert not targets & set(copy.order.host_blocks), "two stores write to a host block"
                targets |= set(copy.order.host_blocks)
        for copy in memory.copies.values():
            assert not copy.order.load or not targets & set(copy.order.host_blocks), "a load reads what a store writes"
        host = tier.areas.kv.host
        in_use = {entry.block for entry in host._entries.values()}
        assert len(in_use) == len(host._entries)
        assert not in_use & targets
        for rid, (prompt, n, num_outputs) in list(self.expected.items()):
            if all(len(node.tokens[rid, place]) == num_outputs for place in range(n)):
                for place in range(n):
                    assert node.tokens[rid, place] == reference(prompt, place, num_outputs)
                del self.expected[rid]
                self.paused.discard(rid)
                self.num_checked += 1
                if rid in self.leases:
                    self.leases.discard(rid)
                    node.obey(FreeLease(rid))

    def end(self) -> None:
        for rid in self.paused:
            self.node.obey(Resume(rid))
        for _ in range(3000):
            self.node.step()
            memory_of(self.node).finish()
            self.check()
            if not self.expected and self.node.engine.idle and not memory_of(self.node).copies:
                break
        assert not self.expected
        rest(self.node)
        self.node.assert_all_free()
        host = tier_of(self.node).areas.kv.host
        assert host.num_free + host.num_stored == host.total
        self.node.close()


KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "checksums": {"kv_checksum": True},
    "states": {"state_slots": 12, "kv_checksum": True},
    "windows": {"windows": (None, 9)},
    "drafts": {"max_drafts": 3},
}


@pytest.mark.parametrize(("kind", "depth"), sampled(KINDS, DEPTHS[:4], every=8))
def test_no_order_of_events_yields_a_wrong_token(kind: str, depth: tuple[int, int]) -> None:
    """Requests come, pause and are cancelled while copies land block by block."""
    hits = 0
    for seed in range(3):
        world = World(seed, depth, **KINDS[kind])
        for _ in range(1200):
            world.event()
        world.end()
        assert world.num_checked > 20
        hits += world.node.scheduler.totals.host_kv_hit_tokens
    assert hits > 0
