"""Random changes of weights for tests: reloads, patches in files, and the checkpoints that they result in."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
import xxhash
from checkpoints import make_checkpoint
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from staged_node import Request
from torch import Tensor

from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange

_SAMPLING = SamplingParams(3, temperature=0.0, logprobs=20, ignore_eos=True)
REQUESTS = [Request(tuple((7 * index + seed) % 120 + 3 for index in range(20)), _SAMPLING) for seed in range(2)]

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "mlp_bias": True, "vocab_size": 131, "num_hidden_layers": 2}),
    "qwen3-tied": ("qwen3", {"tie_word_embeddings": True, "vocab_size": 130, "num_hidden_layers": 2}),
    "qwen3-moe": ("qwen3_moe", {"num_hidden_layers": 2}),
    "qwen3-moe-fused": ("qwen3_moe", {"num_hidden_layers": 2, "fused": True}),
    "gpt-oss": ("gpt_oss", {"num_hidden_layers": 2}),
    "glm4-moe": ("glm4_moe", {"num_hidden_layers": 2}),
    "minimax-m2": ("minimax_m2", {"num_hidden_layers": 2}),
    "qwen3-next": ("qwen3_next", {"layer_types": ["full_attention", "linear_attention"] * 2, "num_hidden_layers": 4}),
    "qwen3.5": ("qwen3_5_text", {"layer_types": ["linear_attention", "full_attention"] * 2, "num_hidden_layers": 4}),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"] * 2, "num_hidden_layers": 4}),
    "deepseek-v2": ("deepseek_v2", {"q_lora_rank": None, "num_hidden_layers": 2}),
    "deepseek-v3": ("deepseek_v3", {"num_hidden_layers": 2}),
    "mixtral": ("mixtral", {"num_hidden_layers": 2}),
    "float16-products": ("llama", {"dtype": "bfloat16", "num_hidden_layers": 2}),
}

Steps = list[tuple[str, int]]  # kind of change and seed

CHANGES = st.lists(st.tuples(st.sampled_from(["reload", "patch"]), st.integers(0, 1 << 16)), max_size=4)

Tensors = dict[str, Tensor]
Entries = dict[str, Tensor]  # by their names in the file


def random_patch(tensors: Tensors, seed: int) -> Entries:
    """Draw new values for some tensors: at indices of either width, or in ranges of rows."""
    numbers = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
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
    result = {name: tensor.clone() for name, tensor in tensors.items()}
    for key, values in entries.items():
        name, _, kind = key.rpartition(".")
        if kind.isdigit():
            result[name.removesuffix(".rows")][int(kind) : int(kind) + len(values)] = values
        elif kind == "values":
            result[name].view(-1)[entries[f"{name}.indices"].long()] = values
    return result


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


class Model:
    """A checkpoint, and sequences of changes of it."""

    def __init__(self, folder: Path, name: str, **overrides: Any) -> None:
        family = MODELS[name][0]
        options = MODELS[name][1] | overrides
        self.directory = make_checkpoint(folder / name, family, **options)
        self.dtype: str = options.get("dtype", "float32")
        self.tensors = read_tensors(self.directory)
        self._folder = folder

    def changed(self, steps: Steps) -> tuple[tuple[WeightChange, ...], Path]:
        """Return random changes, and the checkpoint that they result in."""
        folder = Path(tempfile.mkdtemp(dir=self._folder))
        tensors = self.tensors
        changes = []
        for number, (kind, seed) in enumerate(steps):
            if kind == "reload":
                tensors = self._drawn(seed)
                changes.append(WeightChange(str(write_checkpoint(folder / str(number), self.directory, tensors))))
            else:
                entries = random_patch(tensors, seed)
                tensors = patched(tensors, entries)
                changes.append(WeightChange(patch=str(write_patch(folder / f"{number}.safetensors", entries))))
        return tuple(changes), write_checkpoint(folder / "result", self.directory, tensors)

    def _drawn(self, seed: int) -> Tensors:
        """Return tensors with this checkpoint's values in another order, with other signs."""
        generator = torch.Generator().manual_seed(seed)
        return {
            name: (tensor.view(-1)[torch.randperm(tensor.numel(), generator=generator)] * -0.9).view(tensor.shape)
            for name, tensor in self.tensors.items()
        }
