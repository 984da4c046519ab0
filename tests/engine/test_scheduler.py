"""Whole requests through two engines, prefill and decode, with a real connector between them."""

from __future__ import annotations

from array import array
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toy import ToyRunner, reference

import connector
from engine.messages import Batch, Mode, StartRead, Submit
from engine.rank import Rank
from engine.scheduler import Scheduler
from pdserve.records import FinishReason, Peer, RankKV, Sample, SamplingParams

BLOCK = 4
_names = count()


class Node:
    """One engine without a process around it; ``turn`` is one pass of its step loop."""

    def __init__(self, num_blocks: int, *, max_num_seqs: int = 8, max_batch_tokens: int = 16) -> None:
        self.scheduler = Scheduler(
            num_blocks=num_blocks,
            block_size=BLOCK,
            max_num_seqs=max_num_seqs,
            max_batch_tokens=max_batch_tokens,
            max_waiting=100,
        )
        self.epoch = f"toy-{next(_names)}"
        runner = ToyRunner(num_blocks, BLOCK)
        self.connector = connector.build("local", self.epoch)
        self.kv: RankKV = self.connector.register(runner.kv_region, runner.kv_layout, lambda: None)
        self.rank = Rank(runner, self.connector)
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.finished: dict[tuple[int, int], FinishReason] = {}

    def submit(self, rid: int, prompt: list[int], sampling: SamplingParams, mode: Mode, skip: int = 0) -> None:
        message = Submit(rid, array("I", prompt).tobytes(), sampling, mode, skip_tokens=skip)
        self.scheduler.submit(message, list(prompt))

    def turn(self) -> Batch:
        plan = self.scheduler.plan()
        assert plan.num_tokens <= 16
        self.scheduler.apply(plan, self.rank.execute(plan))
        batch = self.scheduler.take_report() or Batch(self.scheduler.status())
        for output in batch.outputs:
            assert output.sample is not None
            self.tokens[output.rid, output.choice].append(output.sample.token_id)
            if output.finish:
                self.finished[output.rid, output.choice] = output.finish
        status = self.scheduler.status()
        assert status.free + status.held + status.leased + status.quarantined == status.total
        return batch

    def run(self, turns: int = 2000) -> None:
        for _ in range(turns):
            if self.scheduler.idle:
                return
            self.turn()
        raise AssertionError("the engine does not come to rest")

    def close(self) -> None:
        self.rank.close()


def assert_all_free(node: Node) -> None:
    status = node.scheduler.status()
    assert (status.free, status.waiting, status.reading, status.running) == (status.total, 0, 0, 0)


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 30), st.integers(1, 12), st.integers(1, 3), st.booleans()), min_size=1, max_size=12
    ),
    num_blocks=st.integers(12, 40),
)
@settings(max_examples=60, deadline=None)
def test_local_requests_are_exact_under_preemption(requests: list[tuple[int, int, int, bool]], num_blocks: int) -> None:
    """Chunked prefill, shared prefixes, n choices, too few blocks: every choice gets the reference's tokens."""
    node = Node(num_blocks)
    prompts = []
    for rid, (length, max_tokens, n, shared) in enumerate(requests):
        prompt = [7 if shared else rid] * length
        prompts.append(prompt)
        node.submit(rid, prompt, SamplingParams(max_tokens=max_tokens, n=n), Mode.LOCAL)
    node.run()
    for rid, (_, max_tokens, n, _) in enumerate(requests):
        for choice in range(n):
            assert node.tokens[rid, choice] == reference(prompts[rid], choice, max_tokens)
            assert node.finished[rid, choice] is FinishReason.LENGTH
    assert_all_free(node)
    node.close()


def test_the_second_request_finds_the_first_ones_prefix() -> None:
    node = Node(40)
    prompt = list(range(22))
    for rid in range(2):
        node.submit(rid, prompt, SamplingParams(max_tokens=2), Mode.LOCAL)
        node.run()
    assert node.scheduler.status().cached_tokens == 20
    assert node.tokens[0, 0] == node.tokens[1, 0] == reference(prompt, 0, 2)
    node.close()


def test_choices_share_their_prompts_blocks() -> None:
    node = Node(40, max_batch_tokens=16)
    node.submit(0, list(range(16)), SamplingParams(max_tokens=5, n=3), Mode.LOCAL)
    most = 0
    while not node.scheduler.idle:
        most = max(most, node.turn().status.held)
    assert most <= 4 + 3 * 2  # the prompt once, and two blocks for each choice's five tokens
    node.close()


def test_too_much_is_refused_at_once() -> None:
    node = Node(4)
    node.submit(0, [1] * 16, SamplingParams(max_tokens=1), Mode.LOCAL)
    for rid in range(1, 102):
        node.submit(rid, [1], SamplingParams(max_tokens=1), Mode.LOCAL)
    refused = {entry.rid: entry.kind for entry in node.turn().refused}
    assert refused == {0: "RequestTooLong", 101: "Overloaded"}
    node.run()
    assert_all_free(node)
    node.close()


