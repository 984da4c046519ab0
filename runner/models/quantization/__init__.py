"""Weight formats of linear layers, one file each. ``pdserve/config/weight_formats.py`` names them and their sizes."""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from pdserve.config.weight_formats import WEIGHT_FORMATS
from runner.models.layers.weight_shard import ShardRange, WeightShards
from runner.placement import TensorPlacement


class LinearMethod(ABC):
    """The weights of one linear layer in one format, and y = x Wᵀ + b with them (vLLM's LinearMethodBase).

    Fill all ``weight_shards``, then call ``process_weights_after_loading``, then ``apply``.
    """

    bias: Tensor | None  # [out_features]

    @abstractmethod
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        placement: TensorPlacement,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        """Create empty weights. ``options`` is the checkpoint's quantization_config."""

    @abstractmethod
    def weight_shards(self, first_output: int, outputs: ShardRange, inputs: ShardRange) -> WeightShards:
        """Yield the tensors of one projection, named behind the projection's name, such as "weight".

        A layer may merge several projections. The memory of this one begins at row ``first_output`` and has
        ``outputs.size`` rows; it holds the given ranges of the checkpoint's outputs and inputs.
        """

    @abstractmethod
    def process_weights_after_loading(self) -> None:
        """Bring filled weights into the form that ``apply`` uses."""

    @abstractmethod
    def apply(self, x: Tensor) -> Tensor:
        """Return y [tokens, out_features] of x [tokens, in_features]."""


def linear_method_class(weight_format: str) -> type[LinearMethod]:
    """Import the linear method of a weight format."""
    module, name = WEIGHT_FORMATS[weight_format].linear_method.split(".")
    method: type[LinearMethod] = getattr(importlib.import_module(f"runner.models.quantization.{module}"), name)
    return method
