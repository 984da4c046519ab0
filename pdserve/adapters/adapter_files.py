"""A directory in PEFT's format becomes a checked Adapter: each tensor is consumed, or refused by name.

base_model.model.<module>.lora_A.weight [rank, in_features]    <module> as the base's checkpoint names it
base_model.model.<module>.lora_B.weight [out_features, rank]
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from pdserve.adapters.adapter import Adapter, AdapterLimits, AdapterModule
from pdserve.adapters.base_layers import BaseLayer, adapters_problem, base_layers, refusal
from pdserve.adapters.peft_config import PeftConfig, read_peft_config
from pdserve.checkpoint.file_states import check_unchanged, open_settled
from pdserve.checkpoint.safetensors_header import Tensor, header_of
from pdserve.errors import CheckpointError, shown
from pdserve.model.model_config import ModelConfig
from pdserve.model.text_part import causal_name

WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_A = ".lora_A.weight"
_B = ".lora_B.weight"
_DTYPES = ("F32", "BF16", "F16")
_CHUNK = 4 << 20  # bytes that are hashed at a time


def read_adapter(directory: Path, model: ModelConfig, limits: AdapterLimits) -> Adapter:
    """Read and check an adapter of a base model, and hash all of its tensors: 0.1 s per 100 MB.

    Raises CheckpointError, which names the field or tensor, its value and a remedy.
    """
    if problem := adapters_problem(model):
        raise CheckpointError(problem)
    config = read_peft_config(directory)
    path = directory / WEIGHTS_FILE
    if not path.exists() and (directory / "adapter_model.bin").exists():
        raise CheckpointError(f"{directory} has adapter_model.bin; save it again with safe_serialization=True")
    with open_settled(path) as (fd, state):
        tensors = header_of(path, fd)
        modules = _modules(path, tensors, config, model, limits)
        digest = content_digest(path, fd, tensors, modules)
        check_unchanged(path, state)
    return Adapter(digest=digest, directory=str(directory), modules=modules)


def content_digest(path: Path, fd: int, tensors: Mapping[str, Tensor], modules: Mapping[str, AdapterModule]) -> str:
    """Return the SHA-256 of ranks and scalings and of all tensors, in hexadecimal. Raises CheckpointError."""
    digest = hashlib.sha256(b"pdserve LoRA 1\n")
    config = sorted((name, module.rank, module.scaling.hex(), module.a, module.b) for name, module in modules.items())
    digest.update(msgspec.json.encode(config))
    buffer = bytearray(_CHUNK)
    for name, tensor in sorted(tensors.items()):
        digest.update(msgspec.json.encode((name, tensor.dtype, tensor.shape)))
        at = tensor.begin
        while at < tensor.end:
            view = memoryview(buffer)[: min(_CHUNK, tensor.end - at)]
            size = os.preadv(fd, [view], at)
            if not size:
                raise CheckpointError(f"{path} was truncated at byte {at} while it was read; copy it again")
            digest.update(view[:size])
            at += size
    return digest.hexdigest()


def _modules(
    path: Path, tensors: Mapping[str, Tensor], config: PeftConfig, model: ModelConfig, limits: AdapterLimits
) -> dict[str, AdapterModule]:
    """Return the modules by the names of the base's layers. Raises CheckpointError for any other tensor."""
    layers = base_layers(model)
    modules: dict[str, AdapterModule] = {}
    for module in _module_names(path, tensors):
        name = _base_name(module, model)
        layer = layers.get(name)
        if layer is None:
            raise CheckpointError(f"{path} changes {shown(module)}: {refusal(model, name)}")
        if name in modules:
            raise CheckpointError(f"{path} changes {shown(name)} twice, by two of its names; remove one of them")
        modules[name] = _module(path, tensors, module, layer, config, limits)
    if not modules:
        raise CheckpointError(f"{path} has no tensor of an adapter; choose a LoRA adapter")
    return modules


def _module_names(path: Path, tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield the names of modules, as in the adapter's model, in the order of their first tensors."""
    for name in tensors:
        module = name.removeprefix(_PREFIX).removesuffix(_A).removesuffix(_B)
        if not name.startswith(_PREFIX) or module == name.removeprefix(_PREFIX):
            raise CheckpointError(f"{path}: tensor {shown(name)} {_unknown(name)}")
        for end in (_A, _B):
            if _PREFIX + module + end not in tensors:
                raise CheckpointError(f"{path} has {shown(name)} without {end[1:]} beside it; save the adapter again")
        if name.endswith(_A):
            yield module


def _unknown(name: str) -> str:
    """Describe a tensor that is neither A nor B of a linear layer, with a remedy."""
    again = "train the adapter without it, or serve the merged weights"
    if name.endswith(".base_layer.weight"):
        return "is a copy of the base's weight; save the adapter with save_embedding_layers=False"
    if ".lora_embedding_" in name:
        return f"changes an embedding, which takes no adapter; {again}"
    if ".lora_magnitude_vector" in name:
        return f"belongs to DoRA, which is not served; {again}"
    if name.endswith((".lora_A.bias", ".lora_B.bias", ".bias")):
        return f"is a bias, which adapters cannot have; {again}"
    if not name.startswith(_PREFIX):
        return f"does not begin with {_PREFIX!r}; save the adapter with PEFT's save_pretrained"
    return f"is not part of a LoRA adapter of a linear layer (modules_to_save is not served); {again}"


def _base_name(module: str, model: ModelConfig) -> str:
    """Return the base's name of a module; multimodal models and their text models alone name it differently."""
    return (causal_name(module) if model.multimodal else None) or module


def _module(
    path: Path,
    tensors: Mapping[str, Tensor],
    module: str,
    layer: BaseLayer,
    config: PeftConfig,
    limits: AdapterLimits,
) -> AdapterModule:
    """Check the two tensors of a module. Raises CheckpointError."""
    a = _PREFIX + module + _A
    b = _PREFIX + module + _B
    rank = config.rank_of(module)
    if rank > limits.max_lora_rank:
        raise CheckpointError(
            f"{path} has rank {rank} for {shown(module)}, the limit is {limits.max_lora_rank}; raise --max-lora-rank "
            "or choose an adapter of lower rank"
        )
    for name, shape in ((a, (rank, layer.in_features)), (b, (layer.out_features, rank))):
        tensor = tensors[name]
        if tensor.dtype not in _DTYPES:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} has dtype {tensor.dtype}; adapters are {', '.join(_DTYPES)}. Save it in "
                "one of these"
            )
        if tensor.shape != shape:
            raise CheckpointError(
                f"{path}: tensor {shown(name)} has shape {shown(tensor.shape)}, the base and the configuration ask for "
                f"{shape}; choose an adapter of this base"
            )
    if not config.targets(module):
        raise CheckpointError(
            f"{path} has tensors of {shown(module)}, which target_modules or layers_to_transform leave out; correct "
            "adapter_config.json"
        )
    return AdapterModule(rank=rank, scaling=config.scaling_of(module), a=a, b=b)
