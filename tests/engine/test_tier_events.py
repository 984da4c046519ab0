"""KV events of nodes with tiers: a subscriber has, for each medium, the blocks that the node has there."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterable
from functools import partial
from typing import Any

import msgspec
import pytest
from fast_set import sampled
from kv_event_reader import CacheCopy, fields_of
from slow_disk import Files, SlowDisk
from slow_host_memory import SlowHostMemory
from tiered_node import memory_of, rest, words
from toy_node import BLOCK, Node

from engine.kv_events.recorder import NetChanges
from engine.tiers.disk_tier import DiskTier
from engine.tiers.host_tier import HostTier
from node.kv_events.event_log import EventLog, GroupKind, short_hash
from pdserve.ipc.cache_changes import BlockKey, CacheChanges, Medium, StoredBlock, TierChanges
from pdserve.ipc.messages import Cancel, EventBatch, Mode, UseWeights
from pdserve.kv.host_copies import HostRoom
from pdserve.sampling_params import SamplingParams

KINDS: dict[str, dict[str, Any]] = {
    "full": {},
    "states": {"state_slots": 5},
    "windows": {"windows": (None, 9), "num_blocks": 40, "host": HostRoom(60)},
}
PREFIXES = 12
Keys = set[tuple[int, int]]


def numbered(key: BlockKey) -> tuple[int, int]:
    return key[0], short_hash(key[1])


class World:
    """A small node with tiers, requests over shared prefixes, and a subscriber."""

    def __init__(self, seed: int, files: Files | None, **kind: Any) -> None:
        """``files`` are those of the disk; None: there is none."""
        self.random = random.Random(seed)
        disk = None if files is None else partial(SlowDisk, files=files)
        options = {"num_blocks": 24, "host": HostRoom(30, 8), "max_num_seqs": 4, **kind}
        self.node = Node(depth=2, host_memory=SlowHostMemory, kv_checksum=True, disk=disk, **options)
        self.recorder = NetChanges()
        self.node.scheduler.connector.report.record(self.recorder)
        self.num_groups = self.node.scheduler.pool.groups.num_groups
        self.log = EventLog([GroupKind("any", None)] * (self.num_groups + 1), BLOCK, kept_batches=0)
        self.copy = CacheCopy()
        self.has: dict[str, Keys] = {}  # keys on each medium, as the changes tell
        self.known: Keys = set()  # blocks whose tokens readers have
        self.most: dict[str, int] = {}
        self.open: set[int] = set()
        self._rid = self._version = 0
        step = self.node.step

        def recorded() -> EventBatch:
            batch = step()
            self.take(batch.cache_changes)
            self.open -= {rid for rid, _ in self.node.finished}
            return batch

        self.node.step = recorded  # type: ignore[method-assign]
        self.node.obey(UseWeights("v0"))

    @property
    def tier(self) -> HostTier:
        tier = self.node.scheduler.connector.tiers
        assert isinstance(tier, HostTier)
        return tier

    def take(self, taken: list[CacheChanges]) -> None:
        for changes in taken:
            self.copy.take_all(self.log.add(changes))
            if changes.cleared:
                self.has.clear()
                self.known.clear()
            stored = [block.key for block in changes.stored]
            tiers = [(str(tier.medium), tier.removed, tier.stored) for tier in changes.tiers]
            for medium, removed, added in [("GPU", changes.removed, stored), *tiers]:
                self.has.setdefault(medium, set()).difference_update(map(numbered, removed))
                self.has[medium].update(map(numbered, added))
            self.known |= set(map(numbered, stored))
            self.known &= set().union(*self.has.values())

    def event(self) -> None:
        chance = self.random
        choice = self.random.random()
        memory = memory_of(self.node)
        disk = self.node.disk
        if choice < 0.1 and len(self.open) < 4:
            self._rid += 1
            self.open.add(self._rid)
            prompt = [*words(chance.randrange(PREFIXES)), *chance.choices(range(900), k=chance.randrange(1, 6))]
            self.node.submit(self._rid, prompt, SamplingParams(max_tokens=chance.randrange(1, 9)), Mode.LOCAL)
        elif choice < 0.11 and self.open:
            self.node.obey(Cancel(self.open.pop()))
        elif choice < 0.3 and memory.copies:
            memory.land(chance.choice(list(memory.copies)))
        elif choice < 0.5 and isinstance(disk, SlowDisk):
            self.disk_event(disk)
        else:
            self.node.step()

    def disk_event(self, disk: SlowDisk) -> None:
        chance = self.random
        choice = self.random.random()
        if choice < 0.03:
            disk.scan()
        elif choice < 0.06 and disk.files:
            file = disk.files[chance.choice(list(disk.files))]
            file[:1] = bytes([file[0] ^ 1])
        elif choice < 0.08 and disk.files:
            del disk.files[chance.choice(list(disk.files))]
        elif disk.orders:
            disk.land(chance.choice(list(disk.orders)), fails=chance.random() < 0.05)

    def change_weights(self) -> None:
        self.rest()
        self.node.scheduler.forget_cached()
        if self.random.random() < 0.5:
            self.check()
        self._version += 1
        self.node.obey(UseWeights(f"v{self._version % 2}"))

    def rest(self) -> None:
        rest(self.node)
        self.check()

    def check(self) -> None:
        self.take(self.recorder.take())
        held = self.held()
        assert self.copy.blocks.keys() == held["GPU"]
        for medium in ("CPU", "STORAGE"):
            assert self.copy.tiers.get(medium, set()) == held[medium] & self.known
        for medium, keys in held.items():
            self.most[medium] = max(self.most.get(medium, 0), len(keys))

    def held(self) -> dict[str, Keys]:
        """Return what the node has, by medium: group and number of each block."""
        keys_of: dict[str, Keys] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        disk = self.tier.source
        for of_states, area in enumerate(self.tier.areas):
            indexed = disk._parts[area].index if isinstance(disk, DiskTier) else None
            parts = {
                "GPU": area.pool._key_of.values(),
                "CPU": area.host._entries,
                "STORAGE": () if indexed is None else (*indexed._found, *indexed._before),
            }
            for medium, keys in parts.items():
                keys_of[medium] |= {
                    (group or of_states * self.num_groups, short_hash(block_hash)) for group, block_hash in keys
                }
        return keys_of

    def late_reader(self) -> CacheCopy:
        """Return what a new reader has after a replay of all, whose first batches are no longer kept."""
        late = CacheCopy()
        late.take_all(self.log.replay(0))
        return late

    def close(self) -> None:
        self.node.close()


@pytest.mark.parametrize(("kind", "with_disk"), sampled(KINDS, [False, True], every=2))
def test_a_subscriber_has_what_each_medium_has(kind: str, with_disk: bool) -> None:
    for seed in range(2):
        world = World(seed, {} if with_disk else None, **KINDS[kind])
        for number in range(1, 1201):
            world.event()
            if world.random.random() < 0.1:
                world.check()
            if number % 400 == 0:
                world.rest()
                late = world.late_reader()
                assert late.blocks.keys() == world.copy.blocks.keys()
                assert {**world.copy.tiers, **late.tiers} == world.copy.tiers
                world.change_weights()
        world.rest()
        assert world.most["GPU"] > 10
        assert world.most["CPU"] > 10
        assert (world.most["STORAGE"] > world.most["CPU"]) == with_disk
        world.node.scheduler.forget_cached()
        world.check()
        assert not any((world.copy.blocks, *world.copy.tiers.values()))
        world.close()


def test_blocks_found_on_disk_are_told_once_their_tokens_are_known() -> None:
    """A node starts with the files of another one."""
    files: Files = {}
    writer = World(1, files)
    writer.node.submit(1, words(1), SamplingParams(max_tokens=1), Mode.LOCAL)
    writer.rest()
    world = World(2, files)
    world.rest()
    assert world.held()["STORAGE"] == writer.copy.tiers["STORAGE"] != set()
    assert world.copy.tiers == world.late_reader().tiers == {}
    world.node.submit(1, words(1), SamplingParams(max_tokens=1), Mode.LOCAL)
    world.rest()
    assert world.copy.tiers["STORAGE"] == world.late_reader().tiers["STORAGE"] == writer.copy.tiers["STORAGE"]
    writer.close()
    world.close()


def events_of(payloads: Iterable[bytes]) -> list[dict[str, Any]]:
    return [fields_of(event) for payload in payloads for event in msgspec.msgpack.decode(payload)[1]]


def changes(*tiers: TierChanges, stored: int = 0, removed: int = 0) -> CacheChanges:
    blocks = [StoredBlock(0, bytes([stored] * 16), b"", array("I", [stored] * BLOCK).tobytes(), "")]
    return CacheChanges(False, [(0, bytes([removed] * 16))] * bool(removed), blocks * bool(stored), list(tiers))


def test_block_that_moves_is_stored_before_it_is_removed() -> None:
    """A reader that forgets a block with its last medium then never forgets a block that another medium has."""
    log = EventLog([GroupKind("any", None)], BLOCK)
    key = (0, bytes([7] * 16))
    batches = [
        changes(stored=7),
        changes(TierChanges(Medium.HOST, [], [key]), removed=7),
        changes(TierChanges(Medium.HOST, [key], []), TierChanges(Medium.DISK, [], [key])),
        changes(TierChanges(Medium.DISK, [key], [])),
    ]
    events = events_of(payload for batch in batches for _, payload in log.add(batch))
    assert [(event["type"], event["medium"]) for event in events] == [
        ("BlockStored", "GPU"),
        ("BlockStored", "CPU"),
        ("BlockRemoved", "GPU"),
        ("BlockStored", "STORAGE"),
        ("BlockRemoved", "CPU"),
        ("BlockRemoved", "STORAGE"),
    ]


def test_blocks_whose_tokens_are_too_many_to_keep_are_removed_for_readers() -> None:
    """Readers thus know what a new reader would be told, although the disk still has these blocks."""
    log = EventLog([GroupKind("any", None)], BLOCK, most_behind=2)
    copy = CacheCopy()
    keys = {number: (0, bytes([number] * 16)) for number in range(1, 5)}
    for number, key in keys.items():
        copy.take_all(log.add(changes(TierChanges(Medium.DISK, [], [key]), stored=number)))
        copy.take_all(log.add(changes(removed=number)))
    assert copy.tiers == {"STORAGE": {numbered(keys[3]), numbered(keys[4])}}
    assert log.add(changes(TierChanges(Medium.DISK, [keys[1]], []))) == [], "readers know of its removal"
    copy.take_all(log.add(changes(stored=2)))
    assert copy.tiers["STORAGE"] == {numbered(keys[number]) for number in (2, 3, 4)}
