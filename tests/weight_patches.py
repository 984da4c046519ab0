"""Patches of weights for tests: random ones in files, and checkpoints with the same changes."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import torch
import xxhash
from safetensors.torch import load_file, save_file
from torch import Tensor

Tensors = dict[str, Tensor]
Entries = dict[str, Tensor]  # by their names in the file


def random_patch(tensors: Tensors, seed: int) -> Entries:
    """Draw new values for some tensors: at indices of either width, or in ranges of rows."""
    numbers, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    entries: Entries = {}
    for name in numbers.sample(sorted(tensors), numbers.randint(1, len(tensors))):
        tensor = tensors[name]
        if numbers.random() < 0.3:
            first = numbers.randrange(len(tensor))
            middle = numbers.randint(first, len(tensor))
            for begin, end in ((first, middle), (middle, len(tensor))):
                rows = tensor[begin:end]
                entries[f"{name}.rows.{begin}"] = torch.randn(rows.shape, generator=generator).to(tensor.dtype)
            continue
        count = numbers.choice((0, 1, tensor.numel() // 100, tensor.numel() // 2))
        indices = torch.randperm(tensor.numel(), generator=generator)[:count].sort().values
        entries[f"{name}.indices"] = indices.to(numbers.choice((torch.int32, torch.int64)))
        # Products in float16 hold numbers far below the largest one of their row only by other means.
        values = torch.randn(count, generator=generator) * numbers.choice((1.0, 1e-30))
        entries[f"{name}.values"] = values.to(tensor.dtype)
    return entries


def write_patch(path: Path, entries: Entries) -> Path:
    """Write a patch with the digests of its entries."""
    digests = {key: xxhash.xxh3_128_hexdigest(data_of(tensor)) for key, tensor in entries.items()}
    save_file({key: tensor.contiguous() for key, tensor in entries.items()}, path, digests)
    return path


def data_of(tensor: Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def patched(tensors: Tensors, entries: Entries) -> Tensors:
    """Return tensors with the values of a patch."""
    found = {name: tensor.clone() for name, tensor in tensors.items()}
    for key, values in entries.items():
        name, _, kind = key.rpartition(".")
        if kind.isdigit():
            found[name.removesuffix(".rows")][int(kind) : int(kind) + len(values)] = values
        elif kind == "values":
            found[name].view(-1)[entries[f"{name}.indices"].long()] = values
    return found


def read_tensors(directory: Path) -> Tensors:
    files = sorted(directory.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


def write_checkpoint(directory: Path, like: Path, tensors: Tensors) -> Path:
    """Write a checkpoint with the configuration of another one."""
    directory.mkdir()
    for path in like.glob("*.json"):
        if not path.name.endswith(".index.json"):
            shutil.copy(path, directory)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors")
    return directory
