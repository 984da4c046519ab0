"""A prefill and a decode node with a proxy between them, and requests that are held at a stage of their handoff.

    client ──► decode ──► proxy ──► prefill          KV travels directly between the two nodes

The proxy holds a request by delaying the next message, or an engine is stopped; the nodes have no code for it.
``STAGES`` lists the stages.
"""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from fault_proxy import FaultProxy
from fleet import Fleet, NodeProcess
from machine import patience
from node_client import Generated, RouterClient, greedy

BLOCK = 8  # tokens
STEP = 64  # tokens of a step of P
LENGTH = 300  # tokens of the prompt
OUTPUT = 150  # tokens
FLAGS = ("--block-size", str(BLOCK), "--kv-cache-memory", "4MiB", "--max-model-len", "1024")
DECODE_AHEAD = 4  # tokens after the first that P may sample
PREFILL_FLAGS = ("--decode-ahead", str(DECODE_AHEAD), "--max-batch-tokens", str(STEP), "--max-num-seqs", "8")
WAIT_SECONDS = 20.0
ATTEMPTS = 5
RELEASE_SECONDS = 5.0  # after a fault, all blocks must be free within this time

STAGES = (
    "before Prefill",  # D has reserved blocks; P has no request yet
    "accepted",  # P has the prompt; its answer is held
    "computing",  # P is in its first step
    "announced",  # P has leased a first part; the announcement is held
    "reading",  # D's connector has a part to read
    "last announced",  # P has leased everything, D has the first token
    "before Release",  # D has read everything; nothing is confirmed
    "decoding",  # P is not involved any more
)

PROMPT = random.Random(LENGTH).choices(range(3, 128), k=LENGTH)

TOKEN_BYTES = 1024  # bytes of KV per token, in a checkpoint of two layers
WARM = 168  # prompt tokens that nodes have cached, if ``Pair.warm`` is set: the rest are three parts
#: Two conversations do not fit into the cache, but several into host memory.
TIER_FLAGS = ("--kv-cache-memory", "640KiB", "--max-model-len", "600", "--host-kv-memory", "4MiB")
EVICTING = random.Random(WARM).choices(range(3, 128), k=590)

_salts = itertools.count()


@dataclass
class Pair:
    prefills: Fleet
    decodes: Fleet
    proxy: FaultProxy
    num_tokens: int  # requested output tokens
    expected: list[int] = field(default_factory=list)  # tokens that follow PROMPT, without a handoff
    warm: str = ""  # cached prefix of each prompt: none, in "host memory", or on D, from where P "pulls" it

    @property
    def prefill(self) -> NodeProcess:
        return self.prefills.prefill[0]

    @property
    def decode(self) -> NodeProcess:
        return self.decodes.decode[0]

    def wait_connected(self) -> None:
        """Wait until both nodes are ready and D is connected to P's current epoch."""
        nodes = (self.prefill, self.decode)
        self.prefills.wait_until(lambda: all(node.describe().state == "ready" for node in nodes), WAIT_SECONDS)
        sides = [self.decode, self.prefill] if self.warm else [self.decode]
        self.decodes.wait_until(lambda: all(len(node.describe().connected_peers) == 1 for node in sides), WAIT_SECONDS)

    def check_served(self) -> None:
        """Check that the next request is handed off, has the right tokens, and leaves no blocks behind.

        A D that was stopped reports its old connection until it detects that this has ended.
        """
        self.wait_connected()
        with RouterClient(self.decode.address) as client:
            salt = self.new_salt(client)
            end = time.monotonic() + patience(RELEASE_SECONDS)
            failures = self.decode.counter("handoff_failures")
            handoffs = self.decode.counter("handoffs")
            assert send_prompt(client, self, salt=salt).wait().tokens == self.expected
            while self.decode.counter("handoffs") == handoffs and time.monotonic() < end:
                assert send_prompt(client, self).wait().tokens == self.expected
        assert self.decode.counter("handoffs") == handoffs + 1
        assert self.decode.counter("handoff_failures") == failures, self.decode.output
        for node in (self.prefill, self.decode):
            node.wait_idle(RELEASE_SECONDS)

    def new_salt(self, client: RouterClient) -> str:
        """Return a salt with which the nodes have cached the prompt's prefix as ``warm`` says."""
        salt = f"held {next(_salts)}"
        match self.warm:
            case "host memory":
                nodes = (self.prefill, self.decode)
                more = greedy(DECODE_AHEAD + 4)  # so many tokens that D reads the KV
                before = [node.counter("host_kv_store_bytes") for node in nodes]
                client.generate(PROMPT[:WARM], more, self.prefill.address, cache_salt=salt)
                for node, stored in zip(nodes, before, strict=True):
                    self.decodes.wait_until(partial(has_stored, node, stored), WAIT_SECONDS)
                client.generate(EVICTING, more, self.prefill.address, cache_salt=f"beside {salt}")
            case "pulls":
                client.generate(PROMPT[:WARM], greedy(1), cache_salt=salt)
        return salt


def has_stored(node: NodeProcess, before: float) -> bool:
    """Return whether host memory has stored the first ``WARM`` tokens since its counter was at ``before`` bytes."""
    return node.counter("host_kv_store_bytes") >= before + WARM * TOKEN_BYTES


