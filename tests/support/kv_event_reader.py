"""A reader of KV events: rebuilds a node's prefix cache from the events alone, with replays of lost ones.

It knows the published form only: nothing here is imported from the publisher.
"""

from __future__ import annotations

import contextlib
import socket
from array import array
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple, cast

import msgspec
import zmq
from machine import patience

from pdserve.hashing import hash_block_tokens, root_hash

_ARRAY_FIELDS = {
    "BlockStored": (
        "block_hashes",
        "parent_block_hash",
        "token_ids",
        "block_size",
        "lora_id",
        "medium",
        "lora_name",
        "extra_keys",
        "group_idx",
        "kv_cache_spec_kind",
        "kv_cache_spec_sliding_window",
    ),
    "BlockRemoved": ("block_hashes", "medium", "group_idx"),
    "AllBlocksCleared": (),
}


class PrefixBlock(NamedTuple):
    tokens: tuple[int, ...]
    images: tuple[tuple[bytes, int], ...] = ()  # digest and relative place


class KnownBlock(NamedTuple):
    salt: str
    prefix: tuple[PrefixBlock, ...] | None  # blocks up to this one; None: some are unknown
    kind: str
    window: int | None

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """Tokens up to the end of the block."""
        return None if self.prefix is None else tuple(chain.from_iterable(block.tokens for block in self.prefix))


def fields_of(event: Any) -> dict[str, Any]:
    """Return an event as a map, whichever form it has."""
    if isinstance(event, dict):
        return event
    name, *values = event
    return {"type": name, **dict(zip(_ARRAY_FIELDS[name], values, strict=True))}


class CacheCopy:
    """Copy of a node's prefix cache, from its events."""

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], KnownBlock] = {}  # by group and number of the block
        self.tiers: dict[str, set[tuple[int, int]]] = {}  # (group, number) of lower tiers' blocks, by medium
        self._prefixes: dict[int, tuple[str, tuple[PrefixBlock, ...] | None]] = {}  # every block ever seen, by number
        self.next_number = 0

    def take_all(self, batches: Iterable[tuple[int, bytes]]) -> None:
        for number, payload in batches:
            self.take(number, payload)

    def take(self, number: int, payload: bytes) -> None:
        """Apply a batch: the next one, or a snapshot. Earlier batches are ignored."""
        if number < self.next_number:
            return
        self.next_number = number + 1
        _, events, rank = msgspec.msgpack.decode(payload)
        assert rank is None
        for event in map(fields_of, events):
            match event.pop("type"):
                case "AllBlocksCleared":
                    self.blocks.clear()
                    self.tiers.clear()
                case "BlockRemoved":
                    for number in event["block_hashes"]:
                        if (medium := event["medium"]) == "GPU":
                            del self.blocks[event["group_idx"], number]
                        else:
                            self.tiers[medium].remove((event["group_idx"], number))
                case "BlockStored":
                    self._store(**event)

    def _store(
        self,
        block_hashes: list[int],
        parent_block_hash: int | None,
        token_ids: list[int],
        block_size: int,
        lora_id: None,
        medium: str,
        lora_name: None,
        extra_keys: list[list[Any] | None] | None,
        group_idx: int,
        kv_cache_spec_kind: str,
        kv_cache_spec_sliding_window: int | None,
    ) -> None:
        keys = {(group_idx, number) for number in block_hashes}
        told = self.blocks.keys() if medium == "GPU" else self.tiers.setdefault(medium, set())
        assert told.isdisjoint(keys), "told twice: a reader that counts references would keep the block"
        if not token_ids:
            assert (medium != "GPU", parent_block_hash, extra_keys) == (True, None, None)
            elsewhere = set(self.blocks).union(*self.tiers.values())
            assert keys <= elsewhere, "a reader that forgets blocks with their last medium does not know their tokens"
            self.tiers[medium] |= keys
            return
        if medium != "GPU":
            self.tiers[medium] |= keys
        assert len(token_ids) == block_size * len(block_hashes)
        salt = ""
        prefix = cast("tuple[PrefixBlock, ...] | None", ())
        if parent_block_hash is not None:
            salt, prefix = self._prefixes.get(parent_block_hash, ("", None))
        assert extra_keys is None or len(extra_keys) == len(block_hashes)
        for index, number in enumerate(block_hashes):
            extra = (extra_keys[index] if extra_keys else None) or []
            salts = [key for key in extra if isinstance(key, str)]
            if salts:
                assert (parent_block_hash, index, len(salts)) == (None, 0, 1), "a salt is a key of the first block"
                salt = salts[0]
            images = tuple((bytes.fromhex(digest), offset) for digest, offset in extra[: len(extra) - len(salts)])
            if prefix is not None:
                tokens = token_ids[index * block_size : (index + 1) * block_size]
                prefix = (*prefix, PrefixBlock(tuple(tokens), images))
            self._prefixes[number] = salt, prefix
            block = KnownBlock(salt, prefix, kv_cache_spec_kind, kv_cache_spec_sliding_window)
            if medium == "GPU":
                self.blocks[group_idx, number] = block

    @property
    def num_unreachable(self) -> int:
        """Number of blocks that follow an unknown block."""
        return sum(block.prefix is None for block in self.blocks.values())

    def hashes_of_tokens(self) -> set[tuple[int, bytes]]:
        """Return group and block hash of every other block, computed from tokens, images and salt."""
        blocks = self.blocks.items()
        return {(group, _hash(block.salt, block.prefix)) for (group, _), block in blocks if block.prefix is not None}

    def groups_with(self, tokens: Sequence[int]) -> set[int]:
        """Return the groups that have the block at the end of these tokens, without salt."""
        return {group for (group, _), block in self.blocks.items() if (block.salt, block.tokens) == ("", tuple(tokens))}


