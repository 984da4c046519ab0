"""KV cache groups with sliding windows: pool, manager and handoffs, with a toy model that reads each group."""

from __future__ import annotations

import random
from array import array

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from scripted_world import STAGES, ScriptedJob, ScriptedWorld
from toy import reference
from toy_node import BATCH_TOKENS, BLOCK, Node

from engine.kv_cache.block_pool import BlockPool, Use
from pdserve.hashing import BlockHashes, root_hash
from pdserve.ipc.messages import FreeLease, Mode
from pdserve.kv.groups import NULL_BLOCK, KVCacheGroups, cut_into_groups, first_block, first_seen, window_blocks
from pdserve.sampling_params import SamplingParams

Windows = tuple[int | None, ...]
FULL_AND_WINDOW: Windows = (None, 6)
WINDOWS = st.lists(st.none() | st.integers(1, 40), min_size=1, max_size=4).map(
    lambda windows: (
        tuple(sorted(windows, key=lambda window: (window is not None, window or 0))) if any(windows) else (None,)
    )
)
DEPTHS = [(1, 1), (2, 1), (4, 3)]


# ---------------------------------------------------------------- groups


@given(st.lists(st.sampled_from([None, 128, 1024]), min_size=1, max_size=80), st.data())
def test_every_layer_has_a_place_of_its_own_in_each_stage(windows: list[int | None], draw: st.DataObject) -> None:
    groups = cut_into_groups(windows)
    cut = draw.draw(st.integers(0, len(windows)))
    for layers in (range(len(windows)), range(cut), range(cut, len(windows))):
        places = groups.places(layers)
        assert len(set(places)) == len(layers)
        assert all(index < groups.block_layers(layers) for _, index in places)
        if groups.layers:
            assert [groups.windows[group] for group, _ in places] == [windows[layer] for layer in layers]


