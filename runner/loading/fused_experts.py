"""Checkpoints that transformers 5 saves with fused experts, read as if each expert had tensors of its own.

mlp.experts.gate_up_proj  [experts, 2 * size, hidden]  →  mlp.experts.0.gate_proj.weight [size, hidden], …
mlp.experts.down_proj     [experts, hidden, size]      →  mlp.experts.0.down_proj.weight [hidden, size], …

Checkpoints of some architectures have the last two dimensions the other way round (TRANSPOSED_EXPERTS).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

#: Parts of a fused tensor, by the end of its name; they take the place of that end, behind the number of the expert.
_PARTS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    ".experts.gate_up_proj": (".experts", ("gate_proj", "up_proj")),
    ".experts.up_proj": (".experts", ("up_proj",)),  # experts without gates
    ".experts.down_proj": (".experts", ("down_proj",)),
    ".block_sparse_moe.input_linear.weight": (".block_sparse_moe.experts", ("gate_proj", "up_proj")),  # Granite 4
    ".block_sparse_moe.output_linear.weight": (".block_sparse_moe.experts", ("down_proj",)),
}
_FUSED = tuple(_PARTS)


class _ExpertPart:
    """A part of one expert in a fused tensor. Like a slice of safetensors, it reads nothing before it is indexed."""

    def __init__(self, fused: Any, expert: int, first: int, shape: tuple[int, int]) -> None:
        self._fused = fused
        self._expert = expert
        self._first = first
        self._shape = shape

    def get_shape(self) -> list[int]:
        return list(self._shape)

    def get_dtype(self) -> str:
        dtype: str = self._fused.get_dtype()
        return dtype


class ExpertSlice(_ExpertPart):
    """Rows of one expert."""

    @property
    def origin(self) -> tuple[str, int]:
        """The stored tensor, and the place of the first value in it."""
        name, first = self._fused.origin
        rows, columns = self._fused.get_shape()[1:]
        return name, first + (self._expert * rows + self._first) * columns

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        begin, end, _ = rows.indices(self._shape[0])
        return self._fused[(self._expert, slice(self._first + begin, self._first + end), *columns)]


class TransposedExpertSlice(_ExpertPart):
    """Columns of one expert, as rows. They are no range of the stored tensor, so it has no origin."""

    @property
    def transposed(self) -> str:
        """The stored tensor."""
        name: str = self._fused.origin[0]
        return name

    def __getitem__(self, index: tuple[slice, ...]) -> Any:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        begin, end, _ = rows.indices(self._shape[0])
        stored = columns[0] if columns else slice(None)
        return self._fused[(self._expert, stored, slice(self._first + begin, self._first + end))].transpose(0, 1)


def split_experts(
    weights: Mapping[str, Any],
    model_names: Collection[str],
    checkpoint_name: Callable[[str], str],
    transposed: bool = False,
) -> Mapping[str, Any]:
    """Return the weights with a name per expert, if they are fused and the model does not ask for fused ones.

    ``model_names`` are the names that the model asks for. Tensors beside fused experts have Llama's names, whatever the
    family's are; ``checkpoint_name`` translates them. ``transposed``: inputs come before outputs in fused tensors.
    """
    if not any(name.endswith(_FUSED) and name not in model_names for name in weights):
        return weights
    tensors: dict[str, Any] = {}
    for name, weight in weights.items():
        shape = weight.get_shape()
        if name in model_names or not name.endswith(_FUSED) or len(shape) != 3:
            tensors[checkpoint_name(name)] = weight
            continue
        fused = next(fused for fused in _FUSED if name.endswith(fused))
        end, parts = _PARTS[fused]
        stem = name.removesuffix(fused) + end
        experts = shape[0]
        outputs, columns = (shape[2], shape[1]) if transposed else (shape[1], shape[2])
        rows = outputs // len(parts)
        expert_slice = TransposedExpertSlice if transposed else ExpertSlice
        for expert in range(experts):
            for index, part in enumerate(parts):
                full_name = checkpoint_name(f"{stem}.{expert}.{part}.weight")
                tensors[full_name] = expert_slice(weight, expert, index * rows, (rows, columns))
    return tensors
