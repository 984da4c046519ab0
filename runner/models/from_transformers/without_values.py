"""Run layers of the library before their weights are read: weights have shapes only, activations are zeros.

Weights are on the device meta, where nothing has memory. Branches and masks need real values, so the result of each
function of a weight becomes zeros on the CPU, unless it is as large as a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

_LARGEST = 1 << 22  # elements of a result that becomes zeros: activations of two tokens are smaller
_META = torch.device("meta")


class WithoutValues(TorchFunctionMode):
    """Computes functions of tensors on the device meta as zeros on the CPU."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is Tensor.to:
            return _to(_as_zeros(args[0]), *args[1:], **kwargs)
        if func is Tensor.__getitem__:  # an expert of a weight
            args = args[0], tree_map(_as_number, args[1])
        if not any(isinstance(leaf, Tensor) and leaf.is_meta for leaf in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        moved_args, moved_kwargs = tree_map(_to_meta, (args, kwargs))
        return tree_map(_as_zeros, func(*moved_args, **moved_kwargs))


def _to(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Change the dtype alone: here the devices of weights and activations are one."""
    return tensor.to(torch.empty(0, dtype=tensor.dtype).to(*args, **kwargs).dtype)


def _as_number(index: Any) -> Any:
    is_number = isinstance(index, Tensor) and index.ndim == 0 and not index.is_meta
    return int(index) if is_number and index.dtype != torch.bool else index


def _to_meta(value: Any) -> Any:
    return value.to(_META) if isinstance(value, Tensor) else value


def _as_zeros(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_meta or value.numel() > _LARGEST:
        return value
    return torch.zeros(value.shape, dtype=value.dtype)


class UnreadSlice:
    """A tensor of a checkpoint, by shape alone, as the library takes slices of safetensors."""

    def __init__(self, source: Any) -> None:
        """``source`` is a slice that reads nothing before it is indexed."""
        self._source = source

    def get_shape(self) -> list[int]:
        return list(self._source.get_shape())

    def get_dtype(self) -> str:
        dtype: str = self._source.get_dtype()
        return dtype

    def __getitem__(self, index: Any) -> UnreadSlice:
        return self

    def to(self, device: Any = None, dtype: torch.dtype | None = None) -> Tensor:
        """Return the tensor on the device meta, wherever the library wants it."""
        return torch.empty(self.get_shape(), dtype=dtype, device=_META)
