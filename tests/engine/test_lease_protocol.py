"""Leases and handoffs under random faults of network, clocks, nodes and clients. See docs/leases.md."""

from __future__ import annotations

import pytest
from fast_set import examples
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from lease_sides import Call, Request
from lease_world import World
from toy_node import DEPTHS

picks = st.integers(0, 7)  # index into the present requests, replies, calls or reads, modulo their number


class LeaseProtocol(RuleBasedStateMachine):
    """World checks the invariants after each event."""

    world: World

    @initialize(depth=st.sampled_from(DEPTHS), rate=st.sampled_from([1.0, 0.7, 1.5, 0.01]))
    def start(self, depth: tuple[int, int], rate: float) -> None:
        self.world = World(depth, rate)

    # ------------------------------------------------------------ events without faults

    @rule(length=st.integers(3, 40), shared=st.booleans(), max_tokens=st.integers(2, 4))
    def submit(self, length: int, shared: bool, max_tokens: int) -> None:
        self.world.submit(length, shared, max_tokens)

    @rule(length=st.integers(1, 30), max_tokens=st.integers(2, 12), done=st.integers(0, 8), beside=st.integers(0, 3))
    def move(self, length: int, max_tokens: int, done: int, beside: int) -> None:
        self.world.move(length, max_tokens, done, beside)

    @rule(length=st.integers(1, 16), output=st.integers(1, 8), more=st.integers(1, 8), beside=st.integers(0, 3))
    def pull_prefix(self, length: int, output: int, more: int, beside: int) -> None:
        self.world.pull_prefix(length, output, more, beside)

    @rule(steps=st.sampled_from([1, 2, 6]))
    def step(self, steps: int) -> None:
        self.world.step(steps)

    @rule(steps=st.integers(1, 3))
    def step_and_deliver(self, steps: int) -> None:
        for _ in range(steps):
            self.world.step()
            self.world.deliver_all()

    @precondition(lambda self: self.world.requests)
    @rule(pick=picks)
    def deliver(self, pick: int) -> None:
        self.world.deliver(self._request(pick))

    @precondition(lambda self: self.world.replies)
    @rule(pick=picks)
    def answer(self, pick: int) -> None:
        self.world.answer(self.world.replies[pick % len(self.world.replies)])

    @precondition(lambda self: self._with_events)
    @rule(pick=picks, events=st.integers(1, 4))
    def announce(self, pick: int, events: int) -> None:
        call = self._with_events[pick % len(self._with_events)]
        for _ in range(min(events, len(call.events))):
            self.world.announce(call)

    @precondition(lambda self: self._reads)
    @rule(pick=picks, blocks=st.integers(1, 12))
    def land(self, pick: int, blocks: int) -> None:
        read_id = self._reads[pick % len(self._reads)]
        for _ in range(blocks):
            if read_id in self._reads:
                self.world.land(read_id)

    @precondition(lambda self: self.world.p.to_revoke)
    @rule(pick=picks)
    def revoke(self, pick: int) -> None:
        rids = self.world.p.to_revoke
        self.world.revoke(rids[pick % len(rids)])

    @rule(seconds=st.sampled_from([0.1, 1.0, 2.6, 4.5]), p_ticks=st.booleans(), d_ticks=st.booleans())
    def wait(self, seconds: float, p_ticks: bool, d_ticks: bool) -> None:
        """Let time pass; each node checks its clock now or later."""
        self.world.wait(seconds)
        if p_ticks:
            self.world.tick_p()
        if d_ticks:
            self.world.tick_d()

    # ------------------------------------------------------------ faults

    @precondition(lambda self: self._unary)
    @rule(pick=picks)
    def deliver_twice(self, pick: int) -> None:
        self.world.deliver(self._unary[pick % len(self._unary)], again=True)

    @precondition(lambda self: self.world.requests)
    @rule(pick=picks)
    def drop(self, pick: int) -> None:
        request = self._request(pick)
        if request.kind != "close":  # P always notices the end of a call
            self.world.drop(request)

    @precondition(lambda self: self.world.replies)
    @rule(pick=picks)
    def drop_answer(self, pick: int) -> None:
        self.world.drop_answer(self.world.replies[pick % len(self.world.replies)])

    @precondition(lambda self: self.world.calls)
    @rule(pick=picks, arrived=st.integers(0, 3))
    def break_call(self, pick: int, arrived: int) -> None:
        self.world.break_call(self.world.calls[pick % len(self.world.calls)], arrived)

    @precondition(lambda self: self._reads)
    @rule(pick=picks)
    def fail(self, pick: int) -> None:
        self.world.fail(self._reads[pick % len(self._reads)])

    @precondition(lambda self: self.world.d.wanted)
    @rule(pick=picks)
    def cancel(self, pick: int) -> None:
        rids = self.world.d.wanted
        self.world.cancel(rids[pick % len(rids)])

    @rule()
    def reconnect(self) -> None:
        self.world.reconnect()

    @rule(chance=st.integers(0, 3))
    def restart_p(self, chance: int) -> None:
        if not chance:  # restarts are rarer than other faults
            self.world.restart_p()

    @rule(chance=st.integers(0, 3))
    def restart_d(self, chance: int) -> None:
        if not chance:
            self.world.restart_d()

    @precondition(lambda self: self.world.d.jobs)
    @rule(pick=picks)
    def claim(self, pick: int) -> None:
        """A hostile stream names one of D's prompts."""
        rids = list(self.world.d.jobs)
        self.world.claim(rids[pick % len(rids)])

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.world.settle()
            self.world.close()

    # ------------------------------------------------------------ choices

    def _request(self, pick: int) -> Request:
        return self.world.requests[pick % len(self.world.requests)]

    @property
    def _unary(self) -> list[Request]:
        return [request for request in self.world.requests if request.kind in ("extend", "release")]

    @property
    def _with_events(self) -> list[Call]:
        return [call for call in self.world.calls if call.events]

    @property
    def _reads(self) -> list[int]:
        return list(self.world.transfers)


TestLeaseProtocol = pytest.mark.timeout(400)(LeaseProtocol.TestCase)  # shrinking a failure takes a while
TestLeaseProtocol.settings = settings(examples(80), stateful_step_count=80)
