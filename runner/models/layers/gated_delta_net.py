"""Gated delta net (arXiv:2412.06464) with a short convolution, as Qwen3-Next and Qwen3.5 have it.

    x ─► queries, keys, values ─► short convolution, silu ─► gated delta rule ─► RMS norm ─► × silu(gates) ─► out_proj
    x ─► betas, decays ──────────────────────────────────────────┘        x ─► gates ──────────────┘

The delta rule and the convolution keep a state per sequence: runner/attention/gated_delta.py computes both.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from pdserve.kv.states import GatedDeltaSpec
from runner.attention import AttentionBackend
from runner.attention.gated_delta import GatedDelta
from runner.batch import Activations, GatedDeltaWeights, RotaryCosSin
from runner.models.layers.context import ModelContext
from runner.models.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards, prefixed
from runner.models.quantization.unquantized import UnquantizedLinearMethod


class GatedDeltaNet:
    """Takes the place of ``Attention`` in a recurrent layer. Shards have consecutive key heads, with their values."""

    name = "linear_attn"

    def __init__(self, context: ModelContext, layer: int, *, merged: bool) -> None:
        """``layer`` counts the recurrent layers of this rank from 0 on.

        If ``merged``, the checkpoint has one projection ``in_proj_qkvz`` with the queries, keys, values and gates of
        key head after key head, and one ``in_proj_ba``; else ``in_proj_qkv``, ``in_proj_z``, ``in_proj_b`` and
        ``in_proj_a``.
        """
        config = context.config
        position = context.position
        placement = context.placement
        assert isinstance(config.state, GatedDeltaSpec)
        self._layer = layer
        self._ops = context.ops
        self._rows = rows = _ShardRows(config.state, position.shard, position.parallel.tp)
        self._spec = spec = config.state.split(position.parallel.tp)
        hidden_size = config.hidden_size
        values = config.state.value_heads * config.state.value_dim
        self._channels = spec.channels
        ranges = rows.merged() if merged else rows.separate()
        inputs = {name: ShardRange(0, len(shard_rows), size) for name, (shard_rows, size) in ranges.items()}
        order = {name: shard_rows for name, (shard_rows, _) in ranges.items()}
        self._qkvz = MergedColumnParallelLinear(context, hidden_size, inputs, False, order)
        # Betas and decays: 2 outputs per head, unquantized in all checkpoints.
        ba = UnquantizedLinearMethod(hidden_size, 2 * spec.value_heads, False, placement)
        context.linears[hidden_size, 2 * spec.value_heads, None] = ba
        self._ba_ranges = rows.merged_ba() if merged else rows.separate_ba()
        of_ba = {name: ShardRange(0, len(shard_rows), size) for name, (shard_rows, size) in self._ba_ranges.items()}
        self._ba = context.adapted(ba, hidden_size, of_ba)
        self._hidden_size = hidden_size
        self._out = RowParallelLinear(context, "out_proj", ShardRange.even(values, position), hidden_size, False)
        self._norm = torch.empty(spec.value_dim, device=placement.device, dtype=placement.dtype)
        conv = torch.empty(spec.conv_width, spec.channels, device=placement.device, dtype=placement.dtype)
        self._conv = conv.new_empty(spec.channels, 1, spec.conv_width)  # as checkpoints have it
        heads = torch.empty(2, spec.value_heads, device=placement.device, dtype=torch.float32)
        self._weights = GatedDeltaWeights(conv, a_log=heads[0], dt_bias=heads[1])

    def quantized_group(self, tokens: int) -> int:
        """Return 0: betas and decays need activations that are not quantized."""
        return 0

    def __call__(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Return the output before ``project``, [tokens, value_heads * value_dim]; update the states."""
        assert isinstance(x, Tensor)
        qkvz = self._qkvz.apply(x)
        mixed = qkvz[:, : self._channels]
        gates = qkvz[:, self._channels :]
        assert isinstance(backend.recurrent, GatedDelta)
        out = backend.recurrent.run(self._layer, mixed, self._ba.apply(x), self._weights)
        return self._ops.gated_rms_norm(out, gates, self._norm)

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> None:
        """Update the states."""
        self(x, rotary, backend)

    def project(self, mixed: Tensor) -> Tensor:
        """Return this shard's part of [tokens, hidden_size]."""
        return self._out.apply(mixed)

    def weight_shards(self) -> WeightShards:
        yield from self._qkvz.weight_shards()
        first = 0
        inputs = ShardRange.full(self._hidden_size)
        for name, (rows, size) in self._ba_ranges.items():
            outputs = ShardRange(0, len(rows), size)
            yield from prefixed(f"{name}.", self._ba.weight_shards(first, outputs, inputs, rows))
            first += len(rows)
        rows, size = self._rows.channels()
        yield "conv1d.weight", WeightShard(self._conv, (size, *self._conv.shape[1:]), rows=rows)
        for name, memory in (("A_log", self._weights.a_log), ("dt_bias", self._weights.dt_bias)):
            full = self._rows.num_value_heads
            yield name, WeightShard(memory, (full,), 0, self._rows.first_value_head)
        yield "norm.weight", WeightShard.full(self._norm)
        yield from self._out.weight_shards()

    def process_weights_after_loading(self) -> None:
        self._weights.conv.copy_(self._conv[:, 0].t())
        self._qkvz.process_weights_after_loading()
        self._ba.process_weights_after_loading()
        self._out.process_weights_after_loading()


