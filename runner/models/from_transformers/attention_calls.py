"""Attention of transformers' layers: recorded once to learn what each layer asks for, then run on the paged KV cache.

Both run behind the library's ``AttentionInterface``. A layer asks by arguments and by its mask. The library builds a
mask from a predicate of query and key positions, which is evaluated here at all positions that the model has: a window
is what the predicate says, whether or not the layer names it in its call.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from pdserve.errors import ConfigError
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.model_config import ModelConfig
from runner.attention import AttentionBackend
from runner.distributed.parallel_state import ParallelState

#: Names of attention functions. For ``PAGED`` the library builds no mask, as it knows no mask function of that name.
PAGED = "pdserve_paged"
TRACED = "pdserve_traced"

#: Arguments of an attention call that change nothing here.
_WITHOUT_EFFECT = frozenset(
    {"dropout", "position_ids", "use_cache", "cache_position", "output_attentions", "output_hidden_states"}
)

_SHORTEST = 16  # tokens of a sequence that is worth a node

Predicate = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]  # (batch, head, query, key position) → attends


class AttentionCalls(Protocol):
    """Takes the attention calls of a forward pass."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, asked: AttentionSpec, call: dict[str, Any]) -> Tensor:
        """q [tokens, num_heads, head_dim], k and v [tokens, num_kv_heads, …] → [tokens, num_heads, v's head_dim]."""
        ...


_running: list[AttentionCalls] = []  # for the running forward pass; a rank has one thread for it


def run_with(calls: AttentionCalls, forward: Callable[[], Any]) -> Any:
    """Return ``forward()``, whose attention calls go to ``calls``."""
    _running.append(calls)
    try:
        return forward()
    finally:
        _running.pop()


class HeadShard:
    """The heads of one tensor shard: its part of the KV cache, for every plan.

    A layer whose plan does not split its heads computes all on each shard. Then a shard attends with its own, and all
    shards gather the results.
    """

    def __init__(self, num_heads: int, keys: range, total_keys: int, head_dim: int, parallel: ParallelState) -> None:
        """``num_heads`` and ``total_keys`` are the query and KV heads of the whole model, ``keys`` this shard's."""
        tp = parallel.position.parallel.tp
        shard = parallel.position.shard
        self._num_heads = num_heads
        self._parallel = parallel
        heads_per_shard = num_heads // tp
        self._queries = slice(shard * heads_per_shard, (shard + 1) * heads_per_shard)
        self._keys = slice(keys.start, keys.stop)
        self._total_keys = total_keys
        self.head_dim = head_dim
        self.sizes = (heads_per_shard, len(keys))  # query and KV heads of this shard

    @classmethod
    def by_layer(cls, config: ModelConfig, parallel: ParallelState) -> list[HeadShard]:
        """Return the heads of each layer of this rank."""
        position = parallel.position
        share = position.parallel.shares(config)[position.rank]
        groups = config.kv_cache_groups
        if not groups.heads:
            keys = range(share.first_head, share.first_head + share.num_heads)
            return [cls(config.num_heads, keys, share.total_heads, config.head_dim, parallel)] * len(position.layers)
        of_group = [
            cls(config.num_heads, share.heads_in(groups, group), heads.num_kv_heads, heads.head_dim, parallel)
            for group, heads in enumerate(groups.heads)
        ]
        return [of_group[groups.layers[layer]] for layer in position.layers]

    def knows(self, num_heads: int, num_kv_heads: int) -> bool:
        """Whether a layer computes this shard's heads, or all."""
        return num_heads in (self.sizes[0], self._num_heads) and num_kv_heads in (self.sizes[1], self._total_keys)

    def queries(self, q: Tensor) -> Tensor:
        """Return this shard's part of queries [tokens, heads, head_dim]."""
        return q[:, self._queries] if q.shape[1] != self.sizes[0] else q

    def keys(self, k: Tensor) -> Tensor:
        """Return this shard's part of keys or values [tokens, heads, head_dim]."""
        return k[:, self._keys] if k.shape[1] != self.sizes[1] else k

    def sinks(self, sinks: Tensor | None) -> Tensor | None:
        """Return this shard's part of sinks [heads]."""
        return sinks[self._queries] if sinks is not None and len(sinks) != self.sizes[0] else sinks

    def whole(self, attended: Tensor) -> Tensor:
        """Return [tokens, all heads, head_dim] from each shard's [tokens, its heads, head_dim]."""
        tokens, _, width = attended.shape
        columns = self._parallel.gather_columns(attended.reshape(tokens, -1), self._num_heads * width)
        return columns.view(tokens, self._num_heads, width)


