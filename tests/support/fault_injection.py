"""Random faults: nodes are killed, stopped and restarted under load, and no client may notice.

A seed determines the faults and their order. A decode node gets a fault only while another one serves, so capacity
remains and every client must get the answer of an undisturbed fleet.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import grpc
from fleet import Fleet, NodeProcess

from pdserve.flags.shared import DRAIN_SECONDS

KINDS = ("kill", "kill engine", "terminate", "stop node", "stop frontend", "stop engine")
ONE_RANK = {"prefill": 1, "decode": 1, "both": 1}
SETTLE_SECONDS = 3.0  # until all routers and peers know that a node is ready again


@dataclass(frozen=True)
class Fault:
    """A fault of one node, ``pause`` seconds after the previous fault; the node recovers after ``lasts`` seconds."""

    pause: float
    role: str
    index: int
    kind: str
    lasts: float


def random_faults(
    seed: int, counts: Mapping[str, int], pause: float, ranks: Mapping[str, int] = ONE_RANK
) -> Iterator[Fault]:
    """Yield faults without end, of ``counts`` nodes by role; ``pause`` is the mean pause.

    ``ranks`` gives the ranks of a node by role. Ranks other than rank 0 also get faults of their own.
    """
    rng = random.Random(seed)
    nodes = [(role, index) for role, count in counts.items() for index in range(count)]
    kinds = {
        role: (*KINDS, *(f"{action} rank {rank}" for rank in range(1, count) for action in ("kill", "stop")))
        for role, count in ranks.items()
    }
    while True:
        role, index = rng.choice(nodes)
        yield Fault(rng.uniform(0, 2 * pause), role, index, rng.choice(kinds[role]), rng.uniform(0.5, 6.0))


class FaultInjector:
    """Injects faults into a fleet from its own thread while the context is open; on exit all nodes have recovered.

    ``injected`` counts the faults by role and kind.
    """

    def __init__(self, fleet: Fleet, plan: Iterator[Fault]) -> None:
        self.injected: Counter[str] = Counter()
        self._fleet = fleet
        self._plan = plan
        self._down: dict[NodeProcess, tuple[Fault, float]] = {}  # (fault, time at which it ends)
        self._recovering: set[NodeProcess] = set()
        self._ready_since: dict[NodeProcess, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="fault injector")
        self._error: BaseException | None = None

    def __enter__(self) -> FaultInjector:
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
                due = time.monotonic() + fault.pause
                while not self._stopping.is_set() and (time.monotonic() < due or not self._may_inject(fault)):
                    self._recover_due(time.monotonic())
                    time.sleep(0.05)
                if self._stopping.is_set():
                    break
                self._inject(fault)
            self._recover_due(float("inf"))
            self._fleet.wait_until(lambda: not self._unready(), 60.0)
        except BaseException as exc:
            self._error = exc

    def _node(self, fault: Fault) -> NodeProcess:
        return self._fleet.of_role(fault.role)[fault.index]

    def _may_inject(self, fault: Fault) -> bool:
        """Return whether the node is ready and, if it decodes, another one serves."""
        unready = self._unready()
        settled = time.monotonic() - SETTLE_SECONDS
        others = [d for d in self._fleet.decoding if d not in unready and self._ready_since.get(d, 0.0) < settled]
        node = self._node(fault)
        return node not in unready and (fault.role == "prefill" or any(other is not node for other in others))

    def _unready(self) -> set[NodeProcess]:
        """Return the nodes that had a fault and are not ready again."""
        for node in [node for node in self._recovering if is_ready(node)]:
            self._recovering.discard(node)
            self._ready_since[node] = time.monotonic()
        return {*self._down, *self._recovering}

    def _inject(self, fault: Fault) -> None:
        node = self._node(fault)
        self.injected[f"{fault.role}: {fault.kind}"] += 1
        inject(node, fault.kind)
        self._down[node] = fault, time.monotonic() + fault.lasts

    def _recover_due(self, now: float) -> None:
        for node, (fault, until) in list(self._down.items()):
            if now < until:
                continue
            del self._down[node]
            self._recovering.add(node)
            recover(node, fault.kind)


def inject(node: NodeProcess, kind: str) -> None:
    """Inject a fault of a kind of ``KINDS`` and return once it has taken effect."""
    action, _, part = kind.partition(" ")
    if action == "stop":
        node.stop(part)
    elif kind == "kill":
        node.kill()
    elif action == "kill":
        for process in node.processes(part):
            process.kill()
        node.wait_ended(10.0)
    else:
        node.signal(signal.SIGTERM)
        node.wait_ended(DRAIN_SECONDS + 10.0)  # requests that run there end first


def recover(node: NodeProcess, kind: str) -> None:
    """Resume or respawn a node after a fault; ``is_ready`` says when it serves again."""
    action, _, part = kind.partition(" ")
    if action == "stop":
        node.resume(part)
    else:
        node.respawn()


def is_ready(node: NodeProcess) -> bool:
    if node.child.state != "ready":
        assert node.child.state not in ("failed", "ended"), node.output
        return False
    try:
        return node.describe().state == "ready"
    except grpc.RpcError:
        return False
