"""Places of a checkpoint's tensors in the model, by name, as a patch of these tensors needs them."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from pdserve.checkpoint.safetensors_header import Tensor
from pdserve.errors import CheckpointError, shown
from runner.loading.stored_dtypes import STORED_DTYPES


class WeightPart(NamedTuple):
    """A weight of the model as a range of a flattened stored tensor: all of it, or one expert's of a fused one."""

    weight: str
    first: int


class StoredWeight(NamedTuple):
    """An unquantized tensor of a checkpoint."""

    dtype: str
    shape: tuple[int, ...]
    parts: tuple[WeightPart, ...]  # including parts of other ranks, and of layers that are not loaded


class StoredWeights:
    """The tensors of the checkpoint in memory."""

    def __init__(self, tensors: Mapping[str, Tensor], sources: Mapping[str, Any]) -> None:
        """``tensors`` are in the files; the model's weights are read from the slices ``sources``."""
        parts: dict[str, list[WeightPart]] = {}
        for weight, source in sources.items():
            origin = getattr(source, "origin", None)  # quantized and transposed weights have none
            if origin is not None and tensors[origin[0]].dtype in STORED_DTYPES:
                parts.setdefault(origin[0], []).append(WeightPart(weight, origin[1]))
        self._transposed = {source.transposed for source in sources.values() if hasattr(source, "transposed")}
        self._names: Collection[str] = tensors.keys() | sources.keys()
        self._weights = {
            name: StoredWeight(tensors[name].dtype, tensors[name].shape, tuple(tensor_parts))
            for name, tensor_parts in parts.items()
        }

    def find(self, name: str) -> StoredWeight:
        """Return an unquantized tensor. Raises CheckpointError that says why there is none."""
        if name in self._weights:
            return self._weights[name]
        if name in self._transposed:
            raise CheckpointError(
                f"tensor {shown(name)} is stored transposed, and patches change ranges of a tensor as they are in "
                "memory. Reload a checkpoint to change it"
            )
        if name in self._names:
            kinds = ", ".join(STORED_DTYPES)
            raise CheckpointError(
                f"tensor {shown(name)} is quantized; patches change {kinds} only. Reload a checkpoint to change it"
            )
        raise CheckpointError(f"tensor {shown(name)} is not in the checkpoint; use its names and the same model")
