"""KV events: a reader that knows the published form only rebuilds the prefix cache of a node."""

from __future__ import annotations

import random
import resource
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from kv_event_reader import CacheCopy, EventReader, begin_frame, raw_connection
from toy_node import Node

from engine.kv_cache.block_pool import BlockPool, Use
from engine.kv_cache.cache_parts import CacheParts
from engine.kv_cache.connector_scheduler import KVConnectorScheduler
from engine.kv_cache.kv_cache_manager import KVCacheManager
from engine.kv_cache.states import States
from engine.kv_events.recorder import NetChanges
from engine.recurrent import state_slots
from engine.request import Request
from engine.sequence import Sequence
from node.frontend_flags import FrontendOptions
from node.kv_events.event_log import EventLog, GroupKind, short_hash
from node.kv_events.options import KVEventOptions
from node.kv_events.publisher import KVEventPublisher
from pdserve.errors import CapacityError, ConfigError
from pdserve.hashing import BlockHashes, root_hash
from pdserve.images import ImageSpan
from pdserve.ipc.cache_changes import CacheChanges, StoredBlock
from pdserve.ipc.messages import EventBatch, Mode
from pdserve.kv.groups import KVCacheGroups
from pdserve.sampling_params import SamplingParams

BLOCK = 4
FULL = GroupKind("full_attention", None)
SNAPSHOT = GroupKind("mamba", None)
TOPIC = "kv@node@model"


class Operations:
    """Random operations on a small prefix cache, by sequences that share prefixes and salts."""

    def __init__(self, seed: int, windows: tuple[int | None, ...]) -> None:
        self.recorder = NetChanges()
        self.pool = BlockPool(40, BLOCK, KVCacheGroups(windows, tuple(range(len(windows)))))
        self.pool.recorder = self.recorder
        connector = KVConnectorScheduler(CacheParts(self.pool, EventBatch(), BLOCK))
        self._kv = KVCacheManager(self.pool, connector, BLOCK, 16, States())
        self._random = random.Random(seed)
        self._live: list[Sequence] = []

    def next(self) -> None:
        chance = self._random
        choice = self._random.random()
        if not self._live and choice < 0.2:
            self._kv.forget_cached()
        elif choice < 0.3:
            sequence = self._sequence()
            if self._kv.allocate(sequence):
                self._live.append(sequence)
        elif choice < 0.5 and self._live:
            self._kv.free(self._live.pop(chance.randrange(len(self._live))))
        elif self._live:
            sequence = chance.choice(self._live)
            num_tokens = min(sequence.num_computed + chance.randint(1, 16), sequence.prompt_len)
            if self._kv.has_windows:
                self._kv.cover(sequence, num_tokens - sequence.num_computed)
            sequence.set_computed(min(num_tokens, sequence.table.covered))
            self._kv.cache_full_blocks(sequence)

    def _sequence(self) -> Sequence:
        chance = self._random
        prefix = self._random.randrange(3)
        length = chance.randint(1, 60)
        salt = chance.choice(["", "", "salt"])
        shared = min(length, chance.choice([0, 8, 20]))
        tokens = array("I", [prefix * 64 + place for place in range(shared)])
        tokens.extend(chance.choices(range(2, 90), k=length - shared))
        images = tuple(ImageSpan(start, 1, 2, bytes([chance.randrange(2)] * 32)) for start in range(1, shared - 1, 7))
        request = Request(0, tokens.tobytes(), SamplingParams(max_tokens=1), Mode.LOCAL, salt, images=images)
        hashes = BlockHashes(BLOCK, root_hash(salt), images=images)
        return Sequence(0, request, 0, tokens, hashes, length, length + 1)


@pytest.fixture
def publish() -> Iterator[Callable[..., KVEventPublisher]]:
    publishers = []

    def publish(kinds: list[GroupKind], **form: Any) -> KVEventPublisher:
        options = KVEventOptions("tcp://127.0.0.1:*", "tcp://127.0.0.1:*", TOPIC, **form)
        publishers.append(KVEventPublisher(options, kinds, BLOCK))
        publishers[-1].start()
        return publishers[-1]

    yield publish
    for publisher in publishers:
        publisher.close()


@pytest.fixture
def read() -> Iterator[Callable[..., EventReader]]:
    readers = []

    def read(publisher: KVEventPublisher, **options: Any) -> EventReader:
        live, replays = publisher.endpoints
        readers.append(EventReader(live, replays, **options))
        return readers[-1]

    yield read
    for reader in readers:
        reader.close()


