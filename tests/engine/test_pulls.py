"""Pulls: D reads what P has cached of a request, P computes nothing, and D computes the rest."""

from __future__ import annotations

import time
from array import array
from typing import Any

import pytest
from scripted_world import ScriptedJob, ScriptedWorld
from test_itl_target import Model, add_prompts, node_with_streams, run_until
from toy import reference
from toy_node import BLOCK, DEPTHS, Node, long_step, wait_until

from pdserve.ipc.messages import (
    Connect,
    FreeLease,
    KVConfirmed,
    LeaseCached,
    Leased,
    Mode,
    PrefillLocally,
    StartRead,
)
from pdserve.records import Peer
from pdserve.sampling_params import SamplingParams

each_depth = pytest.mark.parametrize("depth", DEPTHS, ids=str)
PROMPT = list(range(100, 130))
PEER = 99  # rid of a pull


def pull(prompt: list[int], skip: int = 0, salt: str = "") -> LeaseCached:
    return LeaseCached(rid=PEER, token_ids=array("I", prompt).tobytes(), cache_salt=salt, skip_tokens=skip)


def node_with(prompt: list[int], num_blocks: int = 64, kv_checksum: bool = False) -> Node:
    """Return a node that has served a prompt."""
    node = Node(num_blocks, 1, kv_checksum=kv_checksum)
    node.submit(1, prompt, SamplingParams(max_tokens=1), Mode.LOCAL)
    node.run()
    return node


# ---------------------------------------------------------------- P


@pytest.mark.parametrize(("skip", "salt", "num_blocks"), [(0, "", 7), (8, "", 5), (28, "", 0), (0, "other", 0)])
def test_cached_blocks_are_leased_at_once_and_nothing_is_computed(skip: int, salt: str, num_blocks: int) -> None:
    node = node_with(PROMPT)
    num_steps = len(node.runner.launched)
    node.obey(pull(PROMPT, skip, salt))
    assert node.scheduler.status().leased == num_blocks
    (leased,) = node.step().leased
    assert (leased.rid, len(leased.block_ids), leased.last) == (PEER, num_blocks, True)
    assert leased.num_tokens == (28 if not salt else 0)
    assert len(node.runner.launched) == num_steps
    node.obey(FreeLease(PEER))
    node.assert_all_free()
    node.close()


def test_leased_blocks_are_not_evicted_and_the_others_are() -> None:
    """A prompt that needs every block waits for the lease."""
    node = node_with(PROMPT, num_blocks=8)
    node.obey(pull(PROMPT[:16]))
    node.submit(2, [5] * 30, SamplingParams(max_tokens=1), Mode.LOCAL)
    node.run()
    assert not node.tokens[2, 0]
    node.obey(FreeLease(PEER))
    node.run()
    assert node.tokens[2, 0]
    node.obey(pull(PROMPT))
    assert node.step().leased == [Leased(PEER, (), 0, True)]
    node.close()


def test_announcement_waits_for_digests() -> None:
    node = node_with(PROMPT, kv_checksum=True)
    node.obey(pull(PROMPT))
    assert node.scheduler.status().leased == 7
    parts = [leased for _ in range(3) for leased in node.step().leased]
    assert [len(part.digests) for part in parts] == [7]
    assert not any(plan.num_tokens for plan in node.runner.launched[-1:])
    node.close()


def test_pull_that_ends_before_its_digests_announces_nothing() -> None:
    node = node_with(PROMPT, kv_checksum=True)
    node.obey(pull(PROMPT))
    node.obey(FreeLease(PEER))
    assert not any(node.step().leased for _ in range(3))
    node.assert_all_free()
    node.close()


def test_pull_is_answered_while_a_long_step_executes() -> None:
    node = Node(64, 2, seconds=lambda plan: 1000.0)
    node.submit(0, [0] * 4, SamplingParams(max_tokens=100), Mode.LOCAL)
    node.submit(1, PROMPT, SamplingParams(max_tokens=1), Mode.LOCAL)
    for _ in range(8):
        node.step()  # measures what steps take
    with long_step(node):
        node.send(pull(PROMPT))
        wait_until(lambda: any(batch.leased for batch in node.received()))
    node.close()


# ---------------------------------------------------------------- both nodes


