"""Nodes that die, hang and come back at random under load, and clients that must not notice.

The requests and the faults, in their order, follow from a seed. A decode node is struck only while another one serves:
capacity remains. So every client gets the answer that an undisturbed fleet gives.
"""

from __future__ import annotations

import asyncio
import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import grpc
import httpx
from answers import Answer, ErrorAnswer, ask
from fleet import MODEL_NAME, Fleet, NodeProcess

KINDS = ("kill", "kill engine", "terminate", "stop node", "stop front", "stop engine")
ONE_RANK = {"prefill": 1, "decode": 1}
VOCABULARY = 4096  # the embedded tokenizer's
LOGPROBS = {"logprobs": 2}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
GRAMMARS = (
    {"structured_outputs": {"regex": "[a-z ]{10,200}"}},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 5}}},
)
SETTLED = 3.0  # seconds after which everybody knows that a node is back
LEAVES = 0.1  # share of the clients that go away in the middle


@dataclass(frozen=True)
class Fault:
    """What happens to a node ``pause`` seconds after the fault before, and how long it ``lasts``."""

    pause: float
    role: str
    index: int
    kind: str
    lasts: float


def faults(
    seed: int, num_prefill: int, num_decode: int, pause: float, ranks: Mapping[str, int] = ONE_RANK
) -> Iterator[Fault]:
    """For ever; ``pause`` is the mean. ``ranks`` of a node by role: all but the first are struck by themselves, too."""
    chance = random.Random(seed)
    nodes = [("prefill", i) for i in range(num_prefill)] + [("decode", i) for i in range(num_decode)]
    kinds = {
        role: (*KINDS, *(f"{what} rank {rank}" for rank in range(1, count) for what in ("kill", "stop")))
        for role, count in ranks.items()
    }
    while True:
        role, index = chance.choice(nodes)
        yield Fault(chance.uniform(0, 2 * pause), role, index, chance.choice(kinds[role]), chance.uniform(0.5, 6.0))


def new_body(chance: random.Random, max_prompt: int, max_tokens: int) -> dict[str, Any]:
    """A request of any kind."""

    def new_prompt() -> list[int]:
        return chance.choices(range(3, VOCABULARY), k=chance.randint(1, max_prompt))

    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": new_prompt() if chance.random() < 0.8 else [new_prompt(), new_prompt()],
        "max_tokens": chance.randint(max_tokens // 4, max_tokens),
        "temperature": chance.choice([0.0, 0.9]),
        "seed": chance.getrandbits(60),
        "n": chance.choice([1, 1, 3]),
        "stream": chance.random() < 0.7,
        "ignore_eos": chance.random() < 0.5,
    }
    for fields in (LOGPROBS, PENALTIES, chance.choice(GRAMMARS)):
        if chance.random() < 0.4:
            body |= fields
    return body


