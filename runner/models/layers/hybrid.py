"""Parts of hybrids with Mamba2: factors of inputs and outputs, and mixers side by side."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import Activations, RotaryCosSin
from runner.models.layers.attention import Attention
from runner.models.layers.context import ModelContext
from runner.models.layers.mamba2 import Mamba2Mixer
from runner.models.layers.mlp import MLPBlock
from runner.models.layers.parallel_linear import MergedColumnParallelLinear, RowParallelLinear
from runner.models.layers.weight_shard import ShardRange, WeightShards, prefixed


class ScaledAttention(Attention):
    """Attention whose inputs and outputs are multiplied by the factors of a ``Mamba2Config``."""

    def __init__(self, context: ModelContext, layer: int) -> None:
        config = context.config
        assert config.mamba2 is not None
        super().__init__(context, layer, qkv_bias=config.attention_bias, out_bias=config.attention_bias)
        self._in_scale = config.mamba2.attention_in_scale
        self._out_scale = config.mamba2.attention_out_scale * config.mamba2.residual_scale
        if self._in_scale != 1:
            self.quantized_group = lambda tokens: 0

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        if self._in_scale != 1:
            assert isinstance(x, Tensor)
            x = x * self._in_scale
        return super().store(x, rotary, backend)

    def project(self, attended: Tensor) -> Tensor:
        output = super().project(attended)
        return output if self._out_scale == 1 else output * self._out_scale


class ParallelMixers:
    """Attention and Mamba2 from the same inputs; their results are added (Falcon-H1)."""

    name = "mixers"

    def __init__(self, attention: Attention, mamba2: Mamba2Mixer) -> None:
        self._attention = attention
        self._mamba2 = mamba2
        self._num_attended = attention.heads.size

    def quantized_group(self, tokens: int) -> int:
        """Return 0: the projections may need different forms."""
        return 0

    def __call__(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        """Return both outputs before ``project``, side by side."""
        return torch.cat((self._attention(x, rotary, backend), self._mamba2(x, rotary, backend)), dim=1)

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> None:
        """Store keys and values, and update the states."""
        self._attention.store(x, rotary, backend)
        self._mamba2.store(x, rotary, backend)

    def project(self, mixed: Tensor) -> Tensor:
        """Return this shard's part of [tokens, hidden_size]."""
        attended = mixed[:, : self._num_attended].contiguous()
        return self._attention.project(attended) + self._mamba2.project(mixed[:, self._num_attended :].contiguous())

    def weight_shards(self) -> WeightShards:
        for mixer in (self._attention, self._mamba2):
            yield from prefixed(f"{mixer.name}.", mixer.weight_shards())

    def process_weights_after_loading(self) -> None:
        self._attention.process_weights_after_loading()
        self._mamba2.process_weights_after_loading()


class FactoredMLP:
    """down(silu(gate(x) * gate_scale) * up(x)) * scale; gate and up may be one tensor of the checkpoint."""

    def __init__(
        self, context: ModelContext, intermediate_size: int, *, fused: bool, gate_scale: float = 1.0, scale: float = 1.0
    ) -> None:
        """``intermediate_size`` counts all shards. ``fused``: tensors are input_linear and output_linear."""
        config = context.config
        self._activation = context.silu
        self._gate_scale = gate_scale
        self._scale = scale
        inner = ShardRange.even(intermediate_size, context.position)
        self._inner = inner.size
        outputs = {"gate_proj": inner, "up_proj": inner}
        rows = {}
        if fused:
            outputs = {"input_linear": ShardRange(0, 2 * inner.size, 2 * inner.full_size)}
            gates = torch.arange(inner.start, inner.start + inner.size)
            rows["input_linear"] = torch.cat((gates, gates + inner.full_size))
        self._gate_up = MergedColumnParallelLinear(context, config.hidden_size, outputs, config.mlp_bias, rows)
        name = "output_linear" if fused else "down_proj"
        self._down = RowParallelLinear(context, name, inner, config.hidden_size, config.mlp_bias)
        self.quantized_group = self._gate_up.quantized_group

    def apply(self, x: Activations) -> Tensor:
        gate_up = self._gate_up.apply(x)
        if self._gate_scale != 1:
            gate_up[:, : self._inner] *= self._gate_scale
        output = self._down.apply_gated(gate_up, self._activation)
        return output if self._scale == 1 else output * self._scale

    def weight_shards(self) -> WeightShards:
        yield from self._gate_up.weight_shards()
        yield from self._down.weight_shards()

    def process_weights_after_loading(self) -> None:
        self._gate_up.process_weights_after_loading()
        self._down.process_weights_after_loading()


class ScaledBlock:
    """An MLP, or experts, whose result is multiplied by a factor."""

    def __init__(self, block: MLPBlock, scale: float) -> None:
        self._block = block
        self._scale = scale
        self.quantized_group = block.quantized_group
        self.weight_shards = block.weight_shards
        self.process_weights_after_loading = block.process_weights_after_loading

    def apply(self, x: Activations) -> Tensor:
        return self._block.apply(x) * self._scale
