"""Mamba2 mixer (arXiv:2405.21060) with a short convolution, as Granite 4, Nemotron-H and Falcon-H1 have it.

    x ─► in_proj ─┬─► C, B, values ─► short convolution, silu ─► state space ─► × silu(gates), RMS norm ─► out_proj
                  ├─► time steps ──────────────────────────────────┘               │
                  └─► gates ───────────────────────────────────────────────────────┘

The state space and the convolution keep a state per sequence: runner/attention/mamba2.py computes both.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from pdserve.kv.states import Mamba2Spec
from pdserve.model.mamba2 import Mamba2Config
from runner.attention import AttentionBackend
from runner.attention.gated_delta import GatedDelta
from runner.batch import Activations, Mamba2Weights, RotaryCosSin
from runner.models.layers.context import ModelContext
from runner.models.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards


class Mamba2Mixer:
    """Takes the place of ``Attention`` in a recurrent layer. Shards have consecutive groups, with their heads."""

    name = "mamba"

    def __init__(self, context: ModelContext, layer: int) -> None:
        """``layer`` counts the recurrent layers of this rank from 0 on."""
        config = context.config
        position = context.position
        assert isinstance(config.state, Mamba2Spec)
        assert config.mamba2 is not None
        self._layer = layer
        self._ops = context.ops
        self._mamba2 = mamba2 = config.mamba2
        self._rows = rows = _ShardRows(config.state, position.shard, position.parallel.tp)
        self._spec = spec = config.state.split(position.parallel.tp)
        order = {"in_proj": rows.inputs()}
        inputs = {"in_proj": ShardRange(0, len(order["in_proj"]), rows.num_inputs)}
        self._in = MergedColumnParallelLinear(context, config.hidden_size, inputs, mamba2.in_bias, order)
        self.quantized_group = self._in.quantized_group
        values = ShardRange.even(config.state.out_inputs, position)
        self._values = values
        self._out = RowParallelLinear(context, "out_proj", values, config.hidden_size, mamba2.out_bias)
        self._out_scale = mamba2.out_scale * mamba2.residual_scale
        device = context.placement.device
        dtype = context.placement.dtype
        conv = torch.empty(spec.conv_width, spec.channels, device=device, dtype=dtype)
        self._norm = None if mamba2.norm == "none" else conv.new_empty(values.size)
        self._conv = conv.new_empty(spec.channels, 1, spec.conv_width)  # as checkpoints have it
        heads = torch.empty(3, spec.value_heads, device=device, dtype=torch.float32)
        self._weights = Mamba2Weights(
            conv=conv,
            conv_bias=heads.new_empty(spec.channels) if mamba2.conv_bias else None,
            a_log=heads[0],
            dt_bias=heads[1],
            skip=heads[2],
            least_step=mamba2.least_step,
            most_step=math.inf if mamba2.most_step is None else mamba2.most_step,
        )
        self._input_scales = _input_scales(mamba2, spec, device, dtype)

    def __call__(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Return the output before ``project``, [tokens, value_heads * value_dim]; update the states."""
        spec = self._spec
        projected = self._in.apply(x)
        if self._input_scales is not None:
            projected = projected * self._input_scales
        mixed, gates, steps = projected.split([spec.channels, spec.out_inputs, spec.value_heads], dim=1)
        assert isinstance(backend.recurrent, GatedDelta)
        out = backend.recurrent.run(self._layer, mixed, steps, self._weights)
        gate_first = self._mamba2.norm == "behind gate"
        return self._ops.grouped_gated_norm(out.flatten(1), gates, self._norm, spec.key_heads, gate_first)

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> None:
        """Update the states."""
        self(x, rotary, backend)

    def project(self, mixed: Tensor) -> Tensor:
        """Return this shard's part of [tokens, hidden_size]."""
        output = self._out.apply(mixed)
        return output if self._out_scale == 1 else output * self._out_scale

    def weight_shards(self) -> WeightShards:
        yield from self._in.weight_shards()
        rows = self._rows.channels()
        count = self._rows.num_channels
        yield "conv1d.weight", WeightShard(self._conv, (count, *self._conv.shape[1:]), rows=rows)
        if self._weights.conv_bias is not None:
            yield "conv1d.bias", WeightShard(self._weights.conv_bias, (count,), rows=rows)
        heads = self._rows.heads
        for name, memory in (
            ("A_log", self._weights.a_log),
            ("dt_bias", self._weights.dt_bias),
            ("D", self._weights.skip),
        ):
            yield name, WeightShard(memory, (self._rows.num_heads,), 0, heads.start)
        if self._norm is not None:
            yield "norm.weight", WeightShard(self._norm, (self._values.full_size,), 0, self._values.start)
        yield from self._out.weight_shards()

    def process_weights_after_loading(self) -> None:
        self._weights.conv.copy_(self._conv[:, 0].t())
        self._in.process_weights_after_loading()
        self._out.process_weights_after_loading()


class _ShardRows:
    """The outputs of ``in_proj``, and the channels of the convolution, that a shard has, in the order of its memory.

    The checkpoint has gates, values, B, C and time steps; memory has C, B, values, gates and time steps: the channels
    of the convolution as those of a gated delta net, whose kernels then serve both.
    """

    def __init__(self, spec: Mamba2Spec, shard: int, num_shards: int) -> None:
        """``spec`` describes the whole model."""
        groups = spec.key_heads // num_shards
        heads = spec.value_heads // num_shards
        self.num_heads = spec.value_heads
        self.num_channels = spec.channels
        self.num_inputs = spec.channels + spec.out_inputs + spec.value_heads
        self.heads = range(shard * heads, (shard + 1) * heads)
        self._values = torch.arange(self.heads.start * spec.value_dim, self.heads.stop * spec.value_dim)
        self._keys = torch.arange(shard * groups * spec.key_dim, (shard + 1) * groups * spec.key_dim)
        self._num_keys = spec.key_heads * spec.key_dim
        self._num_values = spec.out_inputs

    def channels(self) -> Tensor:
        keys = self._num_values + self._keys
        return torch.cat((keys + self._num_keys, keys, self._values))

    def inputs(self) -> Tensor:
        steps = self._num_values + self.num_channels + torch.arange(self.heads.start, self.heads.stop)
        return torch.cat((self._num_values + self.channels(), self._values, steps))


def _input_scales(mamba2: Mamba2Config, spec: Mamba2Spec, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    """Return the factors of what a shard's ``in_proj`` returns, in the order of its memory; None if all are 1."""
    if all(scale == 1 for scale in mamba2.input_scales):
        return None
    gates, values, b, c, steps = mamba2.input_scales
    keys = spec.key_heads * spec.key_dim
    sizes = torch.tensor([keys, keys, spec.out_inputs, spec.out_inputs, spec.value_heads])
    return torch.tensor([c, b, values, gates, steps]).repeat_interleave(sizes).to(device, dtype)