@dataclass
class Load:
    """Requests whose answers are known, and what has become of those that were sent."""

    bodies: list[dict[str, Any]]
    expected: list[Answer] = field(default_factory=list)
    outcomes: Counter[str] = field(default_factory=Counter)
    tokens: int = 0
    wrong: list[str] = field(default_factory=list)  # what a client should not have seen
    headers: dict[str, str] = field(default_factory=dict)  # of every request

    async def learn(self, url: str, chance: random.Random) -> None:
        """Ask for all of them. Some are given a stop string, which occurs in the middle of an answer."""
        async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False, headers=self.headers) as client:
            first = await asyncio.gather(*(ask(client, body) for body in self.bodies))
            for body, answer in zip(self.bodies, first, strict=True):
                text = answer.choices[0].text
                if chance.random() < 0.4 and len(text) > 20:
                    middle = len(text) // 2
                    body["stop"] = text[middle : middle + 4]
            self.expected = list(await asyncio.gather(*(ask(client, body) for body in self.bodies)))

    async def run(self, url: str, clients: int, seconds: float, seed: int) -> None:
        """So many clients, each with a request at a time."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=2 * clients)
        kept: dict[str, Any] = {"timeout": 120.0, "trust_env": False, "limits": limits, "headers": self.headers}
        async with httpx.AsyncClient(base_url=url, **kept) as client:
            await self.run_until(lambda: time.monotonic() > end, client, clients, seed)

    async def run_until(self, over: Callable[[], bool], client: httpx.AsyncClient, clients: int, seed: int) -> None:
        """As ``run``, over a client that knows where to, until it is over; what runs then is waited for."""
        await asyncio.gather(*(self._client(client, random.Random(seed + i), over) for i in range(clients)))

    async def _client(self, client: httpx.AsyncClient, chance: random.Random, over: Callable[[], bool]) -> None:
        while not over():
            index, leaves = chance.randrange(len(self.bodies)), chance.random() < LEAVES
            body = {**self.bodies[index], "cache_salt": str(chance.getrandbits(60))}  # not from the prefix cache
            leave_after = chance.randint(1, 20) if leaves and body["stream"] else float("inf")
            try:
                answer = await ask(client, body, leave_after)
            except (ErrorAnswer, httpx.HTTPError, AssertionError) as exc:
                self._add("error", 0, f"{type(exc).__name__}: {exc}")
                continue
            if answer.num_tokens >= leave_after:
                self._add("left", answer.num_tokens)
            elif answer.same_as(self.expected[index]):
                self._add("exact", answer.num_tokens)
            else:
                self._add("different", answer.num_tokens, f"request {index}: {answer} is not {self.expected[index]}")

    def _add(self, outcome: str, num_tokens: int, wrong: str = "") -> None:
        self.outcomes[outcome] += 1
        self.tokens += num_tokens
        if wrong:
            self.wrong.append(wrong)


class Saboteur:
    """Strikes the nodes of a fleet from a thread of its own, until it is left as a context manager.

    Then every node is back. ``struck`` counts the faults by role and kind.
    """

    def __init__(self, fleet: Fleet, plan: Iterator[Fault]) -> None:
        self.struck: Counter[str] = Counter()
        self._fleet = fleet
        self._plan = plan
        self._down: dict[NodeProcess, tuple[Fault, float]] = {}  # until when
        self._recovering: set[NodeProcess] = set()
        self._well_since: dict[NodeProcess, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saboteur")
        self._error: BaseException | None = None

    def __enter__(self) -> Saboteur:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            for fault in self._plan:
                strike_at = time.monotonic() + fault.pause
                while not self._stopping.is_set() and (time.monotonic() < strike_at or not self._may_strike(fault)):
                    self._bring_back(time.monotonic())
                    time.sleep(0.05)
                if self._stopping.is_set():
                    break
                self._strike(fault)
            self._bring_back(float("inf"))
            self._fleet.wait_until(lambda: not self._unwell(), 60.0)
        except BaseException as exc:
            self._error = exc

    def _node(self, fault: Fault) -> NodeProcess:
        return (self._fleet.prefill if fault.role == "prefill" else self._fleet.decode)[fault.index]

    def _may_strike(self, fault: Fault) -> bool:
        """Whether the node is there, and if it is a D, another one serves."""
        unwell = self._unwell()
        settled = time.monotonic() - SETTLED
        others = [d for d in self._fleet.decode if d not in unwell and self._well_since.get(d, 0.0) < settled]
        node = self._node(fault)
        return node not in unwell and (fault.role == "prefill" or any(other is not node for other in others))

    def _unwell(self) -> set[NodeProcess]:
        """Nodes that were struck and are not ready again."""
        for node in [node for node in self._recovering if is_ready(node)]:
            self._recovering.discard(node)
            self._well_since[node] = time.monotonic()
        return {*self._down, *self._recovering}

    def _strike(self, fault: Fault) -> None:
        node = self._node(fault)
        self.struck[f"{fault.role}: {fault.kind}"] += 1
        strike(node, fault.kind)
        self._down[node] = fault, time.monotonic() + fault.lasts

    def _bring_back(self, now: float) -> None:
        for node, (fault, until) in list(self._down.items()):
            if now < until:
                continue
            del self._down[node]
            self._recovering.add(node)
            repair(node, fault.kind)


def strike(node: NodeProcess, kind: str) -> None:
    """Returns when it has happened."""
    what, _, part = kind.partition(" ")
    if what == "stop":
        node.stop(part)
    elif kind == "kill":
        node.kill()
    elif what == "kill":
        for process in node.processes(part):
            process.kill()
        node.wait_ended(10.0)
    else:
        node.signal(signal.SIGTERM)
        node.wait_ended(10.0)


def repair(node: NodeProcess, kind: str) -> None:
    """Have it go on, or start it again; ``is_ready`` says when it is there."""
    what, _, part = kind.partition(" ")
    if what == "stop":
        node.go_on(part)
    else:
        node.spawn_again()


def is_ready(node: NodeProcess) -> bool:
    if node.child.state != "ready":
        assert node.child.state not in ("failed", "ended"), node.output
        return False
    try:
        return node.describe().state == "ready"
    except grpc.RpcError:
        return False
