"""Linear layers of a model of the library on a CPU: packed once, as native models pack theirs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch import Tensor, nn

from runner.models.quantization.unquantized import UnquantizedLinearMethod
from runner.placement import TensorPlacement


class PackedLinear(nn.Linear):
    """A linear layer whose weight is packed, and unpacked for the few layers that read it themselves."""

    method: UnquantizedLinearMethod
    dtype: torch.dtype  # dtype of packed products

    @property
    def weight(self) -> Tensor:  # type: ignore[override]
        kept = self._parameters.get("weight")
        return self.method.plain_weight() if kept is None else kept

    def forward(self, x: Tensor) -> Tensor:
        """Return [..., out_features] of x [..., in_features]; in float32 for a self-test, by the plain weight."""
        if x.dtype != self.dtype:
            return nn.functional.linear(x, self.weight, self.bias)
        y = self.method.apply(x.reshape(-1, self.in_features).contiguous())
        return y.view(*x.shape[:-1], self.out_features)


def pack_linear_layers(model: nn.Module, placement: TensorPlacement) -> None:
    """Pack the weights of plain linear layers for oneDNN. A weight that another module also uses is kept, too."""
    if placement.device.type != "cpu":
        return
    uses = Counter(id(weight) for _, weight in model.named_parameters(remove_duplicate=False))
    layer: Any
    for layer in model.modules():
        if type(layer) is not nn.Linear or layer.weight.dtype != placement.dtype or not layer.weight.numel():
            continue
        method = UnquantizedLinearMethod(0, 0, False, placement)
        method.weight = layer.weight.data
        method.bias = None if layer.bias is None else layer.bias.data
        method.process_weights_after_loading()
        if uses[id(layer.weight)] == 1:
            del layer._parameters["weight"]
        layer.__class__ = PackedLinear
        layer.__dict__["method"] = method
        layer.__dict__["dtype"] = placement.dtype