class PagedCalls:
    """Attends over the paged cache of one rank. V that is narrower than K is padded with zeros."""

    def __init__(self, backend: AttentionBackend, heads: Sequence[HeadShard], first_layer: int) -> None:
        """``heads`` of each layer of this rank."""
        self._backend = backend
        self._heads = heads
        self._first_layer = first_layer

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, asked: AttentionSpec, call: dict[str, Any]) -> Tensor:
        width = v.shape[-1]
        layer -= self._first_layer
        heads = self._heads[layer]
        mine = heads.queries(q)
        k = heads.keys(k)
        v = heads.keys(v)
        if width < heads.head_dim:
            v = nn.functional.pad(v, (0, heads.head_dim - width))
        self._backend.store(layer, k, v)
        attended = self._backend.attend(layer, mine.contiguous(), heads.sinks(call["s_aux"]))
        attended = attended.view(len(q), -1, heads.head_dim)[..., :width]
        return attended if mine.shape == q.shape else heads.whole(attended)


class TracedCalls:
    """Records what each layer asks for; the attention output is zero.

    Masks are read at all of the model's ``num_positions``.
    """

    def __init__(self, num_positions: int) -> None:
        self.specs: dict[int, AttentionSpec] = {}
        self.sizes: dict[int, tuple[int, int, int]] = {}  # num_heads, num_kv_heads, head_dim of each layer
        self.num_calls = 0
        self._num_positions = num_positions
        self._masks: list[tuple[Tensor, Predicate]] = []

    def add_mask(self, mask: Tensor, predicate: Predicate) -> None:
        self._masks.append((mask, predicate))

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, asked: AttentionSpec, call: dict[str, Any]) -> Tensor:
        window = asked.window
        mask = call["attention_mask"]
        if mask is not None:
            window = window_of(self._predicate_of(layer, mask), self._num_positions, mask.device)
        self.num_calls += 1
        self.specs[layer] = AttentionSpec(asked.scale, window, asked.soft_cap, asked.has_sinks)
        self.sizes[layer] = q.shape[1], k.shape[1], k.shape[2]
        return q.new_zeros(len(q), q.shape[1], v.shape[2])

    def _predicate_of(self, layer: int, mask: Tensor) -> Predicate:
        for built_mask, predicate in self._masks:
            if built_mask.untyped_storage().data_ptr() == mask.untyped_storage().data_ptr():
                return predicate
        raise ConfigError(f"layer {layer} changes its mask, so what it attends to is not known")


def window_of(predicate: Predicate, num_positions: int, device: torch.device) -> int | None:
    """Return the window that a mask's predicate means, None for full causal attention.

    Raises ConfigError if it is neither, at any key of some queries, the last one included.
    """
    keys = torch.arange(num_positions, device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)

    def attends(query: int) -> Tensor:
        return torch.as_tensor(predicate(zero, zero, torch.tensor(query, device=device), keys)).expand(num_positions)

    last = num_positions - 1
    window = max(1, int(attends(last).sum()))
    for query in sorted({0, 1, 2, window - 1, window, last // 3, last // 2, last} & set(range(num_positions))):
        if not torch.equal(attends(query), (keys <= query) & (keys > query - window)):
            raise _neither(lambda query: torch.equal(attends(query), keys <= query), num_positions)
    return None if window == num_positions else window


def _neither(is_causal: Callable[[int], bool], num_positions: int) -> ConfigError:
    """Return the error of a mask that is neither; ``is_causal`` says of a query whether it attends to all before it.

    Attention within chunks, as of Llama 4, is causal up to the end of the first chunk.
    """
    problem = "its mask is neither causal nor a sliding window, and paged attention has no other"
    causal = bisect_left(range(num_positions), True, key=lambda query: not is_causal(query))
    if causal < _SHORTEST:
        return ConfigError(problem)
    return ConfigError(f"{problem}. It is causal for {causal} tokens: give --max-model-len {causal}, or less")


def register() -> None:
    """Make the library know the attention and mask functions. Idempotent."""
    functions: Any = AttentionInterface
    masks: Any = AttentionMaskInterface
    functions.register(PAGED, _attend)
    functions.register(TRACED, _attend)
    masks.register(TRACED, _traced_mask)


def _traced_mask(
    batch_size: int, q_length: int, kv_length: int, *args: Any, mask_function: Predicate, device: Any, **kwargs: Any
) -> Tensor:
    mask = torch.zeros(batch_size, 1, q_length, kv_length, device=device)
    calls = _running[-1]
    assert isinstance(calls, TracedCalls)
    calls.add_mask(mask, mask_function)
    return mask


def _attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The library's interface: query [1, heads, tokens, head_dim] → ([1, tokens, heads, head_dim], None).

    Raises ConfigError for an argument whose meaning is not known, as leaving it out could change tokens.
    """
    unknown = sorted(name for name, value in others.items() if name not in _WITHOUT_EFFECT and value is not None)
    if unknown:
        raise ConfigError(f"{type(module).__name__} asks for {', '.join(unknown)}, which paged attention does not know")
    if is_causal is False or getattr(module, "is_causal", True) is False:
        raise ConfigError(f"{type(module).__name__} attends to later tokens")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    asked = AttentionSpec(scale, sliding_window, softcap, s_aux is not None)
    q, k, v = (heads[0].transpose(0, 1) for heads in (query, key, value))
    call = {"attention_mask": attention_mask, "s_aux": s_aux}
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return _running[-1].attend(layer, q, k, v, asked, call)[None], None
