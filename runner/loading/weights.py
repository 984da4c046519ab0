"""Fills tensors that exist already, from safetensors or with random numbers: a model never needs its memory twice.

A rank that holds a part of a tensor reads that part alone.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
import torch
from torch import Tensor

from pdserve.config.hub import weight_files
from pdserve.errors import CheckpointError

# Buffers that old checkpoints carry along and that are computed here.
_COMPUTED = (".rotary_emb.inv_freq",)
_DTYPES = ("F64", "F32", "BF16", "F16")  # as safetensors names those that can be converted

_DUMMY_DEVIATION = 0.02


@dataclass(frozen=True)
class TensorShard:
    """Memory for a rank's part of a tensor of the checkpoint: a run along one of its dimensions, whole in the others.

    The part begins at ``start`` of dimension ``dim`` and is as long there as ``memory`` is.
    """

    memory: Tensor
    shape: tuple[int, ...]  # of the whole tensor
    dim: int = 0
    start: int = 0

    @classmethod
    def whole(cls, memory: Tensor) -> TensorShard:
        return cls(memory, tuple(memory.shape))

    @property
    def where(self) -> tuple[slice, ...]:
        """The index of the part in the whole."""
        return (slice(None),) * self.dim + (slice(self.start, self.start + self.memory.shape[self.dim]),)


def fill_random(parts: Mapping[str, TensorShard], seed: int) -> None:
    """Fill in place, on the device: norms with 1, all else with normal numbers of standard deviation 0.02.

    The numbers of a tensor follow from its name, its whole shape and the seed, so ranks that hold parts of a model hold
    parts of the same one. Devices of one kind draw the same; a CPU's and a GPU's numbers differ.
    """
    for name, part in parts.items():
        memory = part.memory
        if name.endswith("norm.weight"):
            memory.fill_(1.0)
            continue
        key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4)
        generator = torch.Generator(memory.device).manual_seed(int.from_bytes(key.digest(), "little"))
        if memory.shape == part.shape:
            memory.normal_(0.0, _DUMMY_DEVIATION, generator=generator)
        else:
            whole = memory.new_empty(part.shape).normal_(0.0, _DUMMY_DEVIATION, generator=generator)
            memory.copy_(whole[part.where])


def load_weights(
    model_dir: Path, parts: Mapping[str, TensorShard], elsewhere: Collection[str], progress: Callable[[float], None]
) -> None:
    """Fill every part from the checkpoint's tensor of that name, converting dtype and device.

    Tensors named in ``elsewhere`` are for others, and are passed over. ``progress`` is called with the fraction filled.
    Raises CheckpointError naming the tensor, and both shapes where they differ.
    """
    missing = dict(parts)
    total = sum(part.memory.numel() for part in parts.values())
    done = 0
    for path in weight_files(model_dir):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name.endswith(_COMPUTED) or name in elsewhere:
                        continue
                    part = missing.pop(name, None)
                    if part is None:
                        raise _unexpected(path, name, name in parts)
                    _fill(path, name, part, file.get_slice(name))
                    done += part.memory.numel()
                    progress(done / total)
        except (OSError, safetensors.SafetensorError) as exc:
            raise CheckpointError(
                f"{path} cannot be read as safetensors ({exc}); download the checkpoint again"
            ) from exc
    if missing:
        names = ", ".join(list(missing)[:3])
        more = f" and {len(missing) - 3} more" if len(missing) > 3 else ""
        raise CheckpointError(
            f"{model_dir} lacks the tensors {names}{more}; config.json and weights belong to different models"
        )


def _fill(path: Path, name: str, part: TensorShard, source: Any) -> None:
    """``source`` is a slice of safetensors: nothing is read before it is indexed."""
    shape, dtype = tuple(source.get_shape()), source.get_dtype()
    if shape != part.shape:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {shape}, config.json asks for {part.shape}; "
            "the two belong to different models"
        )
    if dtype not in _DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {dtype}; supported are float32, bfloat16 and float16. "
            "Choose an unquantized checkpoint"
        )
    part.memory.copy_(source[part.where])


def _unexpected(path: Path, name: str, known: bool) -> CheckpointError:
    if known:
        return CheckpointError(f"{path}: tensor {name} is in the checkpoint twice; remove the file that is too many")
    return CheckpointError(
        f"{path}: tensor {name} has no place in the model that config.json describes; "
        "leaving it out would change results. Check architectures, num_hidden_layers and the bias flags"
    )