@pytest.mark.parametrize(
    ("windows", "as_maps"), [((None,), True), ((None, 6), False)], ids=["one group, maps", "window, arrays"]
)
def test_cache_is_rebuilt_after_ten_thousand_operations_with_losses(
    windows: tuple[int | None, ...], as_maps: bool, publish: Any, read: Any
) -> None:
    chance = random.Random(1)
    kinds = [GroupKind("sliding_window" if window else "full_attention", window) for window in windows]
    publisher = publish(kinds, as_maps=as_maps)
    operations = Operations(2, windows)
    reader = read(publisher, drops=lambda number: chance.random() < 0.1)
    published = 0
    while not reader.num_received:  # until the subscription has reached the publisher
        publisher.clear()
        published += 1
        reader.read(timeout=0.05)
    for number in range(10_000):
        operations.next()
        if chance.random() < 0.2 or number == 9_999:
            for changes in operations.recorder.take():
                publisher.publish(changes)
                published += 1
        if number % 100 == 0:
            reader.read()
    reader.read(timeout=5.0)
    reader.replay()
    assert reader.copy.next_number == published > 1000
    assert reader.num_lost > 50
    cached = {(group, short_hash(block_hash)) for group, block_hash in operations.pool._key_of.values()}
    assert reader.copy.blocks.keys() == cached != set()
    assert reader.copy.num_unreachable == 0 or len(windows) > 1, "blocks of a window may outlive those before them"
    assert reader.copy.hashes_of_tokens() <= set(operations.pool._key_of.values())
    assert len(reader.copy.hashes_of_tokens()) == len(cached) - reader.copy.num_unreachable
    assert {(block.kind, block.window) for block in reader.copy.blocks.values()} == set(kinds)
    late = read(publisher)
    late.replay(0)
    assert late.copy.blocks == reader.copy.blocks


