"""The KV cache in bytes: what a layer keeps per token, and the geometry of one rank's allocation.

A rank has one allocation of shape ``[num_pages, num_kv_heads, num_layers, planes, kernel_block_size, head_dim]``.
The pages of a block are adjacent, so a block is one contiguous range of bytes that holds every layer:

    block b = pages b*r … b*r + r-1          r = block_size // kernel_block_size
    layer l = cache[:, :, l]                 a view [num_pages, num_kv_heads, planes, kernel_block_size, head_dim]

If some layers have sliding windows, a block holds the layers of one group (groups.py) in place of all layers. If layers
have unlike KV heads, ``layout.of_group(group)`` is the geometry of a group's blocks: pages begin at the same bytes in
all groups, and the layers of a group fill a part of the page.
All sizes in bytes come from ``KVCacheSpec`` and ``KVLayout``. On a node with several ranks, a rank's layout counts the
layers and heads of that rank, and its ``KVShare`` names them within the model.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import ClassVar, Self, get_args

import msgspec

from pdserve.errors import ConfigError
from pdserve.kv.groups import KVCacheGroups, KVHeads

MAX_BLOCK_SIZE = 1 << 16  # tokens
MAX_BLOCKS = 1 << 24  # most blocks of a KV cache: each costs host memory, and a hostile config has tiny ones
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
FP8_E4M3 = "fp8_e4m3"
KV_DTYPE_BYTES = DTYPE_BYTES | {FP8_E4M3: 1}


class KVScales(msgspec.Struct, frozen=True):
    """Static scales of a layer's FP8 cache: a stored value times its scale is the key's or value's element."""

    k: float = 1.0
    v: float = 1.0


UNSCALED = KVScales()


class KVCacheSpec(msgspec.Struct, frozen=True):
    """KV of one layer per token: ``planes`` rows of ``head_dim`` elements for each KV head.

    A kind of KV cache is a subclass with a tag, and an entry of ``AnyKVCacheSpec``. All else asks the spec: sizes, the
    transfer plan, digests, the compatibility hash, and the messages between nodes, which hold its fields by name.
    ``ModelConfig.kv_cache_spec`` chooses the kind of a model.
    """

    num_kv_heads: int  # the model's; in a layout, the rank's
    head_dim: int  # elements
    dtype: str  # a key of KV_DTYPE_BYTES; may differ from the dtype that the model computes in

    planes: ClassVar[int]
    attention: ClassVar[Mapping[str, str]]  # "module.Class" below runner.attention, by attention back end
    event_kind: ClassVar[str] = "full_attention"  # kind of its groups in KV events, by vLLM's names
    has_fp8: ClassVar[bool] = False  # whether its attention reads a cache in FP8_E4M3
    packed: ClassVar[bool] = False  # stored and logical block differ (compressed, padded): a block is never split

    def __post_init__(self) -> None:
        if self.dtype not in KV_DTYPE_BYTES:
            raise ConfigError(f"KV dtype {self.dtype!r} is not one of {', '.join(KV_DTYPE_BYTES)}")

    @property
    def kind(self) -> str:
        """Name of the spec's class in messages between nodes."""
        return str(self.__struct_config__.tag)

    @property
    def element_bytes(self) -> int:
        return KV_DTYPE_BYTES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one token in one head and one plane."""
        return self.head_dim * self.element_bytes

    @property
    def compat_fields(self) -> dict[str, str]:
        """Name and value of what must be equal on both sides of a handoff; heads are the model's."""
        fields = msgspec.structs.asdict(self)
        return {"kv_cache": self.kind, "kv_dtype": fields.pop("dtype")} | {name: str(fields[name]) for name in fields}

    def with_heads(self, num_kv_heads: int) -> Self:
        """Return this spec for another part of the model."""
        return msgspec.structs.replace(self, num_kv_heads=num_kv_heads)

    def page_bytes(self, page_size: int) -> int:
        """Bytes of one page of ``page_size`` tokens in one layer."""
        return page_size * self.planes * self.num_kv_heads * self.row_bytes


class FullAttentionSpec(KVCacheSpec, frozen=True, tag="full_attention"):
    """Keys (plane 0) and values (plane 1) of every token."""

    planes: ClassVar[int] = 2
    has_fp8: ClassVar[bool] = True
    attention: ClassVar[Mapping[str, str]] = {
        "torch": "paged_torch.PagedTorchAttention",
        "triton": "paged_triton.PagedTritonAttention",
        "flashinfer": "paged_flashinfer.PagedFlashInferAttention",
    }