def _hash(salt: str, prefix: tuple[PrefixBlock, ...]) -> bytes:
    block_hash = root_hash(salt)
    for tokens, images in prefix:
        extra = b"".join(digest + offset.to_bytes(4, "little", signed=True) for digest, offset in images)
        block_hash = hash_block_tokens(block_hash, array("I", tokens), extra)
    return block_hash


class EventReader:
    """Subscribes to a node, and asks for replays. ``drops`` says which live batches are lost on the way."""

    def __init__(
        self, endpoint: str, replays: str, drops: Callable[[int], bool] = lambda number: False, receives: int = 0
    ) -> None:
        """``receives``: messages of replays that wait to be read; 0: any number."""
        self.copy = CacheCopy()
        self.num_received = self.num_lost = self.num_replays = 0
        self._drops = drops
        self._context = zmq.Context()
        self._live = self._context.socket(zmq.SUB)
        self._live.setsockopt(zmq.RCVHWM, 0)
        self._live.subscribe(b"kv@")
        self._live.connect(endpoint)
        self._replays = self._context.socket(zmq.DEALER)
        self._replays.setsockopt(zmq.RCVHWM, receives)
        self._replays.setsockopt(zmq.RCVBUF, 1 << 16)
        self._replays.connect(replays)

    def read(self, timeout: float = 0.0) -> None:
        """Apply the batches that have arrived, after a wait of up to ``timeout`` seconds; close gaps by replays."""
        while self._live.poll(int(timeout * 1e3)):
            timeout = 0.0
            _, encoded, payload = self._live.recv_multipart()
            number = int.from_bytes(encoded, "big")
            self.num_received += 1
            if self._drops(number):
                self.num_lost += 1
                continue
            if number > self.copy.next_number:
                self.replay()
            self.copy.take(number, payload)

    def replay(self, first: int | None = None) -> list[int]:
        """Ask for all batches from ``first`` on, by default the next one; return their numbers."""
        batches = self.receive(self.copy.next_number if first is None else first)
        self.copy.take_all(batches)
        return [number for number, _ in batches]

    def receive(self, first: int) -> list[tuple[int, bytes]]:
        """Ask for all batches from ``first`` on, and return them."""
        self.num_replays += 1
        self.ask([b"", first.to_bytes(8, "big")])
        return self.receive_rest()

    def receive_rest(self) -> list[tuple[int, bytes]]:
        """Return the rest of a replay, up to its end."""
        batches: list[tuple[int, bytes]] = []
        while True:
            assert self._replays.poll(30_000), "no answer to a request for a replay"
            _, encoded, payload = self._replays.recv_multipart()
            number = int.from_bytes(encoded, "big", signed=True)
            if number < 0:
                return batches
            batches.append((number, payload))

    def ask(self, request: list[bytes]) -> None:
        """Send a request for a replay as it is."""
        self._replays.send_multipart(request)

    def close(self) -> None:
        with contextlib.suppress(zmq.ZMQError):
            self._context.destroy(linger=0)


def raw_connection(endpoint: str, kind: str) -> socket.socket:
    """Connect to a ZeroMQ socket by its wire protocol, ZMTP 3.0, as a socket of this kind, and shake hands."""
    host, port = endpoint.removeprefix("tcp://").rsplit(":", 1)
    raw = socket.create_connection((host.strip("[]"), int(port)), timeout=patience(20.0))
    raw.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32))
    ready = b"\x05READY\x0bSocket-Type" + len(kind).to_bytes(4, "big") + kind.encode()
    raw.sendall(bytes([4, len(ready)]) + ready)
    received = b""
    while b"READY" not in received:
        received += raw.recv(1024)
    return raw


def begin_frame(raw: socket.socket, num_bytes: int) -> None:
    """Send the header of a frame, without its content."""
    raw.sendall(b"\x02" + num_bytes.to_bytes(8, "big"))
