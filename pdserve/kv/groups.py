"""KV cache groups: which layers share a block table, and which blocks of a sequence each group keeps.

Layers with a sliding window need the KV of the last tokens only. So layers of equal spec and equal window form groups
of equal size, and each group has its own block table. A block holds some tokens in the layers of one group. Blocks of
all groups have the same number of bytes: there is one pool, one region and one stride.

Layers with other KV heads form groups of their own. A block has room for fewer of the larger layers.

    gpt-oss, 24 layers               full 1 3 5 …       [ 12 layers ]    all blocks are kept
                                     window 0 2 4 …     [ 12 layers ]    blocks behind the window are freed
    Gemma 3 27B, 62 layers           full 5 11 17 …     [ 10 layers ]
                                     window 0 1 2 …     [ 10 layers ] × 6, of which two have 8, and padding
    Gemma 4 26B, 30 layers           full 5 11 17 …     [ 5 layers of 2 heads × 512 ]        and room for one more
                                     window 0 1 2 …     [ 3 layers of 8 heads × 256 ] × 9, of which two have 2

A sequence has one flat list of blocks: the entry of logical block i in group g is at ``i * num_groups + g``. It is
``NULL_BLOCK`` where the group keeps no block. With one group it is the usual list.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import msgspec

from pdserve.errors import ConfigError

NULL_BLOCK = -1  # in lists of block ids: the group keeps no block there; attention reads none of its tokens

# Costs in layers with a window. Padding in a full group takes memory for all tokens, elsewhere for a window only. A
# group more takes time on hosts and makes blocks smaller.
_FULL_LAYER = 8
_GROUP = 2

Windows = tuple[int | None, ...]  # tokens, per group; None: attention to all tokens
Pair = tuple[int, int]  # a logical block of a sequence, and a group


class KVHeads(msgspec.Struct, frozen=True, order=True):
    """The KV heads of a layer."""

    num_kv_heads: int  # the model's, or a rank's
    head_dim: int  # elements

    def __str__(self) -> str:
        return f"{self.num_kv_heads} KV heads × {self.head_dim}"

    @property
    def size(self) -> int:
        """Elements of one token in one plane."""
        return self.num_kv_heads * self.head_dim


class KVCacheGroups(msgspec.Struct, frozen=True):
    """The groups of a model. Full groups come first. Without ``layers``, one group has them all.

    With ``heads``, groups have unlike KV heads. Shares and layouts then count the heads of the finest group, which has
    most. The number of heads of each group divides that number, so heads of the finest group name the heads of all.
    """

    windows: Windows = (None,)
    layers: tuple[int, ...] = ()  # the group of each layer of the model
    heads: tuple[KVHeads, ...] = ()  # the model's, per group; empty: all groups have the heads of the layout

    def __post_init__(self) -> None:
        groups = len(self.windows)
        if not groups or any(window is not None and window < 1 for window in self.windows):
            raise ConfigError(f"windows {self.windows} of KV cache groups: each must be at least 1 token, or none")
        if groups > 1 and not self.has_windows and not self.heads:
            raise ConfigError(f"{groups} KV cache groups without a window; layers that keep all tokens are one group")
        if groups > 1 and sorted(set(self.layers)) != list(range(groups)):
            raise ConfigError(f"layers are in KV cache groups {sorted(set(self.layers))}; there are {groups} groups")
        if self.heads:
            self._check_heads()

    def _check_heads(self) -> None:
        if len(self.heads) != self.num_groups or self.num_groups < 2:
            raise ConfigError(f"{len(self.heads)} KV heads of {self.num_groups} KV cache groups; give one per group")
        most = max(heads.num_kv_heads for heads in self.heads)
        for heads in self.heads:
            if min(heads.num_kv_heads, heads.head_dim) < 1 or most % heads.num_kv_heads:
                raise ConfigError(
                    f"KV cache groups have {' and '.join(map(str, self.heads))}; each number must be at least 1, and "
                    f"each number of heads divide {most}"
                )

    def __str__(self) -> str:
        counts = Counter(self.layers)
        sizes = [f"{counts[group]} layers of {window or 'full'}" for group, window in enumerate(self.windows)]
        if self.heads:
            described = Counter(f"{size} and {heads}" for size, heads in zip(sizes, self.heads, strict=True))
            sizes = [f"{count} × ({size})" if count > 1 else size for size, count in described.items()]
        return ", ".join(sizes) if self.layers else f"all layers of {self.windows[0] or 'full'}"

    @property
    def finest(self) -> KVHeads:
        """The heads that shares and layouts count, where groups have unlike ones."""
        return finest_heads(self.heads)

    def heads_of(self, group: int, num_kv_heads: int) -> KVHeads:
        """Return the heads of a group on a rank with ``num_kv_heads`` of the finest; only with ``heads``."""
        heads = self.heads[group]
        count = num_kv_heads * heads.num_kv_heads // self.finest.num_kv_heads
        return KVHeads(max(1, count), heads.head_dim)

    def finer(self, group: int) -> int:
        """Return the heads of the finest group that stand for one head of this group."""
        return self.finest.num_kv_heads // self.heads[group].num_kv_heads if self.heads else 1

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        return any(window is not None for window in self.windows)

    def places(self, layers: range) -> tuple[Pair, ...]:
        """Return the group of each of consecutive layers, and its index in the blocks of a rank that holds them."""
        held: Counter[int] = Counter()
        places = []
        for layer in layers:
            group = self.layers[layer] if self.layers else 0
            places.append((group, held[group]))
            held[group] += 1
        return tuple(places)

    def block_layers(self, layers: range, num_kv_heads: int = 0) -> int:
        """Return the layers of a block, with padding, on a rank that holds these consecutive layers.

        With unlike heads, return how many layers of the finest group have as many bytes as the block. The rank has
        ``num_kv_heads`` of that group. Rows of all groups then begin at multiples of their size in each page.
        """
        if not self.layers:
            return len(layers)
        if not self.heads:
            return max((index + 1 for _, index in self.places(layers)), default=0)
        unit = num_kv_heads * self.finest.head_dim
        heads_of = [self.heads_of(group, num_kv_heads) for group in range(self.num_groups)]
        sizes = [(index + 1) * heads_of[group].size for group, index in self.places(layers)]
        row = math.lcm(*(heads.head_dim for heads in self.heads))
        step = row // math.gcd(row, unit)
        return -(-max(sizes, default=0) // (unit * step)) * step

    def pairs(self, start: int, end: int, position: int, block_size: int) -> list[Pair]:
        """Return which of the logical blocks ``start … end - 1`` are seen from the block of ``position`` on, by group.

        Both sides of a handoff derive from it, in this order, which blocks are leased, announced and read. ``position``
        is the last one of a prompt that is handed off, and the one after the tokens of a pull, which ends with a block.
        """
        position = position // block_size * block_size
        first = [first_seen(position, window, block_size) for window in self.windows]
        if len(first) == 1:  # a first token waits for this
            return [(block, 0) for block in range(max(start, first[0]), end)]
        return [(block, group) for block in range(start, end) for group, begin in enumerate(first) if block >= begin]

    def blocks_for(self, num_tokens: int, block_size: int, step_tokens: int = 0) -> int:
        """Return the blocks that a sequence of ``num_tokens`` tokens holds while it decodes.

        With ``step_tokens``, return the most that it holds until then: a step computes up to ``step_tokens`` tokens,
        whose KV is held beside the previous window. A handed-off prompt holds the window before its cached prefix
        beside the window at its end.
        """
        return blocks_for(self.windows, num_tokens, block_size, step_tokens)

    def longest(self, num_blocks: int, block_size: int, step_tokens: int) -> int | None:
        """Return the tokens of the longest sequence that ``num_blocks`` blocks hold; None: any sequence."""
        if None not in self.windows and self.blocks_for(1 << 40, block_size, step_tokens) <= num_blocks:
            return None
        low = 0  # in logical blocks, as ``high``
        high = num_blocks
        while low < high:
            middle = (low + high + 1) // 2
            fits = self.blocks_for(middle * block_size, block_size, step_tokens) <= num_blocks
            low, high = (middle, high) if fits else (low, middle - 1)
        return low * block_size


def finest_heads(heads: Sequence[KVHeads]) -> KVHeads:
    """Return the heads that shares and layouts count: most, and the smallest among as many."""
    return min(heads, key=lambda kind: (-kind.num_kv_heads, kind.head_dim))


def blocks_for(windows: Windows, num_tokens: int, block_size: int, step_tokens: int = 0) -> int:
    """See KVCacheGroups."""
    blocks = -(-num_tokens // block_size)
    needed = 0
    for window in windows:
        if window is None:
            needed += blocks
        else:
            others = max(step_tokens, window) if step_tokens else 0
            needed += min(blocks, window_blocks(window, block_size, others))
    return needed


def window_blocks(window: int, block_size: int, others: int = 0) -> int:
    """Return the most blocks with a window and ``others`` tokens behind it; neither ends with a block."""
    return -(-window // block_size) + -(-others // block_size) + 2


def first_block(num_tokens: int, window: int | None, block_size: int) -> int:
    """Return the first logical block that a group keeps of a sequence with ``num_tokens`` tokens.

    Later tokens see the ``window - 1`` tokens before them. The group also keeps the tokens that the first token of the
    last block sees: so the same prompt with any output finds all full blocks before its last token in the cache.
    """
    if window is None or not num_tokens:
        return 0
    return first_seen((num_tokens - 1) // block_size * block_size, window, block_size)


def first_seen(position: int, window: int | None, block_size: int) -> int:
    """Return the first logical block that the token at ``position`` sees."""
    return 0 if window is None else max(0, position - window + 1) // block_size


def cut_into_groups(windows: Sequence[int | None], heads: Sequence[KVHeads] = ()) -> KVCacheGroups:
    """Return the groups of a model whose layers have these windows, and these KV heads if they are unlike.

    Blocks of all groups have the same bytes, so some layers may be padding; the chosen size costs least in padding and
    groups. The layers of a kind go to its groups round-robin, so that each pipeline stage has about as many layers of
    every group.
    """
    unlike = len(set(heads)) > 1
    same = KVHeads(1, 1)
    kind_of_layer = list(zip(windows, heads if unlike else [same] * len(windows), strict=True))
    kinds = sorted(
        Counter(kind_of_layer).items(), key=lambda kind: (kind[0][0] is not None, kind[0][0] or 0, kind[0][1])
    )
    if len(kinds) <= 1:
        return KVCacheGroups(tuple(window for (window, _), _ in kinds) or (None,))
    unit = finest_heads([kind_heads for (_, kind_heads), _ in kinds]).size

    def cost(size: int) -> int:
        """Return the cost of blocks with room for ``size`` layers of the finest heads."""
        return sum(
            -(-count // (size * unit // kind_heads.size)) * (size * (1 if window else _FULL_LAYER) + _GROUP)
            for (window, kind_heads), count in kinds
        )

    least = max(-(-kind_heads.size // unit) for (_, kind_heads), _ in kinds)
    most = max(-(-kind_heads.size * count // unit) for (_, kind_heads), count in kinds)
    size = min(range(least, max(most, least) + 1), key=cost)
    of_group: list[int | None] = []
    heads_of_group: list[KVHeads] = []
    layers = [0] * len(windows)
    for (window, kind_heads), count in kinds:
        num_groups = -(-count // (size * unit // kind_heads.size))
        members = (layer for layer, kind in enumerate(kind_of_layer) if kind == (window, kind_heads))
        for number, layer in enumerate(members):
            layers[layer] = len(of_group) + number % num_groups
        of_group += [window] * num_groups
        heads_of_group += [kind_heads] * num_groups
    return KVCacheGroups(tuple(of_group), tuple(layers), tuple(heads_of_group) if unlike else ())