@each_depth
@pytest.mark.parametrize("checksum", [False, True], ids=["", "checksum"])
@pytest.mark.parametrize("done", [1, 3, 4, 8])
def test_moved_stream_computes_at_most_a_block(depth: tuple[int, int], checksum: bool, done: int) -> None:
    max_tokens = 12
    job = ScriptedJob(PROMPT, SamplingParams(max_tokens=max_tokens), done=done, pull=True, arrival=40)
    world = ScriptedWorld(depth, (96, 72), [job], checksum=checksum)
    world.run()
    assert world.p.node.runner.num_tokens == len(PROMPT) + max_tokens - 1, "P has computed its own answer only"
    at_move = world.d.node.runner.num_tokens - (max_tokens - done - 1)  # before the first new token
    assert at_move == (len(PROMPT) + done - 1) % BLOCK + 1
    world.close()


@each_depth
@pytest.mark.parametrize("n", [1, 3])
def test_new_prompt_is_pulled_except_for_its_last_block(depth: tuple[int, int], n: int) -> None:
    job = ScriptedJob(PROMPT, SamplingParams(max_tokens=1, n=n), pull=True, arrival=40)
    world = ScriptedWorld(depth, (96, 72), [job])
    world.run()
    assert world.d.node.runner.num_tokens == len(PROMPT) % BLOCK
    world.close()


@each_depth
def test_choices_are_pulled_as_far_as_their_prompt(depth: tuple[int, int]) -> None:
    job = ScriptedJob(PROMPT, SamplingParams(max_tokens=8, n=3), done=5, pull=True, arrival=40)
    world = ScriptedWorld(depth, (96, 72), [job])
    world.run()
    assert world.d.node.rank.num_reads == 1
    world.close()


@each_depth
def test_stream_that_p_has_not_cached_is_computed_on_d(depth: tuple[int, int]) -> None:
    job = ScriptedJob(PROMPT, SamplingParams(max_tokens=12), done=4, pull=True, arrival=40)
    world = ScriptedWorld(depth, (96, 72), [job])
    for _ in range(39):
        world._step()
    world.p.node.scheduler.forget_cached()
    num_tokens = world.p.node.runner.num_tokens
    world.run()
    assert world.d.node.rank.num_reads == 0
    assert world.d.node.runner.num_tokens == len(PROMPT) + 11
    assert world.p.node.runner.num_tokens == num_tokens
    world.close()


# ---------------------------------------------------------------- P, which pulls a prefix before it computes a prompt

KINDS = {
    "": {},
    "checksum": {"kv_checksum": True},
    "windows": {"windows": (None, 8)},
    "states": {"state_slots": 24},
}


class Pulling:
    """A source that has served a prompt, and P, which has reserved blocks for the prompt and its continuation."""

    def __init__(self, depth: tuple[int, int] = (2, 1), **kind: Any) -> None:
        self.source = Node(64, *depth, **kind)
        self.p = Node(64, *depth, **kind)
        self.source.submit(1, PROMPT, SamplingParams(max_tokens=10), Mode.LOCAL)
        self.source.run()
        self.turn = [*PROMPT, *self.source.tokens[1, 0], 7, 8, 9]
        self.p.obey(Connect(Peer("source", self.source.epoch, (self.source.kv,))))
        self.p.submit(PEER, self.turn, SamplingParams(max_tokens=1), Mode.PULL_AND_LEASE)
        (reserved,) = [reservation for _ in range(3) for reservation in self.p.step().reserved]
        assert reserved.cached_tokens == 0

    def read(self) -> int:
        """Read what the source has cached; return the number of tokens."""
        self.source.obey(pull(self.turn[:-1]))
        (leased,) = [lease for _ in range(4) for lease in self.source.step().leased]
        order = StartRead(
            PEER, self.source.epoch, leased.block_ids, leased.num_tokens, leased.digests, leased.state_slot, pull=True
        )
        self.p.obey(order)
        waits = {"reads", "checked"} if leased.digests else {"reads"}
        while waits:
            batch = self.p.step()
            waits = {name for name in waits if not getattr(batch, name)}
            assert not any(check.num_corrupt for check in batch.checked)
            time.sleep(0.001)
        self.source.obey(FreeLease(PEER))
        return leased.num_tokens

    def finish(self) -> None:
        """Compute the rest. P leases all of the prompt with its KV."""
        parts: list[Leased] = []
        while not any(part.last for part in parts):
            parts += self.p.step().leased
        if not self.p.scheduler.pool.groups.has_windows:
            assert self.p.kv_of(parts) == self.turn
        assert self.p.tokens[PEER, 0] == reference(self.turn, 0, 1)
        self.p.obey(FreeLease(PEER))
        self.close()

    def close(self) -> None:
        for node in (self.source, self.p):
            node.run()
            node.assert_all_free()
            node.close()


