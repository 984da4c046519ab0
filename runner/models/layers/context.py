"""The context that all layers of a rank's model are built from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch.nn.functional as F

from pdserve.config.parallel import RankPosition
from pdserve.model.model_config import ModelConfig
from pdserve.model.quantization.kept_weights import EXPERTS, METHODS
from pdserve.model.quantization.layer_form import LayerForm
from runner.distributed.parallel_state import ParallelState
from runner.models.adapters.adapted_linear import AdaptedLinear
from runner.models.adapters.slots import AdapterSlots
from runner.models.layers.pointwise_ops import PointwiseOps
from runner.models.layers.weight_shard import ShardRange
from runner.models.quantization import (
    ExpertsMethod,
    ExpertsShard,
    GatedActivation,
    LinearMethod,
    experts_method_class,
    linear_method_class,
)
from runner.placement import TensorPlacement

SQUARED_RELU = GatedActivation(lambda ups: F.relu(ups).square_(), is_silu=False, has_gates=False)


@dataclass(frozen=True)
class ModelContext:
    config: ModelConfig  # the whole model's
    parallel: ParallelState
    placement: TensorPlacement
    ops: PointwiseOps
    adapters: AdapterSlots | None = None  # None: the layers take no adapters
    layer: int = -1  # number in the whole model of the layer whose parts are being created
    #: A linear layer of each shape and form, for warming up; by inputs, outputs and form.
    linears: dict[tuple[int, int, LayerForm | None], LinearMethod] = field(default_factory=dict)

    @classmethod
    def build(
        cls,
        config: ModelConfig,
        parallel: ParallelState,
        placement: TensorPlacement,
        adapters: AdapterSlots | None = None,
    ) -> ModelContext:
        ops = PointwiseOps
        if placement.use_triton:  # Triton is imported only where it is used
            from runner.models.layers.triton_ops import TritonPointwiseOps

            ops = TritonPointwiseOps
        return cls(config, parallel, placement, ops(config.rms_norm_eps, parallel), adapters)

    @property
    def position(self) -> RankPosition:
        return self.parallel.position

    def linear(self, in_features: int, outputs: Mapping[str, ShardRange], bias: bool) -> LinearMethod:
        """Create a linear layer of a rank in the form that it has in memory.

        It merges projections: ``outputs`` has this rank's outputs of each one, by its name in the checkpoint.
        """
        forms = {self._form(name) for name in outputs}
        assert len(forms) == 1, "keep_layers gives projections of one product one form"
        (form,) = forms
        out_features = sum(output.size for output in outputs.values())
        linear = self.quantized_linear(in_features, out_features, form, bias)
        self.linears[in_features, out_features, form] = linear
        return self.adapted(linear, in_features, outputs)

    def adapted(self, linear: LinearMethod, in_features: int, outputs: Mapping[str, ShardRange]) -> LinearMethod:
        """Return the layer with adapters around it; the layer itself if the model takes none."""
        if self.adapters is None:
            return linear
        return AdaptedLinear(linear, self.adapters.add(in_features, [output.size for output in outputs.values()]))

    def quantized_linear(
        self, in_features: int, out_features: int, form: LayerForm | None, bias: bool = False
    ) -> LinearMethod:
        """Create a linear layer in a form; None: that of the checkpoint's weight format."""
        path = self.config.linear_format.linear_method if form is None else METHODS[form.kind].linear
        options = form or self.config.quantization
        return linear_method_class(path)(in_features, out_features, bias, self.placement, options)

    @property
    def silu(self) -> GatedActivation:
        return GatedActivation(self.ops.silu_and_mul)

    def experts(self, shard: ExpertsShard, activation: GatedActivation | None = None) -> ExpertsMethod:
        """Create a rank's experts of a layer in the form that they have in memory; experts with biases are others.

        ``activation`` None: SiLU, or the square of ReLU for experts without gates.
        """
        form = self.experts_form
        path = self.config.linear_format.experts_method if form is None else METHODS[form.kind].experts
        options = form or self.config.quantization
        usual = self.silu if self.config.has_gates else SQUARED_RELU
        return experts_method_class(path)(shard, activation or usual, self.placement, options)

    @property
    def experts_form(self) -> LayerForm | None:
        """The form of the layer's experts in memory; None: as the checkpoint's weight format says."""
        return self._form(EXPERTS)

    def _form(self, part: str) -> LayerForm | None:
        return self.config.layer_forms.get(f"{self.layer}.{part}")
