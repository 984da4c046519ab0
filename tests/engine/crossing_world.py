"""Two nodes that prefill and decode, each for the other, on few KV blocks. Messages are neither lost nor reordered."""

from __future__ import annotations

import time
from collections.abc import Sequence

from lease_sides import DecodeSide, Job, PrefillSide
from toy_node import Node

from pdserve.pb import pdserve_pb2 as pb

TICK = 0.01  # seconds per step


class BothSides:
    """Both roles on one engine."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.prefill = PrefillSide(node)
        self.decode = DecodeSide(node)

    def step(self, now: float) -> None:
        batch = self.node.step()
        self.prefill.take(batch, now)
        for rid in list(self.prefill.to_revoke):
            self.prefill.revoke(rid)
        self.decode.take(batch, now)
        self.decode.tick(now)


class CrossingWorld:
    """Nodes A and B. A request to one of them is handed off to the other."""

    def __init__(self, depth: tuple[int, int], num_blocks: int, max_num_seqs: int = 8) -> None:
        self.sides = [BothSides(Node(num_blocks, *depth, max_num_seqs=max_num_seqs)) for _ in "AB"]
        self.now = 0.0
        for side, other in zip(self.sides, reversed(self.sides), strict=True):
            side.decode.connect(other.prefill)

    def run(self, arrivals: Sequence[tuple[int, int, Job]]) -> None:
        """Run requests, given as (step of arrival, index of their node, job), to their end."""
        waiting = sorted(arrivals, key=lambda arrival: arrival[0])
        for step in range(1500):
            while waiting and waiting[0][0] <= step:
                _, index, job = waiting.pop(0)
                self.sides[index].decode.submit(job)
            for index, side in enumerate(self.sides):
                side.step(self.now)
                self._deliver(index)
            if not waiting and self._at_rest:
                break
            if all(side.node.engine.idle for side in self.sides):
                time.sleep(0.0005)  # the connector's thread may be copying: no time passes in this world
            else:
                self.now += TICK
        else:
            waits = [side.node.scheduler.status() for side in self.sides]
            raise AssertionError(f"the nodes wait for each other: {waits}")
        for side in self.sides:
            side.decode.assert_served()
            side.node.assert_all_free()

    def close(self) -> None:
        for side in self.sides:
            side.node.close()

    @property
    def _at_rest(self) -> bool:
        statuses = [side.node.scheduler.status() for side in self.sides]
        busy = any(status.waiting or status.held or status.leased or status.quarantined for status in statuses)
        return not busy and all(side.node.engine.idle for side in self.sides)

    def _deliver(self, index: int) -> None:
        """Deliver what a node has sent to its peer, and what the peer has sent to it."""
        decode = self.sides[index].decode
        peer = self.sides[1 - index].prefill
        while decode.sent or any(call.events for call in decode.calls.values()):
            for request in [decode.sent.pop(0) for _ in decode.sent[:]]:
                match request.message:
                    case None:
                        peer.prefill(request.call)
                    case pb.ExtendRequest(ask=ask):
                        lease_ms = int(peer.table.extend(request.call.lease, self.now) * 1000)
                        extended = pb.Extended(ask=ask, lease_ms=lease_ms)
                        decode.on(request.call, pb.PrefillEvent(extended=extended), self.now)
                    case pb.ReleaseRequest():
                        released = pb.Released(stood=peer.release(request.call.lease))
                        decode.on(request.call, pb.PrefillEvent(released=released), self.now)
            for call in list(decode.calls.values()):
                while call.events:
                    decode.receive(call, call.events.popleft(), self.now)
