"""A mixture of experts: a router chooses a few experts for each token; shared experts take every token."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.moe import MoEConfig
from runner.batch import Activations, Routing, SharedGate
from runner.kernels.experts import expert_reference
from runner.models.layers.context import ModelContext
from runner.models.layers.mlp import MLP, MLPBlock
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards, prefixed
from runner.models.quantization import ExpertsMethod, ExpertsShard
from runner.models.quantization.biased_experts import BiasedExperts
from runner.placement import TensorPlacement


class Router:
    """Scores in float32, of the whole layer on every shard. Shards sum exactly the same inputs, so they agree."""

    def __init__(self, moe: MoEConfig, hidden_size: int, placement: TensorPlacement) -> None:
        # Products of 16-bit numbers are exact in float32, so a GPU's 16-bit weights give float32 scores.
        self._narrow = placement.device.type == "cuda" and placement.dtype != torch.float32
        dtype = placement.dtype if self._narrow else torch.float32
        self.weight = torch.empty(moe.num_experts, hidden_size, device=placement.device, dtype=dtype)
        self.correction_bias: Tensor | None = None  # [num_experts] float32
        if moe.has_correction_bias:
            self.correction_bias = torch.empty(moe.num_experts, device=placement.device, dtype=torch.float32)
        self.bias: Tensor | None = None  # [num_experts] float32
        if moe.has_bias:
            self.bias = torch.empty(moe.num_experts, device=placement.device, dtype=torch.float32)
        self._moe = moe
        self._choose: Callable[..., Routing] = expert_reference.choose_experts
        if placement.use_triton:  # Triton is imported only where it is used
            from runner.kernels.experts.routing import choose_experts

            self._choose = choose_experts

    def __call__(self, x: Tensor) -> Routing:
        """Choose experts for x [tokens, hidden_size]."""
        moe = self._moe
        return self._choose(
            self._logits(x),
            self.correction_bias,
            top_k=moe.top_k,
            sigmoid=moe.scoring == "sigmoid",
            renormalize=moe.renormalize,
            groups=(moe.num_expert_group, moe.topk_group),
            best_of_group=moe.best_of_group,
            scale=moe.routed_scaling_factor,
        )

    def weight_shards(self) -> WeightShards:
        yield "weight", WeightShard.full(self.weight)
        if self.bias is not None:
            yield "bias", WeightShard.full(self.bias)
        if self.correction_bias is not None:
            yield "e_score_correction_bias", WeightShard.full(self.correction_bias)

    def _logits(self, x: Tensor) -> Tensor:
        """Return [tokens, num_experts] float32."""
        if self._narrow:
            logits = torch.mm(x, self.weight.t(), out_dtype=torch.float32)
            return logits if self.bias is None else logits.add_(self.bias)
        return F.linear(x.float(), self.weight, self.bias)


class MixtureOfExperts:
    """``--tp`` slices each expert along its intermediate size; with ``--ep`` a shard holds whole experts.

    Shards see the same tokens and choose the same experts. Each computes its part for all tokens, and the sum over the
    shards, which the next norm takes anyway, adds them up.
    """

    router_class = Router

    def __init__(self, context: ModelContext, make_shared: Callable[[ModelContext, int], MLPBlock] = MLP) -> None:
        """Experts with biases are ``BiasedExperts``; others have the form of their layer.

        ``make_shared`` makes the shared experts, given their intermediate size.
        """
        config = context.config
        placement = context.placement
        moe = config.moe
        assert moe is not None
        self._router = self.router_class(moe, config.hidden_size, placement)
        position = context.position
        size = moe.intermediate_size
        inner = ShardRange.even(size, position) if position.parallel.ep == 1 else ShardRange.full(size)
        shard = ExpertsShard(position.local_experts(moe), moe.num_experts, config.hidden_size, inner)
        self._experts: ExpertsMethod = (
            BiasedExperts(shard, moe, placement, mxfp4=context.experts_form is not None)
            if moe.has_bias
            else context.experts(shard)
        )
        self._shared = make_shared(context, moe.shared_intermediate_size) if moe.shared_intermediate_size else None
        self._shared_gate: Tensor | None = None  # [1, hidden_size]
        if moe.has_shared_gate:
            self._shared_gate = torch.empty(1, config.hidden_size, device=placement.device, dtype=placement.dtype)

    def quantized_group(self, tokens: int) -> int:
        """Return 0: the router needs activations that are not quantized."""
        return 0

    def apply(self, x: Activations) -> Tensor:
        """Return this shard's part of [tokens, hidden_size] of x [tokens, hidden_size]; never waits for the device."""
        assert isinstance(x, Tensor)
        shared = None if self._shared is None else self._shared.apply(x)
        gate = None if self._shared_gate is None else SharedGate(x, self._shared_gate)
        return self._experts.apply(x, self._router(x), shared, gate)

    def weight_shards(self) -> WeightShards:
        yield from prefixed("gate.", self._router.weight_shards())
        yield from prefixed("experts.", self._experts.weight_shards())
        if self._shared is not None:
            yield from prefixed("shared_experts.", self._shared.weight_shards())
        if self._shared_gate is not None:
            yield "shared_expert_gate.weight", WeightShard.full(self._shared_gate)

    def process_weights_after_loading(self) -> None:
        self._experts.process_weights_after_loading()
        if self._shared is not None:
            self._shared.process_weights_after_loading()
