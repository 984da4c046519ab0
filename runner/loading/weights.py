"""Fill existing tensors from safetensors or with random numbers, so a model never needs its memory twice.

A rank that holds a part of a tensor reads only that part.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch

from pdserve.checkpoint.weight_files import weight_files
from pdserve.errors import CheckpointError
from runner.models.layers.weight_shard import WeightShard

_COMPUTED = (".rotary_emb.inv_freq",)  # buffers of old checkpoints that are computed here
_CONVERTIBLE = (torch.float64, torch.float32, torch.bfloat16, torch.float16)

_DUMMY_DEVIATION = 0.02


def fill_random(shards: Mapping[str, WeightShard], seed: int) -> None:
    """Fill in place, on the device: norms with 1, all else with normal numbers of standard deviation 0.02.

    The numbers of a tensor depend on its name, its full shape and the seed, so ranks with parts of a model hold
    parts of the same one. Devices of one kind draw the same numbers; those of a CPU and a GPU differ.
    """
    for name, shard in shards.items():
        memory = shard.memory
        if name.endswith("norm.weight"):
            memory.fill_(1.0)
            continue
        key = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=4)
        generator = torch.Generator(memory.device).manual_seed(int.from_bytes(key.digest(), "little"))
        if memory.shape == shard.full_shape:
            memory.normal_(0.0, _DUMMY_DEVIATION, generator=generator)
        else:
            full = memory.new_empty(shard.full_shape).normal_(0.0, _DUMMY_DEVIATION, generator=generator)
            memory.copy_(full[shard.index])


def load_weights(
    model_dir: Path, shards: Mapping[str, WeightShard], ignored: Collection[str], progress: Callable[[float], None]
) -> None:
    """Fill every shard from the checkpoint's tensor of that name, converting dtype and device.

    Tensors named in ``ignored`` are skipped. ``progress`` is called with the fraction filled. Raises CheckpointError
    naming the tensor, and both shapes where they differ.
    """
    missing = dict(shards)
    total = sum(shard.memory.numel() for shard in shards.values())
    done = 0
    for path in weight_files(model_dir):
        try:
            with safetensors.safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - not a dict
                    if name.endswith(_COMPUTED) or name in ignored:
                        continue
                    shard = missing.pop(name, None)
                    if shard is None:
                        raise _unexpected(path, name, name in shards)
                    _fill(path, name, shard, file.get_slice(name))
                    done += shard.memory.numel()
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


def _fill(path: Path, name: str, shard: WeightShard, source: Any) -> None:
    """Copy the shard's part of ``source``, a slice of safetensors, which reads nothing before it is indexed."""
    shape = tuple(source.get_shape())
    if shape != shard.full_shape:
        raise CheckpointError(
            f"{path}: tensor {name} has shape {shape}, config.json asks for {shard.full_shape}; "
            "the two belong to different models"
        )
    part, memory = source[shard.index], shard.memory
    if part.dtype != memory.dtype and not (part.dtype in _CONVERTIBLE and memory.dtype in _CONVERTIBLE):
        raise CheckpointError(
            f"{path}: tensor {name} has dtype {source.get_dtype()}, which cannot become {memory.dtype}; the weight "
            "format that config.json names is another. Download the checkpoint again"
        )
    memory.copy_(part)


def _unexpected(path: Path, name: str, known: bool) -> CheckpointError:
    if known:
        return CheckpointError(f"{path}: tensor {name} is in the checkpoint twice; remove the second file")
    return CheckpointError(
        f"{path}: tensor {name} has no place in the model that config.json describes; "
        "leaving it out would change results. Check architectures, num_hidden_layers and the bias flags"
    )
