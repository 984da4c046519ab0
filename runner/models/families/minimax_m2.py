"""MiniMax-M2: norms over all query heads together and over all key heads, and Mixtral's names of experts."""

from __future__ import annotations

import torch
from torch import Tensor

from runner.attention import AttentionBackend
from runner.batch import Activations, RotaryCosSin
from runner.models.families.mixtral import MixtralForCausalLM
from runner.models.layers.attention import Attention
from runner.models.layers.context import ModelContext
from runner.models.layers.weight_shard import WeightShard, WeightShards


class MiniMaxM2Attention(Attention):
    def __init__(self, context: ModelContext, layer: int) -> None:
        super().__init__(context, layer)
        placement = context.placement
        self._parallel = context.parallel
        self._eps = context.config.rms_norm_eps
        # [queries and keys of this shard]
        self._weight = torch.empty(self.heads.size + self.kv_heads.size, device=placement.device, dtype=placement.dtype)

    def store(self, x: Activations, rotary: RotaryCosSin, backend: AttentionBackend) -> Tensor:
        qkv = self._qkv.apply(x)
        self._norm(qkv[:, : len(self._weight)])
        return backend.prepare_and_store(self._layer, qkv, rotary, None)

    def norm_weights(self) -> WeightShards:
        parts = self._weight.split([self.heads.size, self.kv_heads.size])
        for name, memory, heads in zip(("q_norm", "k_norm"), parts, (self.heads, self.kv_heads), strict=True):
            yield f"{name}.weight", WeightShard(memory, (heads.full_size,), 0, heads.start)

    def _norm(self, qk: Tensor) -> None:
        """Norm queries and keys [tokens, size] in place, in float32. All shards hold equally many heads."""
        sizes = [self.heads.size, self.kv_heads.size]
        values = qk.float()
        means = torch.stack([part.square().mean(-1) for part in values.split(sizes, dim=-1)], dim=-1)
        scales = (self._parallel.all_reduce(means) / self._parallel.position.parallel.tp + self._eps).rsqrt()
        for part, target, weight, scale in zip(
            values.split(sizes, dim=-1),
            qk.split(sizes, dim=-1),
            self._weight.split(sizes),
            scales.split(1, dim=-1),
            strict=True,
        ):
            target.copy_((part * scale).to(qk.dtype) * weight)


class MiniMaxM2ForCausalLM(MixtralForCausalLM):
    def make_attention(self, layer: int) -> Attention:
        return MiniMaxM2Attention(self.context, layer)

    def checkpoint_name(self, name: str) -> str:
        return super().checkpoint_name(name.replace(".gate.e_score_", ".e_score_"))