@contextmanager
def start_pair(
    checkpoint: Path,
    flags: Sequence[str] = (),
    prefill_flags: Sequence[str] = (),
    decode_flags: Sequence[str] = (),
    num_tokens: int = OUTPUT,
) -> Iterator[Pair]:
    """Start a pair; ``flags`` are for both nodes, beside the usual ones."""
    with Fleet() as prefills, Fleet() as decodes, FaultProxy() as proxy:
        proxy.target = prefills.start_prefill(checkpoint, [*FLAGS, *PREFILL_FLAGS, *flags, *prefill_flags]).address
        decodes.start_decode(checkpoint, [*FLAGS, *flags, *decode_flags, "--prefill", proxy.address])
        prefills.wait_ready()
        decodes.wait_ready()
        pair = Pair(prefills, decodes, proxy, num_tokens)
        pair.wait_connected()
        with RouterClient(pair.decode.address) as client:
            pair.expected = client.generate(PROMPT, greedy(num_tokens), cache_salt="local").tokens
        yield pair


@dataclass
class Held:
    """A request that stays at its stage until ``release`` is called."""

    client: RouterClient
    result: Generated
    release: Callable[[], None]


@contextmanager
def held_at(stage: str, pair: Pair, timeout_ms: int = 0) -> Iterator[Held]:
    """Hold a request at ``stage``. Afterwards it continues, and the proxy is reset."""
    with RouterClient(pair.decode.address) as client:
        salt = pair.new_salt(client)
        gate = _Gate(pair, stage)
        try:
            if stage == "decoding":
                result = send_until_decoding(client, pair, timeout_ms)
            else:
                result = send_prompt(client, pair, timeout_ms, salt)
                assert gate.reached.wait(patience(WAIT_SECONDS)), f"the request never came {stage}"
            yield Held(client, result, gate.open)
        finally:
            gate.open()
            pair.proxy.reset()


class _Gate:
    """Holds messages at the proxy, from the event that marks the stage until ``open``."""

    def __init__(self, pair: Pair, stage: str) -> None:
        self.reached = threading.Event()
        self._opened = threading.Event()
        self._pair = pair
        self._stage = stage
        self._seen: list[str] = []
        if stage == "before Prefill":
            pair.proxy.before_prefill = self._hold
        elif stage == "before Release":
            pair.proxy.before_release = self._hold
        else:
            pair.proxy.before_event = self._on_event
        if stage == "computing":  # an engine that is stopped before the prompt arrives looks busy with its first step
            pair.proxy.before_prefill = lambda: pair.prefill.stop("engine")

    def open(self) -> None:
        """Continue everything that was held. Idempotent."""
        if not self._opened.is_set():
            self._opened.set()
            if self._stage == "computing":
                self._pair.prefill.resume("engine")
            elif self._stage in ("reading", "decoding"):
                self._pair.decode.resume("engine")

    def _on_event(self, kind: str) -> None:
        self._seen.append(kind)
        count = len(self._seen)
        match self._stage:
            case "accepted" if count == 1:
                self._hold()
            case "computing" if count == 1:
                self.reached.set()
            case "announced" if count == 2:
                self._hold()
            case "reading" if count == 2:
                self._pair.decode.stop("engine")
            case "reading" if count == 3:
                self._hold()
            case "last announced" if self._seen[-2:] == ["first_tokens", "kv_ready"]:
                self._hold()

    def _hold(self) -> None:
        self.reached.set()
        self._opened.wait(patience(WAIT_SECONDS))


def send_prompt(client: RouterClient, pair: Pair, timeout_ms: int = 0, salt: str = "") -> Generated:
    """Send the prompt, which no node has cached without ``Pair.warm``."""
    fields: dict[str, Any] = {"cache_salt": salt or pair.new_salt(client), "timeout_ms": timeout_ms}
    if pair.warm == "pulls":
        fields |= {"prefix_node": pair.decode.address, "prefix_tokens": WARM}
    return client.send(PROMPT, greedy(pair.num_tokens), pair.prefill.address, **fields)


def send_until_decoding(client: RouterClient, pair: Pair, timeout_ms: int) -> Generated:
    """Send the prompt and stop D's engine between two tokens; again if the request ended before the stop."""
    for _ in range(ATTEMPTS):
        result = send_prompt(client, pair, timeout_ms)
        assert result.started.wait(patience(WAIT_SECONDS))
        tokens = result.choices[0]
        pair.decodes.wait_until(lambda tokens=tokens: len(tokens) > 2 + DECODE_AHEAD, WAIT_SECONDS)  # type: ignore[misc]
        pair.decode.stop("engine")
        pair.decode.status()  # once it answers, the frontend has read what the engine sent before the stop
        if pair.decode.status().running == 1 and not result.ended.is_set():
            return result
        pair.decode.resume("engine")
        assert result.ended.wait(patience(WAIT_SECONDS))
    raise AssertionError(f"{ATTEMPTS} requests ended before D's engine was stopped")


def is_prefix(result: Generated, expected: list[int]) -> bool:
    """Whether all received tokens, if any, are the expected ones."""
    tokens = result.choices.get(0, [])
    return tokens == expected[: len(tokens)]
