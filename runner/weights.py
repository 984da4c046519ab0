"""Fills tensors that exist already, from safetensors or with random numbers: a model never needs its memory twice."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import safetensors
import torch
from torch import Tensor

from pdserve.errors import CheckpointError
from pdserve.hub import weight_files

# Buffers that old checkpoints carry along and that are computed here.
_COMPUTED = (".rotary_emb.inv_freq",)

_DUMMY_DEVIATION = 0.02


def fill_random(tensors: Mapping[str, Tensor], seed: int) -> None:
    """Fill in place, on the device: norms with 1, all else with normal numbers of standard deviation 0.02.

    The same names, shapes and seed give the same numbers on devices of one kind; a CPU's and a GPU's differ.
    """
    generators: dict[torch.device, torch.Generator] = {}
    for name, tensor in tensors.items():
        if name.endswith("norm.weight"):
            tensor.fill_(1.0)
            continue
        generator = generators.setdefault(tensor.device, torch.Generator(tensor.device).manual_seed(seed))
        tensor.normal_(0.0, _DUMMY_DEVIATION, generator=generator)


def load_weights(
    model_dir: Path, destinations: Mapping[str, Tensor], tied: bool, progress: Callable[[float], None]
) -> None:
    """Fill every destination from the checkpoint's tensor of that name, converting dtype and device.

    ``tied``: the output projection is the embedding, a copy of it in the checkpoint is passed over. ``progress`` is
    called with the fraction filled. Raises CheckpointError naming the tensor, and both shapes where they differ.
    """
    missing = dict(destinations)
    total = sum(tensor.numel() for tensor in destinations.values())
    done = 0
    for path in weight_files(model_dir):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name.endswith(_COMPUTED) or (tied and name == "lm_head.weight"):
                        continue
                    destination = missing.pop(name, None)
                    if destination is None:
                        raise _unexpected(path, name, name in destinations)
                    _fill(path, name, destination, file.get_tensor(name))
                    done += destination.numel()
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


def _fill(path: Path, name: str, destination: Tensor, source: Tensor) -> None:
    if source.shape != destination.shape:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {tuple(source.shape)}, config.json asks for {tuple(destination.shape)}; "
            "the two belong to different models"
        )
    if source.dtype not in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {source.dtype}; supported are float32, bfloat16 and float16. "
            "Choose an unquantized checkpoint"
        )
    destination.copy_(source)


def _unexpected(path: Path, name: str, known: bool) -> CheckpointError:
    if known:
        return CheckpointError(f"{path}: tensor {name} is in the checkpoint twice; remove the file that is too many")
    return CheckpointError(
        f"{path}: tensor {name} has no place in the model that config.json describes; "
        "leaving it out would change results. Check architectures, num_hidden_layers and the bias flags"
    )