class LatentSpec(KVCacheSpec, frozen=True, tag="latent"):
    """One row of every token for all query heads: its latent, then the rotated part of keys (MLA, arXiv 2405.04434).

    There is one KV head, which all tensor shards repeat. Keys are whole rows, and values their first part.
    """

    planes: ClassVar[int] = 1
    event_kind: ClassVar[str] = "mla_attention"
    attention: ClassVar[Mapping[str, str]] = {
        "torch": "latent_torch.LatentTorchAttention",
        "triton": "latent_triton.LatentTritonAttention",
        "flashinfer": "latent_flashinfer.LatentFlashInferAttention",
    }


AnyKVCacheSpec = FullAttentionSpec | LatentSpec  # msgspec decodes each by its tag
KV_CACHE_SPECS: dict[str, type[KVCacheSpec]] = {
    str(kind.__struct_config__.tag): kind for kind in get_args(AnyKVCacheSpec)
}


class KVLayout(msgspec.Struct, frozen=True):
    """Geometry of one rank's KV cache. Sizes are in elements unless the name says bytes."""

    num_blocks: int
    block_size: int  # tokens
    kernel_block_size: int  # tokens
    num_layers: int  # layers per block: the rank's; with groups, those of the rank's largest group
    spec: AnyKVCacheSpec  # if groups have unlike heads, that of the finest group
    groups: KVCacheGroups = KVCacheGroups()  # the whole model's

    def __post_init__(self) -> None:
        if self.kernel_block_size < 1 or self.block_size % self.kernel_block_size:
            raise ConfigError(
                f"kernel_block_size {self.kernel_block_size} does not divide block_size {self.block_size}; "
                f"choose one of {', '.join(map(str, divisors(self.block_size)))}"
            )
        if self.spec.packed and self.kernel_block_size != self.block_size:
            raise ConfigError(
                f"a {self.spec.kind} block cannot be split into pages: kernel_block_size {self.kernel_block_size} must "
                f"equal block_size {self.block_size}"
            )

        if self.groups.heads:
            self._check_heads()

    def _check_heads(self) -> None:
        finest = self.groups.finest
        if self.spec.head_dim != finest.head_dim or self.spec.num_kv_heads > finest.num_kv_heads:
            raise ConfigError(
                f"a layout of {KVHeads(self.spec.num_kv_heads, self.spec.head_dim)} is no part of a model whose finest "
                f"KV cache group has {finest}"
            )
        if self.spec.packed:
            raise ConfigError(f"a {self.spec.kind} cache cannot have KV cache groups of unlike heads")

    @property
    def num_kv_heads(self) -> int:
        return self.spec.num_kv_heads

    @property
    def head_dim(self) -> int:
        return self.spec.head_dim

    @property
    def dtype(self) -> str:
        return self.spec.dtype

    @property
    def pages_per_block(self) -> int:
        return self.block_size // self.kernel_block_size

    @property
    def shape(self) -> tuple[int, int, int, int, int, int]:
        pages = self.num_blocks * self.pages_per_block
        spec = self.spec
        return (pages, spec.num_kv_heads, self.num_layers, spec.planes, self.kernel_block_size, spec.head_dim)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of ``shape`` in elements (C order)."""
        shape = self.shape
        return tuple(math.prod(shape[axis + 1 :]) for axis in range(len(shape)))

    @property
    def page_bytes(self) -> int:
        return self.num_layers * self.spec.page_bytes(self.kernel_block_size)

    @property
    def block_bytes(self) -> int:
        return self.page_bytes * self.pages_per_block

    @property
    def bytes_per_token(self) -> int:
        """Bytes that a further token of a long sequence takes: layers with a window add none."""
        return self.block_bytes // self.block_size * max(1, self.groups.windows.count(None))

    @property
    def num_tokens(self) -> int:
        """Tokens of long sequences that the cache holds."""
        return self.num_blocks // max(1, self.groups.windows.count(None)) * self.block_size

    @property
    def total_bytes(self) -> int:
        return self.block_bytes * self.num_blocks

    def blocks_for(self, num_tokens: int, step_tokens: int = 0) -> int:
        """Return the blocks of a sequence; see KVCacheGroups."""
        return self.groups.blocks_for(num_tokens, self.block_size, step_tokens)

    def longest(self, step_tokens: int, limit: int) -> int:
        """Return the tokens of the longest sequence that all blocks hold; ``limit`` if windows make it unlimited.

        Steps compute up to ``step_tokens``.
        """
        tokens = self.groups.longest(self.num_blocks, self.block_size, step_tokens)
        return limit if tokens is None else tokens

    def of_group(self, group: int) -> KVLayout:
        """Return the geometry of a group's blocks as a layout with one group.

        It has as many layers as fit into a page; a page may be longer than these: see ``page_rows``.
        """
        if not self.groups.heads:
            return self
        heads = self.groups.heads_of(group, self.spec.num_kv_heads)
        spec = msgspec.structs.replace(self.spec, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim)
        num_layers = self.num_layers * self.num_kv_heads * self.head_dim // heads.size
        return msgspec.structs.replace(self, num_layers=num_layers, spec=spec, groups=KVCacheGroups())

    def page_rows(self, group: int) -> int:
        """Return the distance of two pages in rows of a group: ``kernel_block_size`` tokens of a head and plane."""
        return self.page_bytes // (self.kernel_block_size * self.of_group(group).spec.row_bytes)

    def with_dtype(self, dtype: str) -> KVLayout:
        """Return this layout for elements of another dtype."""
        return msgspec.structs.replace(self, spec=msgspec.structs.replace(self.spec, dtype=dtype))

    def resized(self, layers: range, num_kv_heads: int) -> KVLayout:
        """Return this layout for another part of the model, given by its layers and the number of its heads."""
        num_layers = self.groups.block_layers(layers, num_kv_heads)
        return msgspec.structs.replace(self, num_layers=num_layers, spec=self.spec.with_heads(num_kv_heads))


class KVRegion(msgspec.Struct, frozen=True):
    """The memory of one rank's KV cache. ``device`` is "cpu" or "cuda"; ``address`` is valid in the owner's process."""

    address: int
    num_bytes: int
    device: str
    device_id: int


class KVShare(msgspec.Struct, frozen=True):
    """The part of the model's KV that a rank holds: consecutive layers and consecutive KV heads.

    If layers have unlike heads, they count in the finest KV cache group. ``heads_in`` has those of the other groups.
    With more tensor shards than heads, neighbouring shards hold the same head:

                      2 shards                  8 shards
        heads         0 1 | 2 3                 0 | 0 | 1 | 1 | 2 | 2 | 3 | 3
    """

    first_layer: int
    num_layers: int
    first_head: int
    num_heads: int
    total_layers: int  # the model's
    total_heads: int  # the model's KV heads
    draft_layers: int = 0  # number of last layers, whose KV only drafts need: a peer may lack them

    def __post_init__(self) -> None:
        layers = ("layers", self.first_layer, self.num_layers, self.total_layers)
        heads = ("KV heads", self.first_head, self.num_heads, self.total_heads)
        for what, first, count, total in (layers, heads):
            if not (0 <= first < first + count <= total):
                raise ConfigError(f"{count} {what} from {first} on are no part of a model with {total} {what}")
        if not 0 <= self.draft_layers < self.total_layers:
            raise ConfigError(f"{self.draft_layers} of {self.total_layers} layers make drafts; one at least must not")

    @classmethod
    def whole(cls, layout: KVLayout) -> KVShare:
        """Return the share of a node with one rank."""
        num_layers = len(layout.groups.layers) or layout.num_layers
        return cls(0, num_layers, 0, layout.num_kv_heads, num_layers, layout.num_kv_heads)

    @property
    def layers(self) -> range:
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def model_layers(self) -> int:
        """Layers of the model whose KV every node needs."""
        return self.total_layers - self.draft_layers

    def usable(self, other_drafts: bool) -> KVShare | None:
        """Return the part that a node can use. ``other_drafts``: another layer or head makes that node's drafts.

        None: this part has only layers that make drafts.
        """
        if not other_drafts:
            return self
        held = min(self.layers.stop, self.model_layers) - self.first_layer
        if held < 1:
            return None
        return msgspec.structs.replace(self, num_layers=held, total_layers=self.model_layers, draft_layers=0)

    @classmethod
    def of_rank(
        cls,
        stage: int,
        stage_layers: Sequence[int],
        shard: int,
        num_shards: int,
        total_heads: int,
        draft_layers: int = 0,
    ) -> KVShare:
        """Return the share of one tensor shard of one pipeline stage.

        ``stage_layers`` has the layers of each stage; the last stage's include ``draft_layers``.

        Raises ConfigError unless the shards can split or repeat the heads evenly.
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
        layers = (sum(stage_layers[:stage]), stage_layers[stage])
        heads = (shard // shards_per_head * num_heads, num_heads)
        return cls(*layers, *heads, sum(stage_layers), total_heads, draft_layers)

    def heads_in(self, groups: KVCacheGroups, group: int) -> range:
        """Return the KV heads that the rank holds in the layers of a group."""
        finer = groups.finer(group)
        return range(self.first_head // finer, -(-(self.first_head + self.num_heads) // finer))


def divisors(number: int) -> list[int]:
    """Return the divisors of a block size, ascending. Raises ConfigError unless it is in 1 … MAX_BLOCK_SIZE."""
    if not 1 <= number <= MAX_BLOCK_SIZE:
        raise ConfigError(f"block_size {number} must be at least 1 and at most {MAX_BLOCK_SIZE}")
    return [d for d in range(1, number + 1) if number % d == 0]