@dataclass
class Fleet:
    """P and D and what a front does between them; ``fate`` decides per request what goes wrong, and where."""

    fates: dict[int, str]
    requests: dict[int, tuple[list[int], SamplingParams]]
    p: Node = field(default_factory=lambda: Node(48))
    d: Node = field(default_factory=lambda: Node(36))
    first: dict[int, tuple[Sample, ...]] = field(default_factory=dict)
    cancelled: set[int] = field(default_factory=set)
    skip: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.d.scheduler.transfers.connect(Peer("p", self.p.epoch, (self.p.kv,)))
        for rid, (prompt, sampling) in self.requests.items():
            self.d.submit(rid, prompt, sampling, Mode.HANDOFF)

    def fate(self, rid: int, stage: str) -> bool:
        if self.fates[rid] == f"cancel {stage}":
            self.d.scheduler.cancel(rid)
            self.cancelled.add(rid)
            return True
        if self.fates[rid] == f"give up {stage}":
            self.d.scheduler.prefill_locally(rid, self.first.get(rid, ()))
            return True
        return False

    def turn(self) -> None:
        batch = self.d.turn()
        for reserved in batch.reserved:
            if not self.fate(reserved.rid, "reserved"):
                prompt, sampling = self.requests[reserved.rid]
                self.skip[reserved.rid] = reserved.cached_tokens
                self.p.submit(reserved.rid, prompt, sampling, Mode.LEASE, reserved.cached_tokens)
        for ended in batch.reads:
            assert not ended.error
            self.p.scheduler.free_lease(ended.rid)
            if not self.fate(ended.rid, "read"):
                self.d.scheduler.kv_confirmed(ended.rid)
        batch = self.p.turn()
        for leased in batch.leased:
            outputs = [o for o in batch.outputs if o.rid == leased.rid]
            first = tuple(o.sample for o in sorted(outputs, key=lambda o: o.choice) if o.sample)
            self.first[leased.rid] = first
            for choice, sample in enumerate(first):
                self.d.tokens[leased.rid, choice].append(sample.token_id)
            if self.fate(leased.rid, "leased"):
                self.p.scheduler.cancel(leased.rid)
                continue
            self.d.scheduler.start_read(StartRead(leased.rid, self.p.epoch, leased.block_ids, first))
            if self.fate(leased.rid, "reading"):
                self.p.scheduler.free_lease(leased.rid)

    @property
    def idle(self) -> bool:
        d, p = self.d.scheduler, self.p.scheduler
        return d.idle and p.idle and not d.status().reading and not d.status().quarantined


FATES = ["fine"] + [
    f"{what} {stage}" for what in ("cancel", "give up") for stage in ("reserved", "leased", "reading", "read")
]


@given(
    requests=st.lists(
        st.tuples(st.integers(1, 24), st.integers(2, 10), st.integers(1, 3), st.booleans(), st.sampled_from(FATES)),
        min_size=1,
        max_size=8,
    )
)
@settings(max_examples=100, deadline=None)
def test_handoff_is_exact_whatever_goes_wrong(requests: list[tuple[int, int, int, bool, str]]) -> None:
    """Handed over, given up or cancelled at any stage: right tokens, and every block comes back on both sides."""
    fleet = Fleet(
        fates={rid: fate for rid, (*_, fate) in enumerate(requests)},
        requests={
            rid: ([7 if shared else rid] * length, SamplingParams(max_tokens=max_tokens, n=n))
            for rid, (length, max_tokens, n, shared, _) in enumerate(requests)
        },
    )
    for _ in range(3000):
        fleet.turn()
        if fleet.idle:
            break
    for rid, (prompt, sampling) in fleet.requests.items():
        for choice in range(sampling.n):
            expected = reference(prompt, choice, sampling.max_tokens)
            if rid in fleet.cancelled:
                assert fleet.d.tokens[rid, choice] == expected[: len(fleet.d.tokens[rid, choice])]
            else:
                assert fleet.d.tokens[rid, choice] == expected, (rid, choice, fleet.fates[rid])
    assert_all_free(fleet.d)
    assert_all_free(fleet.p)
    fleet.p.close()
    fleet.d.close()


def test_a_peer_that_names_too_few_blocks_is_not_believed() -> None:
    node = Node(16)
    node.submit(0, [1] * 10, SamplingParams(max_tokens=3), Mode.HANDOFF)
    assert [r.rid for r in node.turn().reserved] == [0]
    node.scheduler.start_read(StartRead(0, "nobody", (1, 2), (Sample(5),)))
    (ended,) = node.turn().reads
    assert "2 blocks where 3" in ended.error
    node.scheduler.prefill_locally(0, ())
    node.run()
    assert node.tokens[0, 0] == reference([1] * 10 + [5], 0, 2)  # P's first token stands
    assert_all_free(node)
    node.close()


@pytest.mark.parametrize("stage", ["waiting", "running"])
def test_cancel_gives_everything_back(stage: str) -> None:
    node = Node(16)
    node.submit(0, [1] * 10, SamplingParams(max_tokens=30, n=2), Mode.LOCAL)
    for _ in range({"waiting": 0, "running": 4}[stage]):
        node.turn()
    node.scheduler.cancel(0)
    node.run()
    assert_all_free(node)
    node.close()
