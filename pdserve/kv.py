"""The KV cache as bytes: one allocation per rank, described once, re-derived nowhere.

The allocation has the shape ``[num_pages, num_kv_heads, num_layers, 2 (K, V), kernel_block_size, head_dim]`` and the
pages of a block are adjacent, so a block is one contiguous range of bytes that holds every layer:

    block b = pages b*r … b*r + r-1          r = block_size // kernel_block_size
    layer l = cache[:, :, l]                 a strided view [num_pages, num_kv_heads, 2, kernel_block_size, head_dim]

Where a node has several ranks, the layout of each counts the layers and heads that this rank holds, and its ``KVShare``
says which of the model's they are.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import msgspec

from pdserve.errors import ConfigError

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


class KVLayout(msgspec.Struct, frozen=True):
    """Geometry of one rank's KV cache. Sizes are in elements unless the name says bytes."""

    num_blocks: int
    block_size: int  # tokens
    kernel_block_size: int  # tokens
    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str  # a key of DTYPE_BYTES

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"KV dtype {self.dtype!r} is not one of {', '.join(DTYPE_BYTES)}")
        if self.kernel_block_size < 1 or self.block_size % self.kernel_block_size:
            raise ConfigError(
                f"kernel_block_size {self.kernel_block_size} does not divide block_size {self.block_size}; "
                f"choose one of {', '.join(map(str, _divisors(self.block_size)))}"
            )

    @property
    def pages_per_block(self) -> int:
        return self.block_size // self.kernel_block_size

    @property
    def num_pages(self) -> int:
        return self.num_blocks * self.pages_per_block

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        return (self.num_pages, self.num_kv_heads, self.num_layers, 2, self.kernel_block_size, self.head_dim)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of ``shape`` in elements (C order)."""
        shape = self.shape
        return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))

    @property
    def page_bytes(self) -> int:
        return self.strides[0] * DTYPE_BYTES[self.dtype]

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.pages_per_block

    @property
    def bytes_per_token(self) -> int:
        return self.block_bytes // self.block_size

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def block_offset(self, block_id: int) -> int:
        """Byte offset of a block from the start of the allocation."""
        if not 0 <= block_id < self.num_blocks:
            raise ValueError(f"block {block_id} is outside 0 … {self.num_blocks - 1}")
        return block_id * self.block_bytes


class KVShare(msgspec.Struct, frozen=True):
    """Which part of the model's KV a rank holds: a run of its layers and a run of its KV heads.

    Pipeline stages split the layers, tensor shards the heads. Where there are more shards than heads, neighbouring
    shards hold the same head:

                      2 shards                  8 shards
        heads         0 1 | 2 3                 0 | 0 | 1 | 1 | 2 | 2 | 3 | 3
    """

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    total_layers: int  # of the model
    total_heads: int  # KV heads of the model

    def __post_init__(self) -> None:
        for what, first, count, total in (
            ("layers", self.first_layer, self.num_layers, self.total_layers),
            ("KV heads", self.first_head, self.num_heads, self.total_heads),
        ):
            if not (0 <= first < first + count <= total):
                raise ConfigError(f"{count} {what} from {first} on are no part of a model with {total} {what}")

    @classmethod
    def whole(cls, layout: KVLayout) -> KVShare:
        """All of the model: the share of a node's only rank."""
        return cls(0, layout.num_layers, 0, layout.num_kv_heads, layout.num_layers, layout.num_kv_heads)

    @classmethod
    def of_rank(cls, stage: int, stage_layers: Sequence[int], shard: int, num_shards: int, total_heads: int) -> KVShare:
        """The share of one tensor shard of one pipeline stage.

        ``stage_layers`` is the number of layers of each stage. Raises ConfigError where the heads can neither be split
        evenly among the shards nor repeated evenly.
        """
        assert 0 <= stage < len(stage_layers)
        assert 0 <= shard < num_shards
        if total_heads % num_shards and num_shards % total_heads:
            raise ConfigError(
                f"{total_heads} KV heads cannot be spread over {num_shards} tensor shards; "
                f"choose a divisor or a multiple of {total_heads}"
            )
        num_heads = max(1, total_heads // num_shards)
        shards_per_head = max(1, num_shards // total_heads)
        return cls(
            sum(stage_layers[:stage]),
            stage_layers[stage],
            shard // shards_per_head * num_heads,
            num_heads,
            sum(stage_layers),
            total_heads,
        )


def choose_kernel_block_size(
    block_size: int, requested: int | None, supported: Sequence[tuple[str, Iterable[int] | None]]
) -> int:
    """The page size for a group of attention backends.

    ``supported`` names each backend with the page sizes it can index; ``None`` means any. Without a request the
    largest size that all support and that divides ``block_size`` is chosen. Raises ConfigError naming both numbers.
    """
    sizes = set(_divisors(block_size))
    for _, backend_sizes in supported:
        if backend_sizes is not None:
            sizes &= set(backend_sizes)
    names = ", ".join(name for name, _ in supported)
    if requested is None:
        if not sizes:
            limits = "; ".join(f"{name}: {sorted(s)}" for name, s in supported if s is not None)
            raise ConfigError(
                f"block_size {block_size} has no page size that every backend supports ({limits}); "
                "choose a multiple of one of these"
            )
        return max(sizes)
    if requested < 1 or block_size % requested:
        raise ConfigError(
            f"kernel_block_size {requested} does not divide block_size {block_size}; "
            f"choose one of {', '.join(map(str, sorted(sizes)))}"
        )
    if requested not in sizes:
        raise ConfigError(f"kernel_block_size {requested} is not supported by {names}; choose one of {sorted(sizes)}")
    return requested


def _divisors(number: int) -> list[int]:
    if number < 1:
        raise ConfigError(f"block_size {number} must be at least 1")
    return [d for d in range(1, number + 1) if number % d == 0]
