"""The block pool counts every block once and prefers adjacent blocks."""

from __future__ import annotations

from array import array

from hypothesis import given
from hypothesis import strategies as st

from engine.kv_cache.block_pool import BlockPool, Use
from engine.kv_cache.free_runs import FreeRuns
from pdserve.hashing import BlockHashes, hash_block_tokens, root_hash


@given(st.lists(st.tuples(st.booleans(), st.integers(1, 12)), max_size=60))
def test_free_runs_behave_like_a_set(actions: list[tuple[bool, int]]) -> None:
    runs = FreeRuns(40)
    free = set(range(40))
    taken = []
    for take, count in actions:
        if take and count <= len(free):
            blocks = runs.take(count)
            assert len(blocks) == len(set(blocks)) == count
            assert set(blocks) <= free
            free -= set(blocks)
            taken += blocks
        elif not take:
            for block in taken[:count]:
                runs.add(block)
                free.add(block)
            del taken[:count]
        assert len(runs) == len(free)


def test_fitting_run_is_allocated_whole() -> None:
    runs = FreeRuns(32)
    first = runs.take(10)
    runs.take(10)
    for block in first:
        runs.add(block)
    assert runs.take(10) == first
    assert runs.take(12) == list(range(20, 32))


def test_growth_prefers_the_next_block() -> None:
    pool = BlockPool(16)
    ours = pool.take(3)
    theirs = pool.take(1, after=None)
    assert ours is not None
    assert theirs is not None
    pool.drop(theirs, Use.HELD)
    assert pool.take(2, after=ours[-1]) == [ours[-1] + 1, ours[-1] + 2]


def test_cached_blocks_are_found_until_they_are_evicted() -> None:
    pool = BlockPool(4)
    blocks = pool.take(3)
    assert blocks is not None
    hashes = BlockHashes(2, root_hash("")).upto(array("I", [1, 2, 3, 4, 5, 6]), 6)
    for block_hash, block in zip(hashes, blocks, strict=True):
        pool.cache((block_hash,), (block,))
    pool.drop(blocks, Use.HELD)
    assert pool.count(Use.FREE) == 4
    assert pool.match(hashes) == blocks
    assert pool.take(2) is not None  # one unused, one evicted: the end of the prefix goes first
    assert pool.match(hashes) == blocks[:2]
    pool.hold(blocks[:2])
    assert pool.take(1) is None
    assert pool.count(Use.HELD) == 4


def test_salts_keep_prefixes_apart() -> None:
    tokens = array("I", range(8))
    assert BlockHashes(4, root_hash("a")).upto(tokens, 8) != BlockHashes(4, root_hash("b")).upto(tokens, 8)
    assert BlockHashes(4, root_hash("a")).upto(tokens, 8) == BlockHashes(4, root_hash("a")).upto(tokens, 8)
    assert hash_block_tokens(root_hash(""), array("I", [1, 2])) != hash_block_tokens(root_hash(""), array("I", [2, 1]))


@given(
    st.lists(st.tuples(st.sampled_from(["take", "hold", "share", "lease", "quarantine", "drop"]), st.integers(0, 30)))
)
def test_every_block_is_counted_once(actions: list[tuple[str, int]]) -> None:
    """free + held + leased + quarantined = total always holds, and all blocks become free."""
    pool = BlockPool(12)
    uses: list[tuple[list[int], Use]] = []
    for name, number in actions:
        if name == "take":
            blocks = pool.take(number % 5 + 1)
            if blocks is not None:
                uses.append((blocks, Use.HELD))
        elif uses:
            blocks, use = uses[number % len(uses)]
            if name == "hold":
                pool.hold(blocks)
                uses.append((blocks, Use.HELD))
            elif name == "share":
                pool.lease(blocks)
                uses.append((blocks, Use.LEASED))
            elif name == "drop":
                uses.remove((blocks, use))
                pool.drop(blocks, use)
            elif use is Use.HELD:
                target = Use.LEASED if name == "lease" else Use.QUARANTINED
                uses[uses.index((blocks, use))] = (blocks, target)
                pool.move(blocks, use, target)
        used = {block for blocks, _ in uses for block in blocks}
        assert pool.count(Use.FREE) == 12 - len(used)
        for use in (Use.HELD, Use.LEASED, Use.QUARANTINED):
            strongest = {b for b in used if use is max(u for blocks, u in uses if b in blocks)}
            assert pool.count(use) == len(strongest)
    for blocks, use in uses:
        pool.drop(blocks, use)
    assert pool.count(Use.FREE) == pool.total
