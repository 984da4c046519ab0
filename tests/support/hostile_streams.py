"""Streams to the nodes of a fleet that claim requests and leases of other streams, while clients are served."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Sequence
from typing import Any

import grpc
from fleet import Fleet, NodeProcess

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

LARGEST = 1 << 40  # above every number that a router or decode node gives
DOWN = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)
WAIT_SECONDS = 1.0  # the node may be stopped


class HostileStreams:
    """Opens one stream after another from its own thread while the context is open.

    ``ends`` counts the streams by role and by how the node ended them. ``failures`` holds answers that are wrong.
    """

    def __init__(self, fleet: Fleet, seed: int) -> None:
        self.ends: Counter[str] = Counter()
        self.failures: list[str] = []
        self._fleet = fleet
        self._rng = random.Random(seed)
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hostile streams")

    def __enter__(self) -> HostileStreams:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping.wait(0.02):
            if self._rng.random() < 0.5:
                self._attack_decode(self._rng.choice(self._fleet.decoding))
            else:
                self._attack_prefill(self._rng.choice(self._fleet.prefilling))

    def _attack_decode(self, node: NodeProcess) -> None:
        number = self._number()
        claims = (
            pb.ServeRequest(cancel=pb.Cancel(request=number)),
            pb.ServeRequest(pause=pb.Pause(request=number)),
            pb.ServeRequest(),
        )
        self._send(node, "decode", [self._rng.choice(claims)])

    def _attack_prefill(self, node: NodeProcess) -> None:
        """Send one claim; or make numbers look used with a prompt that is refused, and then claim many."""
        if self._rng.random() < 0.7:
            self._send(node, "prefill", [self._rng.choice([*self._claims(self._number()), pb.HandoffRequest()])])
            return
        prompt = pb.HandoffRequest(prefill=pb.PrefillRequest(request=LARGEST, epoch="guessed"))
        claims = [claim for _ in range(50) for claim in self._claims(self._rng.randrange(2000))]
        self._send(node, "prefill, with a prompt", [prompt, *claims])

    def _claims(self, number: int) -> list[pb.HandoffRequest]:
        return [
            pb.HandoffRequest(release=pb.ReleaseRequest(request=number)),
            pb.HandoffRequest(extend=pb.ExtendRequest(request=number, ask=1)),
        ]

    def _number(self) -> int:
        return self._rng.choice([self._rng.randrange(2000), self._rng.getrandbits(64)])

    def _send(self, node: NodeProcess, kind: str, messages: Sequence[Any]) -> None:
        """Send messages on a new stream, and read its answers until the node ends it."""
        if not node.address:
            return  # the node is starting
        details = ""
        with grpc.insecure_channel(node.address) as channel:
            stub = pb_grpc.DecodeNodeStub(channel) if kind == "decode" else pb_grpc.PrefillNodeStub(channel)
            try:
                for message in stub.Serve(iter(messages), timeout=WAIT_SECONDS):
                    events = getattr(message, "events", ())
                    bad = [event for event in events if event.released.stood or event.extended.lease_ms]
                    self.failures += [f"{node.name} obeyed a hostile stream: {event}" for event in bad]
                end = "OK"
            except grpc.RpcError as exc:
                end = "down" if exc.code() in DOWN else exc.code().name
                details = exc.details() or ""
        self.ends[f"{kind}: {end}"] += 1
        if end not in ("down", "OK" if len(messages) > 1 else "INVALID_ARGUMENT"):
            self.failures.append(f"{node.name} ended a hostile stream with {end}: {details}")
