"""A node whose own requests lack blocks takes leases of pulls back, and preempts only if that does not suffice."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from toy import reference
from toy_node import DEPTHS, Node

from pdserve.ipc.messages import FreeLease, LeaseCached, Mode
from pdserve.sampling_params import SamplingParams

ONE = SamplingParams(max_tokens=1)
FOUR = SamplingParams(max_tokens=4)
FIRST = [1] * 16  # prompt of four blocks that peers pull
SECOND = [2] * 16  # another one


@contextmanager
def node_of(num_blocks: int, depth: tuple[int, int] = (1, 1), **options: object) -> Iterator[Node]:
    """Yield a node that has served both prompts."""
    node = Node(num_blocks, *depth, **options)  # type: ignore[arg-type]
    for rid, prompt in enumerate((FIRST, SECOND), 1):
        node.submit(rid, prompt, ONE, Mode.LOCAL)
        node.run()
    yield node
    node.run()
    node.assert_all_free()
    node.close()


def pull(rid: int, prompt: list[int]) -> LeaseCached:
    return LeaseCached(rid=rid, token_ids=array("I", prompt).tobytes(), cache_salt="", skip_tokens=0)


def asked(node: Node, steps: int = 5) -> list[int]:
    """Return the rids whose leases the node asks for within some steps."""
    return [rid for _ in range(steps) for rid in node.step().revoke]


def give_back(node: Node, *rids: int) -> None:
    for rid in rids:
        node.obey(FreeLease(rid))


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
def test_running_sequences_get_the_blocks_of_a_pull_without_preemption(depth: tuple[int, int]) -> None:
    with node_of(10, depth) as node:
        node.submit(3, [3] * 10, SamplingParams(max_tokens=20), Mode.LOCAL)
        node.step()
        node.obey(pull(11, SECOND))
        assert asked(node, 50) == [11]
        num_steps = len(node.runner.launched)
        assert not asked(node)
        assert len(node.runner.launched) == num_steps, "the sequence waits for the end of the lease"
        give_back(node, 11)
        node.run()
        assert node.tokens[3, 0] == reference([3] * 10, 0, 20, ())
        assert node.scheduler.totals.preemptions == 0


def test_waiting_prompt_gets_the_blocks_of_the_youngest_pull() -> None:
    with node_of(10) as node:
        node.obey(pull(11, FIRST))
        node.obey(pull(12, SECOND))
        node.submit(3, [3] * 20, ONE, Mode.LOCAL)
        assert asked(node) == [12]
        give_back(node, 12)
        assert not asked(node)
        assert node.tokens[3, 0]
        give_back(node, 11)


def test_as_many_leases_are_asked_for_as_are_needed() -> None:
    with node_of(10) as node:
        node.obey(pull(11, FIRST))
        node.obey(pull(12, SECOND))
        node.submit(3, [3] * 28, ONE, Mode.LOCAL)
        assert sorted(asked(node)) == [11, 12]
        give_back(node, 11, 12)
        node.run()
        assert node.tokens[3, 0]


def test_a_lease_that_does_not_suffice_is_left_alone() -> None:
    """The blocks of a sequence that runs are needed, too: the prompt waits for its end."""
    with node_of(10) as node:
        node.submit(3, [3] * 14, FOUR, Mode.LOCAL)
        node.step()
        node.obey(pull(11, SECOND))
        node.submit(4, [4] * 34, ONE, Mode.LOCAL)
        assert not asked(node, 3)
        assert asked(node) == [11], "the sequence has ended"
        give_back(node, 11)


def test_a_lease_of_blocks_that_are_used_here_is_left_alone() -> None:
    """The blocks would not become free."""
    with node_of(10) as node:
        node.submit(3, [*SECOND, 3], SamplingParams(max_tokens=12), Mode.LOCAL)
        node.step()
        node.obey(pull(11, SECOND))
        node.submit(4, [4] * 16, ONE, Mode.LOCAL)
        assert not asked(node)
        give_back(node, 11)


def test_a_prompt_takes_no_lease_of_its_own_prefix_back() -> None:
    with node_of(10) as node:
        node.obey(pull(11, FIRST))
        node.obey(pull(12, SECOND))
        node.submit(3, SECOND + [3] * 10, ONE, Mode.LOCAL)
        assert asked(node) == [11]
        give_back(node, 11)
        assert not asked(node)
        assert node.tokens[3, 0]
        give_back(node, 12)


def test_all_leases_of_the_same_blocks_are_asked_for() -> None:
    with node_of(10) as node:
        for rid in (11, 12):
            node.obey(pull(rid, SECOND))
        node.submit(3, [3] * 28, ONE, Mode.LOCAL)
        assert sorted(asked(node)) == [11, 12]
        give_back(node, 11)
        assert not asked(node)
        give_back(node, 12)
        node.run()
        assert node.tokens[3, 0]


def test_the_lease_of_a_handoff_is_never_asked_for() -> None:
    with node_of(10) as node:
        node.submit(3, [3] * 16, ONE, Mode.LEASE)
        node.step()
        node.submit(4, [4] * 28, ONE, Mode.LOCAL)
        assert not asked(node, 20)
        give_back(node, 3)
        assert not asked(node)
        assert node.tokens[4, 0]


def test_an_end_that_crosses_the_request_for_a_lease_is_enough() -> None:
    """The reader's release was on its way."""
    with node_of(10) as node:
        node.submit(3, [3] * 28, ONE, Mode.LOCAL)
        node.obey(pull(11, SECOND))
        assert asked(node, 1) == [11]
        give_back(node, 11)
        assert not asked(node)
        assert node.tokens[3, 0]
        give_back(node, 11)


def test_slots_of_recurrent_state_are_taken_back() -> None:
    """The pool has blocks for all requests."""
    with node_of(64, state_slots=4) as node:
        node.obey(pull(11, FIRST))
        node.obey(pull(12, SECOND))
        node.submit(3, [3] * 10, SamplingParams(max_tokens=8), Mode.LOCAL)
        node.submit(4, [4] * 10, SamplingParams(max_tokens=8), Mode.LOCAL)
        node.submit(5, [5] * 10, SamplingParams(max_tokens=8), Mode.LOCAL)
        assert asked(node) == [12]
        give_back(node, 11, 12)
        node.run()
        assert node.tokens[5, 0] == reference([5] * 10, 0, 8, ())