class _ShardRows:
    """The outputs of the input projections that a shard has, in the order of its memory, and their number in full."""

    def __init__(self, spec: GatedDeltaSpec, shard: int, num_shards: int) -> None:
        """``spec`` describes the whole model."""
        count = spec.key_heads // num_shards
        self._spec = spec
        self._heads = range(shard * count, (shard + 1) * count)  # key heads of this shard
        self._group = spec.value_heads // spec.key_heads  # value heads of a key head
        self.num_value_heads = spec.value_heads
        self.first_value_head = self._heads.start * self._group

    def merged(self) -> dict[str, tuple[Tensor, int]]:
        spec = self._spec
        values = self._group * self._spec.value_dim
        sizes = [spec.key_dim, spec.key_dim, values, values]
        return {"in_proj_qkvz": self._by_head(sizes)}

    def merged_ba(self) -> dict[str, tuple[Tensor, int]]:
        return {"in_proj_ba": self._by_head([self._group, self._group])}

    def separate(self) -> dict[str, tuple[Tensor, int]]:
        values = self._group * self._spec.value_dim
        return {"in_proj_qkv": self.channels(), "in_proj_z": self._one_by_one([values])}

    def separate_ba(self) -> dict[str, tuple[Tensor, int]]:
        return {name: self._one_by_one([self._group]) for name in ("in_proj_b", "in_proj_a")}

    def channels(self) -> tuple[Tensor, int]:
        """Return the outputs of queries, keys and values."""
        spec = self._spec
        return self._one_by_one([spec.key_dim, spec.key_dim, self._group * spec.value_dim])

    def _by_head(self, sizes: list[int]) -> tuple[Tensor, int]:
        """Return outputs of several kinds, ``sizes`` per key head; the checkpoint has head after head."""
        of_head = sum(sizes)
        return self._runs(
            ((head * of_head + sum(sizes[:kind]), size) for kind, size in enumerate(sizes) for head in self._heads),
            of_head * self._spec.key_heads,
        )

    def _one_by_one(self, sizes: list[int]) -> tuple[Tensor, int]:
        """Return outputs of several kinds, ``sizes`` per key head; the checkpoint has kind after kind."""
        total = self._spec.key_heads
        return self._runs(
            (
                (total * sum(sizes[:kind]) + self._heads.start * size, len(self._heads) * size)
                for kind, size in enumerate(sizes)
            ),
            sum(sizes) * total,
        )

    @staticmethod
    def _runs(runs: Iterator[tuple[int, int]], total: int) -> tuple[Tensor, int]:
        return torch.cat([torch.arange(first, first + size) for first, size in runs]), total