@pytest.mark.parametrize(
    ("num_layers", "period", "num_full", "num_windowed", "size"),
    [
        (24, 2, 1, 1, 12),  # gpt-oss-20b
        (36, 2, 1, 1, 18),  # gpt-oss-120b
        (62, 6, 1, 6, 10),  # Gemma 3 27B
        (48, 6, 1, 5, 8),  # 12B
        (26, 6, 1, 6, 4),  # 1B
        (36, 4, 1, 3, 9),  # Ministral 8B
    ],
)
def test_groups_of_known_models(num_layers: int, period: int, num_full: int, num_windowed: int, size: int) -> None:
    windows = [None if (layer + 1) % period == 0 else 128 for layer in range(num_layers)]
    groups = cut_into_groups(windows)
    assert groups.windows == (None,) * num_full + (128,) * num_windowed
    assert groups.block_layers(range(num_layers)) == size
    assert groups.block_layers(range(num_layers // 2)) == -(-size // 2), "stages have about equal numbers of each group"


@pytest.mark.parametrize("window", [None, 4096])
def test_layers_of_one_kind_are_one_group(window: int | None) -> None:
    assert cut_into_groups([window] * 32) == KVCacheGroups((window,))


@given(st.integers(0, 200), st.integers(1, 60), st.integers(1, 9))
def test_kept_blocks_are_those_that_later_tokens_see(num_tokens: int, window: int, size: int) -> None:
    first = first_block(num_tokens, window, size)
    seen = range(max(0, num_tokens - window + 1), num_tokens)
    assert all(position // size >= first for position in seen)
    assert num_tokens - first * size <= window + 2 * size, "a window and two blocks at most"


# ---------------------------------------------------------------- prefix cache


@given(WINDOWS, st.integers(0, 12), st.data())
def test_match_is_the_longest_prefix_that_every_group_has(
    windows: Windows, num_blocks: int, draw: st.DataObject
) -> None:
    pool = BlockPool(64, BLOCK, KVCacheGroups(windows, tuple(range(len(windows)))))
    hashes = BlockHashes(BLOCK, root_hash("")).upto(array("I", range(num_blocks * BLOCK)), num_blocks * BLOCK)
    cached: dict[tuple[int, int], int] = {}
    for index, block_hash in enumerate(hashes):
        for group in range(len(windows)):
            if draw.draw(st.integers(0, 5)):
                block = (pool.take(1) or [])[0]
                pool.cache((block_hash,), (block,), group)
                cached[index, group] = block

    def has(count: int) -> bool:
        return all(
            (index, group) in cached
            for group, window in enumerate(windows)
            for index in range(first_seen(count * BLOCK, window, BLOCK), count)
        )

    longest = max(count for count in range(num_blocks + 1) if has(count))
    blocks = pool.match(iter(hashes))
    assert len(blocks) == longest * len(windows)
    for index in range(longest):
        for group, window in enumerate(windows):
            seen = index >= first_seen(longest * BLOCK, window, BLOCK)
            expected = cached[index, group] if seen else NULL_BLOCK
            assert blocks[index * len(windows) + group] == expected


def test_routers_are_told_of_the_blocks_of_the_first_group_only() -> None:
    pool = BlockPool(8, BLOCK, KVCacheGroups((None, 4), (0, 1)))
    blocks = pool.take(2) or []
    for group, block in enumerate(blocks):
        pool.cache((b"h",), (block,), group)
    assert pool.events.take() == ([b"h"], [])
    pool.drop(blocks, Use.HELD)
    pool.take(8)
    assert pool.events.take() == ([], [b"h"])


# ---------------------------------------------------------------- one node


@pytest.mark.parametrize("depth", DEPTHS)
@given(
    requests=st.lists(
        st.tuples(st.integers(1, 90), st.integers(1, 24), st.integers(1, 3), st.sampled_from([0, 1, 2])),
        min_size=1,
        max_size=10,
    ),
    windows=WINDOWS,
    spare=st.integers(0, 60),
    drafts=st.integers(0, 3),
)
@examples(30)
def test_local_requests_are_exact_under_preemption(
    depth: tuple[int, int], requests: list[tuple[int, int, int, int]], windows: Windows, spare: int, drafts: int
) -> None:
    """Chunks, shared prefixes, choices, drafts and too few blocks, in groups with any windows."""
    groups = KVCacheGroups(windows, tuple(range(len(windows))))
    longest = max(length + max_tokens for length, max_tokens, _, _ in requests)
    num_blocks = groups.blocks_for(longest + 1, BLOCK, max(BATCH_TOKENS, 8 * (1 + drafts))) + spare
    node = Node(num_blocks, *depth, windows=windows, max_drafts=drafts)
    expected = {}
    for rid, (length, max_tokens, n, shared) in enumerate(requests):
        prompt = [*range(length // 2), *([shared] * (length - length // 2))]
        node.submit(rid, prompt, SamplingParams(max_tokens=max_tokens, n=n), Mode.LOCAL)
        for choice in range(n):
            expected[rid, choice] = reference(prompt, choice, max_tokens)
    node.run()
    assert {key: node.tokens[key] for key in expected} == expected
    node.assert_all_free()
    node.close()


@pytest.mark.parametrize("windows", [FULL_AND_WINDOW, (None, 6, 6), (6,), (None, 5, 13)])
def test_a_sequence_holds_no_more_than_its_windows_need(windows: Windows) -> None:
    """Beside full groups: a window, the tokens of a step and two blocks; while it decodes, a window and two blocks."""
    node = Node(400, 2, windows=windows, max_num_seqs=1)
    prompt = list(range(200))
    node.submit(0, prompt, SamplingParams(max_tokens=60), Mode.LOCAL)
    length = 0
    while not node.engine.idle:
        held = node.step().status.held
        length = len(prompt) + len(node.tokens[0, 0])
        in_flight = 2 * BATCH_TOKENS if length == len(prompt) else 2
        blocks = -(-(length + 1) // BLOCK)
        most = [window_blocks(window, BLOCK, in_flight) if window else blocks for window in windows]
        assert held <= sum(most)
    assert length == 260
    assert node.tokens[0, 0] == reference(prompt, 0, 60)
    node.close()


def test_kv_memory_of_gpt_oss_at_100_000_tokens_is_within_5_percent_of_what_the_windows_need() -> None:
    """12 full layers and 12 with a window of 128: while it decodes, a sequence holds hardly more than 6,250 blocks."""
    groups = cut_into_groups([128 if layer % 2 == 0 else None for layer in range(24)])
    node = Node(14_000, 1, windows=groups.windows, max_num_seqs=1, full_step=8192, batch_tokens=8192)
    rng = random.Random(0)
    length = 100_000 // 4  # the toy's blocks have 4 tokens in place of 16: as many blocks
    prompt = [rng.randrange(900) for _ in range(length)]
    node.submit(0, prompt, SamplingParams(max_tokens=3), Mode.LOCAL)
    held = []
    while not node.engine.idle:
        held.append(node.step().status.held)
    needed = -(-length // BLOCK) + -(-128 // BLOCK)
    assert held[-2] <= 1.05 * needed
    assert node.tokens[0, 0] == reference(prompt, 0, 3)
    node.close()


def test_second_request_hits_the_prefix_cache_of_the_first() -> None:
    """The hit includes prompts whose first tokens are behind the window, and a repeated prompt."""
    node = Node(80, 2, windows=FULL_AND_WINDOW)
    prompt = list(range(40))
    for rid, tokens in enumerate([prompt, prompt, prompt[:22], [*prompt, 5, 6, 7]]):
        node.submit(rid, tokens, SamplingParams(max_tokens=2), Mode.LOCAL)
        before = node.scheduler.status().totals.prefix_cached_tokens
        node.run()
        hit = node.scheduler.status().totals.prefix_cached_tokens - before
        assert hit == [0, 36, 20, 40][rid]
        assert node.tokens[rid, 0] == reference(tokens, 0, 2)
    node.close()


# ---------------------------------------------------------------- handoffs


@pytest.mark.parametrize("depth", DEPTHS, ids=str)
@given(
    requests=st.lists(
        st.tuples(
            st.integers(1, 90),
            st.integers(1, 3),
            st.booleans(),
            st.sampled_from(["cancel", "give up", "break", "expire", "corrupt"]),
            st.sampled_from(["never", "never", *STAGES]),
            st.sampled_from([0, 0, 1, 9]),
            st.booleans(),
        ),
        min_size=1,
        max_size=6,
    ),
    windows=WINDOWS,
    checksum=st.booleans(),
    room=st.sampled_from([0, 10, 100]),
)
@examples(30)
def test_handoffs_are_exact_with_a_fault_at_any_stage(
    depth: tuple[int, int],
    requests: list[tuple[int, int, bool, str, str, int, bool]],
    windows: Windows,
    checksum: bool,
    room: int,
) -> None:
    """Parts, pulls, decode-ahead, choices and faults, with much and with little room; all blocks are free at the end.

    If P lacks room for further windows of several prompts, D computes one of them.
    """
    jobs = [
        ScriptedJob(
            [*range(length // 2), *([7 if shared else rid] * (length - length // 2))],
            SamplingParams(max_tokens=6, n=n),
            what="cancel" if what == "corrupt" and not checksum else what,
            when=when,
            ahead=ahead,
            pull=pull,
            done=4 if pull else 0,
            arrival=10 if pull else 0,
        )
        for rid, (length, n, shared, what, when, ahead, pull) in enumerate(requests)
    ]
    groups = KVCacheGroups(windows, tuple(range(len(windows))))
    blocks = groups.blocks_for(100, BLOCK, BATCH_TOKENS) + room
    world = ScriptedWorld(depth, (blocks, blocks), jobs, checksum=checksum, windows=windows)
    world.run()
    world.close()


@pytest.mark.parametrize("windows", [FULL_AND_WINDOW, (None, 6, 6), (6,)])
def test_blocks_behind_a_window_are_not_handed_off(windows: Windows) -> None:
    job = ScriptedJob(list(range(62)), SamplingParams(max_tokens=4))
    world = ScriptedWorld((1, 1), (200, 200), [job], windows=windows)
    most = 0
    world.d.submit(job)
    world._arrivals.clear()
    for _ in range(200):
        world._step()
        most = max(most, world.p.node.scheduler.status().leased)
        if world.at_rest:
            break
    num_full = windows.count(None)
    assert most == 16 * num_full + (len(windows) - num_full) * (16 - first_block(62, 6, BLOCK))
    assert world.d.node.runner.num_tokens == 3, "D computes its own tokens only"
    world.close()


def test_prompt_for_a_peer_is_refused_when_nothing_can_be_preempted_for_its_window() -> None:
    """The peer then computes the prompt. Leased blocks stay leased until the peer releases them."""
    node = Node(60, 1, windows=FULL_AND_WINDOW)
    node.submit(1, list(range(60)), SamplingParams(max_tokens=2), Mode.LEASE)
    batch = node.step()
    assert [leased.num_tokens for leased in batch.leased] == [BATCH_TOKENS]
    others = node.scheduler.pool.take(node.scheduler.pool.count(Use.FREE)) or []
    while not (batch := node.step()).refused:
        assert node.scheduler.status().running
    assert [(entry.rid, entry.kind) for entry in batch.refused] == [(1, "Overloaded")]
    assert node.scheduler.status().leased > 0
    node.scheduler.pool.drop(others, Use.HELD)
    node.obey(FreeLease(1))
    node.assert_all_free()
    node.close()
