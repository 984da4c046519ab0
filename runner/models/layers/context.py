"""The context that all layers of a rank's model are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdserve.config.parallel import RankPosition
from pdserve.model.model_config import ModelConfig
from runner.distributed.parallel_state import ParallelState
from runner.models.layers.pointwise_ops import PointwiseOps
from runner.models.layers.weight_shard import ShardRange
from runner.models.quantization import (
    ExpertsMethod,
    ExpertsShard,
    LinearMethod,
    experts_method_class,
    linear_method_class,
)
from runner.placement import TensorPlacement


@dataclass(frozen=True)
class ModelContext:
    config: ModelConfig  # the whole model's
    parallel: ParallelState
    placement: TensorPlacement
    ops: PointwiseOps
    linear_method: type[LinearMethod]  # for the checkpoint's weight format
    experts_method: type[ExpertsMethod]
    linears: dict[tuple[int, int], LinearMethod] = field(default_factory=dict)  # one of each shape, for warming up

    @classmethod
    def build(cls, config: ModelConfig, parallel: ParallelState, placement: TensorPlacement) -> ModelContext:
        ops = PointwiseOps
        if placement.use_triton:  # Triton is imported only where it is used
            from runner.models.layers.triton_ops import TritonPointwiseOps

            ops = TritonPointwiseOps
        methods = linear_method_class(config.linear_format), experts_method_class(config.linear_format)
        return cls(config, parallel, placement, ops(config.rms_norm_eps, parallel), *methods)

    @property
    def position(self) -> RankPosition:
        return self.parallel.position

    def linear(self, in_features: int, outputs: Mapping[str, ShardRange], bias: bool) -> LinearMethod:
        """Create a linear layer of a rank in the checkpoint's weight format.

        It merges projections: ``outputs`` has this rank's outputs of each one, by its name in the checkpoint.
        """
        out_features = sum(output.size for output in outputs.values())
        linear = self.linear_method(in_features, out_features, bias, self.placement, self.config.quantization)
        self.linears[in_features, out_features] = linear
        return linear

    def experts(self, shard: ExpertsShard) -> ExpertsMethod:
        """Create a rank's experts of a layer in the checkpoint's weight format."""
        return self.experts_method(shard, self.ops.silu_and_mul, self.placement, self.config.quantization)
