"""The part of a library model that one rank holds: layers, embedding, head, and its shard of cut tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from pdserve.errors import ConfigError
from runner.models.from_transformers.tensor_shards import TensorShards


@dataclass(frozen=True)
class ModelPart:
    """``layers`` of ``num_layers``. The first part has the embedding, the last one the final norm and the head."""

    num_layers: int
    layers: range
    is_first: bool = True
    is_last: bool = True
    shards: TensorShards | None = None

    @property
    def is_whole(self) -> bool:
        return self.shards is None and self.is_first and self.is_last and len(self.layers) == self.num_layers


class Elsewhere(nn.Module):
    """Stands where a module is that another part holds. Returns its first argument."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args else next(iter(kwargs.values()))


def body_of(model: Any) -> Any:
    """Return the part of a model that turns token ids into hidden states. Raises ConfigError."""
    for part in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if part is not model and isinstance(part, PreTrainedModel):
            return part
    raise ConfigError(f"{type(model).__name__} has no part that returns hidden states")


def layers_of(body: nn.Module, num_layers: int) -> tuple[str, nn.ModuleList]:
    """Return the list of a model's layers, and its name. Raises ConfigError."""
    for name, child in body.named_children():
        if isinstance(child, nn.ModuleList) and len(child) == num_layers:
            return name, child
    raise ConfigError(f"its body has no list of {num_layers} layers, so it cannot be split")


def take_part(model: Any, part: ModelPart) -> None:
    """Leave only ``part`` of a model on the device meta. Raises ConfigError for a model without a plan for it."""
    body = body_of(model)
    list_name, layers = layers_of(body, part.num_layers)
    for index in range(part.num_layers):
        if index not in part.layers:
            layers[index] = Elsewhere()
    plan = list(body.config.base_model_pp_plan or [list_name])
    first = plan[: plan.index(list_name)]
    last = plan[plan.index(list_name) + 1 :]
    tied = model.all_tied_weights_keys and model.config.get_text_config().tie_word_embeddings
    if not (part.is_first or (tied and part.is_last)):
        _remove(body, first)
    if not part.is_last:
        _remove(body, last)
        _remove(model, list(type(model)._pp_plan or {}))
        model.all_tied_weights_keys = {}
    if part.shards is not None:
        part.shards.cut(model)


def _remove(parent: nn.Module, names: list[str]) -> None:
    for name in names:
        if name in parent._modules:
            setattr(parent, name, Elsewhere())