@pytest.mark.parametrize("depth", [(1, 1), (3, 2)], ids=str)
def test_snapshots_of_states_are_a_group_of_their_own(depth: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Few blocks and slots, shared prefixes and long answers: snapshots come, go and are replaced."""
    monkeypatch.setattr(state_slots, "DISTANCE", 3 * BLOCK)
    monkeypatch.setattr(state_slots, "DECODE_DISTANCE", 2 * BLOCK)
    node = Node(60, *depth, state_slots=9)
    chance = random.Random(5)
    recorder = NetChanges()
    node.scheduler.connector.report.record(recorder)
    states = node.scheduler.states
    log = EventLog([FULL, SNAPSHOT], BLOCK)
    copy = CacheCopy()
    most = 0
    for rid in range(1, 40):
        prefix = [chance.randrange(3)] * chance.choice([0, 8, 20])
        prompt = [*prefix, *chance.choices(range(2, 50), k=chance.randint(1, 30))]
        node.submit(rid, prompt, SamplingParams(max_tokens=chance.randint(1, 25)), Mode.LOCAL)
        for _ in range(chance.randint(1, 30)):
            for taken in (*node.step().cache_changes, *recorder.take()):  # take(): steps without other events
                copy.take_all(log.add(taken))
            cached = {(0, short_hash(key)) for _, key in node.scheduler.pool._key_of.values()}
            cached |= {(1, short_hash(key)) for _, key in states.pool._key_of.values()}
            assert copy.blocks.keys() == cached
            most = max(most, len(states.pool._key_of))
    assert most > 3
    assert {(block.kind, block.window) for block in copy.blocks.values()} == {FULL, SNAPSHOT}
    while not node.engine.idle:
        node.step()
    node.scheduler.forget_cached()
    for taken in recorder.take():
        copy.take_all(log.add(taken))
    assert not copy.blocks
    node.close()


def stored(number: int, parent: int = 0) -> StoredBlock:
    tokens = array("I", [number] * BLOCK).tobytes()
    return StoredBlock(0, bytes([number] * 16), bytes([parent] * 16) if parent else b"", tokens, "")


def changes(*blocks: StoredBlock, removed: tuple[int, ...] = ()) -> CacheChanges:
    return CacheChanges(False, [(0, bytes([number] * 16)) for number in removed], list(blocks))


def test_extra_keys_are_the_images_of_each_block_and_the_salt_of_the_first() -> None:
    """In vLLM's form and order. An image that began in an earlier block has an offset below 0."""
    digests = bytes(range(32)), bytes(range(1, 33))
    images = ImageSpan(1, 2, 3, digests[0]), ImageSpan(7, 1, 1, digests[1])
    ids = array("I", [5] * 4 * BLOCK)
    request = Request(0, ids.tobytes(), SamplingParams(max_tokens=1), Mode.LOCAL, "pepper", images=images)
    hashes = BlockHashes(BLOCK, root_hash("pepper"), images=images)
    sequence = Sequence(0, request, 0, ids, hashes, len(ids), len(ids) + 1)
    hashes.upto(ids, len(ids))
    recorder = NetChanges()
    for index in range(4):
        recorder.store(sequence, index, 0)
    (taken,) = recorder.take()
    ((_, payload),) = EventLog([FULL], BLOCK).add(taken)
    _, (event,), _ = msgspec.msgpack.decode(payload)
    first, second = (digest.hex() for digest in digests)
    assert BLOCK == 4
    assert event["extra_keys"] == [[[first, 1], "pepper"], [[first, -3], [second, 3]], None, None]


def test_blocks_of_an_adapter_have_its_name_and_its_digest() -> None:
    """Another adapter, or none, has other hashes for the same tokens."""
    digest = "ab" * 32
    ids = array("I", [5] * 2 * BLOCK)
    sampling = SamplingParams(max_tokens=1, adapter=digest)
    request = Request(0, ids.tobytes(), sampling, Mode.LOCAL, "")
    hashes = BlockHashes(BLOCK, root_hash("", digest))
    of_base = BlockHashes(BLOCK, root_hash("")).upto(ids, len(ids))
    assert not set(hashes.upto(ids, len(ids))) & set(of_base)
    sequence = Sequence(0, request, 0, ids, hashes, len(ids), len(ids) + 1)
    recorder = NetChanges()
    for index in range(2):
        recorder.store(sequence, index, 0)
    (taken,) = recorder.take()
    ((_, payload),) = EventLog([FULL], BLOCK, name_of={digest: "sql"}.__getitem__).add(taken)
    _, (event,), _ = msgspec.msgpack.decode(payload)
    assert (event["lora_name"], event["extra_keys"]) == ("sql", [[digest], [digest]])


def test_replay_of_batches_that_are_no_longer_kept_is_a_snapshot() -> None:
    log = EventLog([FULL], BLOCK, kept_batches=2)
    for batch in (changes(stored(1)), changes(stored(2, 1)), changes(removed=(1,)), changes(stored(3), stored(1))):
        log.add(batch)
    assert [number for number, _ in log.replay(2)] == [2, 3]
    ((number, payload),) = log.replay(1)
    copy = CacheCopy()
    copy.take(number, payload)
    assert number == 3
    assert {(block.tokens or [0])[-1] for block in copy.blocks.values()} == {1, 2, 3}
    assert copy.groups_with([1] * BLOCK + [2] * BLOCK) == {0}, "the block before comes first, though it is stored anew"


def test_number_of_an_earlier_start_gets_a_snapshot() -> None:
    log = EventLog([FULL], BLOCK)
    assert list(log.replay(7)) == []
    log.add(changes(stored(1)))
    assert [number for number, _ in log.replay(1)] == []
    assert [number for number, _ in log.replay(7)] == [0]


def test_kept_batches_are_bounded_in_bytes() -> None:
    log = EventLog([FULL], BLOCK, kept_bytes=1000)
    sizes = [len(payload) for number in range(1, 30) for _, payload in log.add(changes(stored(number)))]
    assert sum(len(payload) for _, payload in log.replay(log.next_number - len(log._kept))) <= 1000 < sum(sizes)


def test_changes_that_cancel_out_are_not_published() -> None:
    recorder = NetChanges()
    pool = BlockPool(2, BLOCK)
    pool.recorder = recorder
    sequence = Operations(1, (None,))._sequence()
    sequence.hashes.upto(sequence.token_ids, BLOCK)
    block_hash, _ = sequence.hashes.link(0)
    for step in range(3):
        blocks = pool.take(1) or []
        assert pool.cache((block_hash,), blocks[:1])
        recorder.store(sequence, 0, 0)
        if step == 1:
            assert [len(taken.stored) for taken in recorder.take()] == [1]
        pool.drop(blocks, Use.HELD)
        pool.drop(pool.take(2) or [], Use.HELD)  # evicts it
    (taken,) = recorder.take()
    assert (taken.removed, taken.stored) == ([(0, block_hash)], [])
    assert recorder.take() == []


def test_batches_are_bounded_in_bytes() -> None:
    """This bounds the batches that wait for a subscriber, too."""
    log = EventLog([FULL], BLOCK)
    copy = CacheCopy()
    number_of = {number.to_bytes(16, "little"): number for number in range(1, 5_000)}
    blocks = [StoredBlock(0, key, b"", array("I", [1 << 31] * BLOCK).tobytes(), "") for key in number_of]
    batches = log.add(changes(*blocks))
    assert max(len(payload) for _, payload in batches) < 65 << 10 < sum(len(payload) for _, payload in batches)
    copy.take_all(batches)
    assert copy.blocks.keys() == {(0, number) for number in number_of.values()}


def test_snapshot_is_used_again_while_the_batches_after_it_are_kept() -> None:
    log = EventLog([FULL], BLOCK, kept_batches=3)
    reader = CacheCopy()
    for number in range(1, 6):
        log.add(changes(stored(number)))
    (snapshot,) = log.replay(0)
    log.add(changes(stored(6)))
    batches = list(log.replay(0))
    assert batches[0] == snapshot
    reader.take_all(batches)
    assert len(reader.blocks) == 6
    for number in range(7, 10):
        log.add(changes(stored(number)))
    ((number, payload),) = log.replay(0)
    reader.take(number, payload)
    assert number == 8
    assert len(reader.blocks) == 9


def test_request_for_a_replay_that_is_no_number_is_ignored(
    publish: Any, read: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """All of them together cost one line in the log."""
    publisher = publish([FULL])
    publisher.clear()
    reader = read(publisher)
    for request in ([b""], [b"", b"7"], [b"x" * 9], [b"", b"", b""], [b"x"] * 20 + [bytes(8)]) * 10:
        reader.ask(request)
    assert reader.replay() == [0]
    assert len([record for record in caplog.records if "replay" in record.message]) == 1


@pytest.mark.parametrize(("socket", "kind"), [(0, "SUB"), (1, "DEALER")])
def test_long_message_from_outside_ends_its_connection(socket: int, kind: str, publish: Any) -> None:
    """The size of a message is known before its content, so it costs no memory."""
    with raw_connection(publish([FULL]).endpoints[socket], kind) as raw:
        begin_frame(raw, 1 << 29)
        while raw.recv(1024):  # times out if the content is awaited
            pass


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_readers_that_ask_again_before_they_read_cost_a_window_each_and_get_one_replay(publish: Any, read: Any) -> None:
    publisher = publish([FULL])
    keys = [number.to_bytes(16, "little") for number in range(100)]
    blocks = changes(*[StoredBlock(0, key, b"", array("I", [1 << 31] * BLOCK).tobytes(), "") for key in keys])
    for _ in range(600):
        publisher.publish(blocks)  # 8 kB each
    prompt = read(publisher)
    late = [read(publisher, receives=1) for _ in range(2)]
    assert len(prompt.receive(0)) == 600
    before = resident_bytes()
    for _ in range(10):
        for reader in late:
            reader.ask([b"", bytes(8)])
        prompt.receive(0)
    grown = resident_bytes() - before
    assert grown < 40 << 20, f"{grown >> 20} MiB for 20 requests of 5 MB each"
    late[0].receive_rest()
    assert late[0].receive(600) == [], "an answer to an earlier request is left"


def test_port_in_use_and_wrong_endpoints_are_refused(publish: Any) -> None:
    taken = publish([FULL]).endpoints[0]
    with pytest.raises(CapacityError, match=r"kv-events-endpoint tcp:.*in use; choose another one"):
        KVEventPublisher(KVEventOptions(taken), [FULL], BLOCK)
    for wrong in ("5557", "http://*:5557", "tcp://*:x"):
        with pytest.raises(ConfigError, match=r"--kv-events-replay-endpoint .*write tcp://\*:PORT"):
            KVEventPublisher(KVEventOptions("tcp://127.0.0.1:*", wrong), [FULL], BLOCK)


def test_options_of_events_without_an_endpoint_are_refused() -> None:
    with pytest.raises(ConfigError, match="without --kv-events-endpoint"):
        FrontendOptions(kv_events_topic="x").kv_events("t")
    assert FrontendOptions().kv_events("t") is None
    assert FrontendOptions(kv_events_endpoint="tcp://*:1").kv_events("kv@n@m") == KVEventOptions(
        "tcp://*:1", "", "kv@n@m"
    )
