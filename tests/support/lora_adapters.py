"""Random LoRA adapters in PEFT's format, and checkpoints with an adapter merged into their weights."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec
import torch
from safetensors.torch import load_file, save_file

from pdserve.adapters.adapter import Adapter, AdapterLimits
from pdserve.adapters.adapter_files import read_adapter
from pdserve.adapters.base_layers import base_layers
from pdserve.config.node_config import NodeConfig
from pdserve.model.model_config import load_model_config

#: Where checkpoints have their text model, also those of models that take images.
TEXT_MODELS = ("model", "model.language_model", "language_model.model")

LIMITS = AdapterLimits(max_loras=3, max_lora_rank=24, max_cpu_loras=8)

#: Adapters of unlike ranks and modules; members of merged projections are missing.
KINDS: Mapping[str, tuple[str, dict[str, Any]]] = {
    "all": (r".", {"r": 8, "lora_alpha": 12}),
    "some": (r"(q_proj|q_b_proj|v_proj|up_proj|in_proj_z|in_proj_a|o_proj|out_proj)$", {"r": 3, "use_rslora": True}),
    "patterns": (
        r"(k_proj|kv_a_proj_with_mqa|down_proj|gate_proj|in_proj_qkvz?|in_proj_ba)$",
        {
            "r": 5,
            "rank_pattern": {r"layers\.[01]\.self_attn\..*": 20, "down_proj": 17},
            "alpha_pattern": {"k_proj": 31},
        },
    ),
}


def adapter_tensors(model_dir: Path, wanted: str, config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return A and B of the layers whose names match, none of them zero, by their names in PEFT's files."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, layer in base_layers(load_model_config(model_dir)).items():
        if not re.search(wanted, name):
            continue
        patterns = config.get("rank_pattern", {}).items()
        rank = next((rank for key, rank in patterns if re.match(rf"(.*\.)?({key})$", name)), config["r"])
        a = torch.randn(rank, layer.in_features, generator=generator) / layer.in_features**0.5
        b = torch.randn(layer.out_features, rank, generator=generator) * 0.1
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    assert tensors, f"no layer matches {wanted}"
    return tensors


def write_adapter(directory: Path, tensors: Mapping[str, torch.Tensor], **config: Any) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    fields = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "bias": "none"} | config
    (directory / "adapter_config.json").write_text(json.dumps(fields))
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, directory / "adapter_model.safetensors")
    return directory


def make_adapter(directory: Path, model_dir: Path, kind: str, seed: int = 0) -> Path:
    """Write an adapter of one of ``KINDS``."""
    wanted, config = KINDS[kind]
    return write_adapter(directory, adapter_tensors(model_dir, wanted, config, seed), **config)


def load(directory: Path, model_dir: Path, limits: AdapterLimits = LIMITS) -> Adapter:
    return read_adapter(directory, load_model_config(model_dir), limits)


def merge(model_dir: Path, adapter: Path, target: Path) -> Path:
    """Write the checkpoint with W + alpha / r · B A in place of W, in float32; alpha / √r with rsLoRA."""
    shutil.copytree(model_dir, target)
    config = json.loads((adapter / "adapter_config.json").read_text())
    files = {file: load_file(file) for file in target.glob("*.safetensors")}
    weights = {name: tensor for stored in files.values() for name, tensor in stored.items()}
    tensors = load_file(adapter / "adapter_model.safetensors")
    for name, a in tensors.items():
        if not name.endswith(".lora_A.weight"):
            continue
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        matches = [key for key in config.get("alpha_pattern", {}) if re.match(rf"(.*\.)?({key})$", module)]
        alpha = config["alpha_pattern"][matches[0]] if matches else config["lora_alpha"]
        scaling = alpha / (len(a) ** 0.5 if config.get("use_rslora") else len(a))
        inner = module.removeprefix("model.")
        name_of_weight = next(key for key in (f"{text}.{inner}.weight" for text in TEXT_MODELS) if key in weights)
        weight = weights[name_of_weight]
        weights[name_of_weight] = (
            weight.double() + scaling * tensors[name.replace("_A", "_B")].double() @ a.double()
        ).to(weight.dtype)
    for file, stored in files.items():
        save_file({name: weights[name] for name in stored}, file, metadata={"format": "pt"})
    return target


def with_adapters(config: NodeConfig, limits: AdapterLimits = LIMITS) -> NodeConfig:
    return msgspec.structs.replace(config, adapters=limits)
