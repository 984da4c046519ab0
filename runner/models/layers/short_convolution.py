"""Gated short convolution, as LFM2 has it.

    x ─► in_proj ─► B, C, values      B × values ─► short convolution ─► × C ─► out_proj

The convolution keeps its last inputs per sequence: runner/attention/short_conv.py computes it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.kv.states import ShortConvSpec
from runner.attention import AttentionBackend
from runner.attention.short_conv import ShortConv
from runner.batch import Activations, RotaryCosSin, ShortConvWeights
from runner.models.layers.context import ModelContext
from runner.models.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards


class ShortConvolution:
    """Takes the place of ``Attention`` in a recurrent layer. Shards have consecutive channels."""

    name = "conv"

    def __init__(self, context: ModelContext, layer: int) -> None:
        """``layer`` counts the recurrent layers of this rank from 0 on."""
        config = context.config
        placement = context.placement
        assert isinstance(config.state, ShortConvSpec)
        self._layer = layer
        self._channels = channels = ShardRange.even(config.state.channels, context.position)
        bias = config.conv_bias
        outputs = {"in_proj": ShardRange(0, 3 * channels.size, 3 * channels.full_size)}
        mine = torch.arange(channels.start, channels.start + channels.size)
        rows = torch.cat([part * channels.full_size + mine for part in range(3)])
        self._in = MergedColumnParallelLinear(context, config.hidden_size, outputs, bias, {"in_proj": rows})
        self._out = RowParallelLinear(context, "out_proj", channels, config.hidden_size, bias)
        self.quantized_group = self._in.quantized_group  # see MLPBlock
        width = config.state.conv_width
        conv = torch.empty(width, channels.size, device=placement.device, dtype=placement.dtype)
        self._conv = conv.new_empty(channels.size, 1, width)  # as checkpoints have it
        self._weights = ShortConvWeights(conv, conv.new_empty(channels.size) if bias else None)

    def __call__(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Return the output before ``project``, [tokens, channels]; update the states."""
        assert isinstance(backend.recurrent, ShortConv)
        before, behind, values = self._in.apply(x).split(self._channels.size, dim=-1)
        convolved = backend.recurrent.run(self._layer, before * values, self._weights)
        return convolved.mul_(behind)

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> None:
        """Update the states."""
        self(x, rotary, backend)

    def project(self, mixed: Tensor) -> Tensor:
        """Return this shard's part of [tokens, hidden_size]."""
        return self._out.apply(mixed)

    def weight_shards(self) -> WeightShards:
        channels = self._channels
        yield from self._in.weight_shards()
        yield "conv.weight", WeightShard(self._conv, (channels.full_size, *self._conv.shape[1:]), 0, channels.start)
        if self._weights.bias is not None:
            yield "conv.bias", WeightShard(self._weights.bias, (channels.full_size,), 0, channels.start)
        yield from self._out.weight_shards()

    def process_weights_after_loading(self) -> None:
        self._weights.conv.copy_(self._conv[:, 0].t())
        self._in.process_weights_after_loading()
        self._out.process_weights_after_loading()
