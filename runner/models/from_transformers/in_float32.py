"""A model of 16 bits computes in float32 for its self-test, with the weights that it has.

Rounding to 16 bits hides a small error of attention or state, and sends tokens to other experts. In float32 nothing is
hidden. Layers are widened one at a time while they run, so memory for one more layer, embedding and head suffices.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from pdserve.errors import ConfigError
from runner.models.from_transformers.packed_linear import PackedLinear
from runner.models.from_transformers.part import body_of, layers_of

_NARROW = (torch.bfloat16, torch.float16)


@contextmanager
def in_float32(model: Any, num_layers: int) -> Iterator[None]:
    """Let a model compute in float32. The tensors that it has stay as they are."""
    layers = _layers(model, num_layers)
    inside = {module for layer in layers for module in layer.modules()}
    with ExitStack() as hooks:
        for layer in layers:
            _widen_while_it_runs(layer, hooks)
        hooks.callback(_widen(module for module in model.modules() if module not in inside))
        yield


def _layers(model: Any, num_layers: int) -> list[nn.Module]:
    """Return the layers; none for a model without a list of layers, which is widened as a whole."""
    try:
        return list(layers_of(body_of(model), num_layers)[1])
    except ConfigError:
        return []


def _widen_while_it_runs(layer: nn.Module, hooks: ExitStack) -> None:
    restore: list[Callable[[], None]] = []

    def begin(*_: Any) -> None:
        restore.append(_widen(layer.modules()))

    def end(*_: Any) -> None:
        if restore:  # else ``begin`` failed
            restore.pop()()

    hooks.callback(layer.register_forward_pre_hook(begin).remove)
    hooks.callback(layer.register_forward_hook(end, always_call=True).remove)


def _widen(modules: Iterable[nn.Module]) -> Callable[[], None]:
    """Put float32 copies in place of tensors of 16 bits; return what puts the originals back."""
    originals: list[tuple[dict[str, Any], dict[str, Any]]] = []
    copies: dict[int, Tensor] = {}  # by id: tied tensors share one copy
    module: Any
    for module in list(modules):
        if isinstance(module, PackedLinear) and "weight" not in module._parameters:
            originals.append((module._parameters, dict(module._parameters)))
            module._parameters["weight"] = nn.Parameter(module.weight.float(), requires_grad=False)
        for tensors in (module._parameters, module._buffers):
            narrow = {name: one for name, one in tensors.items() if one is not None and one.dtype in _NARROW}
            if narrow:
                originals.append((tensors, dict(tensors)))
            for name, one in narrow.items():
                wide = copies.setdefault(id(one), one.float())
                tensors[name] = nn.Parameter(wide, requires_grad=False) if tensors is module._parameters else wide

    def restore() -> None:
        for tensors, before in reversed(originals):
            tensors.clear()
            tensors.update(before)

    return restore