@each_depth
@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
def test_p_computes_what_a_pull_has_not_brought(depth: tuple[int, int], kind: dict[str, Any]) -> None:
    """Blocks that were read are leased like computed blocks, and are in P's prefix cache."""
    world = Pulling(depth, **kind)
    num_tokens = world.read()
    assert num_tokens >= 28  # the state is that after the prompt's last full block
    world.p.obey(KVConfirmed(PEER, num_tokens, ()))
    assert world.p.runner.num_tokens == 0
    world.finish()
    assert world.p.runner.num_tokens == len(world.turn) - num_tokens


@pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("has_read", [False, True])
def test_p_computes_the_whole_prompt_after_a_failed_pull(has_read: bool, kind: dict[str, Any]) -> None:
    world = Pulling(**kind)
    if has_read:
        world.read()
    world.p.obey(PrefillLocally(PEER))
    world.finish()
    assert world.p.runner.num_tokens == len(world.turn)


def test_p_computes_the_prompt_if_the_source_has_nothing() -> None:
    world = Pulling()
    world.p.obey(KVConfirmed(PEER, 0, ()))
    world.finish()


def test_cancelled_pull_holds_nothing() -> None:
    world = Pulling()
    world.read()
    world.p.obey(FreeLease(PEER))
    world.close()


def test_prompt_that_lacks_blocks_during_a_pull_is_not_refused() -> None:
    """A pull waits for no prompt of another node, so these two cannot wait for each other."""
    world = Pulling()
    long = [5] * 230
    world.p.submit(100, long, SamplingParams(max_tokens=1), Mode.LEASE)
    assert not any(world.p.step().refused for _ in range(3))
    world.p.obey(KVConfirmed(PEER, world.read(), ()))
    world.p.run()
    world.p.obey(FreeLease(PEER))
    world.p.run()
    assert [world.p.tokens[rid, 0] for rid in (PEER, 100)] == [reference(p, 0, 1) for p in (world.turn, long)]
    world.p.obey(FreeLease(100))
    world.close()


# ---------------------------------------------------------------- D


def confirm_pull(node: Node, prompt: list[int], output: list[int], num_tokens: int) -> None:
    """Pull the first ``num_tokens`` tokens of a stream."""
    node.submit(9, prompt, SamplingParams(max_tokens=30), Mode.HANDOFF, client=1, resume={0: output})
    node.step()
    node.obey(StartRead(9, "unknown", tuple(range(num_tokens // BLOCK)), num_tokens))  # fails; its end is what matters
    while not node.step().reads:
        time.sleep(0.01)  # the connector's thread reports it
    node.obey(KVConfirmed(9, num_tokens, ()))


@pytest.mark.parametrize("output", [[1], [1, 2]], ids=["one token", "two tokens"])
def test_prompts_pause_for_a_pulled_stream(output: list[int]) -> None:
    """The next step computes the stream's last block, which begins in its prompt, and no chunk of a prompt."""
    model = Model()
    node = node_with_streams(model, (1, 1))
    add_prompts(node, 3000)
    for _ in range(8):
        node.step()
    confirm_pull(node, [9] * 6, output, 4)
    model.steps.clear()
    node.step()
    assert list(model.steps[0].chunks.values()) == [2 + len(output)]
    assert node.tokens[9, 0]
    node.close()


def test_stream_of_which_little_was_cached_is_computed_as_a_prompt() -> None:
    model = Model()
    node = node_with_streams(model, (1, 1))
    add_prompts(node, 3000)
    for _ in range(8):
        node.step()
    confirm_pull(node, [9] * 600, [1, 2], 4)
    while not node.tokens[9, 0]:
        node.step()
    seconds = max(step.seconds for step in model.steps)
    assert seconds <= 1.02 * node.scheduler.status().itl_target
    node.close()


def test_pull_that_finds_nothing_continues_with_what_is_cached_here() -> None:
    """The next step computes its last tokens."""
    model = Model()
    node = node_with_streams(model, (1, 1))
    node.submit(8, PROMPT, SamplingParams(max_tokens=1), Mode.LOCAL)
    run_until(node, 8)
    add_prompts(node, 3000)
    for _ in range(8):
        node.step()
    node.submit(9, PROMPT, SamplingParams(max_tokens=6), Mode.HANDOFF, resume={0: [1, 2]})
    node.step()
    node.obey(KVConfirmed(9, 0, ()))
    model.steps.clear()
    node.step()
    assert list(model.steps[0].chunks.values()) == [4]
    assert node.tokens[9, 0]
    node.close()
