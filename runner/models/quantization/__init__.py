"""Weight formats of linear layers and experts, one file each; their table is in ``pdserve/model/quantization``."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from pdserve.model.quantization.layer_form import LayerForm
from runner.batch import Quantized, Routing, SharedGate
from runner.models.layers.weight_shard import ShardRange, WeightShards
from runner.placement import TensorPlacement

#: The form in which a layer keeps its weights; without one, the checkpoint's quantization_config.
LayerOptions = LayerForm | Mapping[str, Any]


class GatedActivation(NamedTuple):
    """The activation of gates times ups. Kernels that quantize its result compute SiLU themselves."""

    values: Callable[[Tensor], Tensor]  # [rows, size] of gates and ups [rows, 2 * size]
    is_silu: bool = True
    has_gates: bool = True  # else ``values`` takes ups only, [rows, size]

    def __call__(self, gate_up: Tensor) -> Tensor:
        return self.values(gate_up)


class LinearMethod(ABC):
    """The weights of one linear layer in one format, and y = x Wᵀ + b with them (vLLM's LinearMethodBase).

    Fill all ``weight_shards``, then call ``process_weights_after_loading``, then ``apply``.

    Adapters per request (LoRA) are a method around this one: ``AdaptedLinear`` in runner/models/adapters.
    """

    bias: Tensor | None  # [out_features]

    @abstractmethod
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        placement: TensorPlacement,
        options: LayerOptions | None = None,
    ) -> None:
        """Create empty weights."""

    @abstractmethod
    def weight_shards(
        self, first_output: int, outputs: ShardRange, inputs: ShardRange, rows: Tensor | None = None
    ) -> WeightShards:
        """Yield the tensors of one projection, named behind the projection's name, such as "weight".

        A layer may merge several projections. The memory of this one begins at row ``first_output`` and has
        ``outputs.size`` rows; it holds the given ranges of the checkpoint's outputs and inputs. With ``rows``
        [outputs.size] it holds these outputs, in this order, and all inputs.
        """

    @abstractmethod
    def process_weights_after_loading(self) -> None:
        """Bring filled weights into the form that ``apply`` uses."""

    @abstractmethod
    def restore_weights(self) -> None:
        """Undo ``process_weights_after_loading``, bit for bit, where it has packed weights.

        Until then the memory of their ``weight_shards`` is on the device meta, and ``restore`` is this method.
        """

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Return y [tokens, out_features] of x [tokens, in_features]."""

    def quantized_group(self, tokens: int) -> int:
        """Return the inputs per scale for ``apply_quantized`` in a step of ``tokens``; 0 if ``apply`` must be used."""
        return 0

    def apply_quantized(self, x: Quantized) -> Tensor:
        """Return y of x [tokens, in_features], which has a scale per ``quantized_group`` inputs."""
        raise NotImplementedError(f"{type(self).__name__} takes no quantized activations")

    def apply_gated(self, gate_up: Tensor, activation: GatedActivation) -> Tensor:
        """Return y of the activation of gate_up [tokens, 2 * in_features]."""
        return self.apply(activation(gate_up))


class ExpertsShard(NamedTuple):
    """A rank's part of the experts of one layer."""

    local: range  # the experts that it holds, or holds a slice of
    num_experts: int  # all experts of the layer
    hidden_size: int
    inner: ShardRange  # part of each expert's intermediate size


class ExpertsMethod(ABC):
    """The stacked weights of a layer's experts in one format, and their products (vLLM's FusedMoEMethodBase).

    Fill all ``weight_shards``, then call ``process_weights_after_loading``, then ``apply``.
    """

    @abstractmethod
    def __init__(
        self,
        shard: ExpertsShard,
        activation: GatedActivation,
        placement: TensorPlacement,
        options: LayerOptions | None = None,
    ) -> None:
        """Create empty weights.

        ``activation`` returns an expert's inner values [rows, inner.size] of gates and ups [rows, 2 * inner.size].
        """

    @abstractmethod
    def weight_shards(self) -> WeightShards:
        """Yield the tensors, named behind the layer's "mlp.experts.", such as "0.gate_proj.weight"."""

    @abstractmethod
    def process_weights_after_loading(self) -> None:
        """Bring filled weights into the form that ``apply`` uses."""

    @abstractmethod
    def apply(
        self, x: Tensor, routing: Routing, shared: Tensor | None = None, gate: SharedGate | None = None
    ) -> Tensor:
        """Return the weighted sum of each token's local experts, plus ``shared``; all [tokens, hidden_size].

        With ``gate``, each token of ``shared`` counts with its part.
        On GPUs with Triton the call never waits for the device.
        """


def linear_method_class(path: str) -> type[LinearMethod]:
    """Import a linear method by its "module.Class" below this package."""
    method: type[LinearMethod] = _imported(path)
    return method


def experts_method_class(path: str) -> type[ExpertsMethod]:
    """Import an experts method by its "module.Class" below this package."""
    method: type[ExpertsMethod] = _imported(path)
    return method


def _imported(path: str) -> Any:
    module, name = path.split(".")
    return getattr(importlib.import_module(f"runner.models.quantization.{module}"), name)
