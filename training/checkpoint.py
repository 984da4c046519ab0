"""Files of the embedded model: configuration, tokenizer, and weights by their names in transformers."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

SEED = 20
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 4096,
    "hidden_size": 256,
    "intermediate_size": 704,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "hidden_act": "silu",
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "use_sliding_window": False,
    "sliding_window": None,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "initializer_range": 0.02,
    "use_cache": True,
    "torch_dtype": "bfloat16",
}
FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
WEIGHTS = "model.safetensors"


def layer_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shape of each tensor of a layer by its name in transformers."""
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    head_dim = config["head_dim"]
    queries = config["num_attention_heads"] * head_dim
    keys = config["num_key_value_heads"] * head_dim
    return {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "self_attn.q_norm.weight": (head_dim,),
        "self_attn.k_norm.weight": (head_dim,),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }


def random_weights(config: dict[str, Any], seed: int = SEED) -> dict[str, torch.Tensor]:
    """Return every tensor of the checkpoint in bfloat16: matrices that keep a vector's length, norms of ones."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(shape: tuple[int, ...]) -> torch.Tensor:
        numbers: torch.Tensor = torch.randn(shape, generator=generator) * (1 / shape[-1] ** 0.5)
        return numbers.to(torch.bfloat16)

    embedding = matrix((config["vocab_size"], config["hidden_size"]))
    weights = {
        "model.embed_tokens.weight": embedding,
        "model.norm.weight": torch.ones(config["hidden_size"], dtype=torch.bfloat16),
    }
    for index in range(config["num_hidden_layers"]):
        for name, shape in layer_shapes(config).items():
            tensor = matrix(shape) if len(shape) == 2 else torch.ones(shape, dtype=torch.bfloat16)
            weights[f"model.layers.{index}.{name}"] = tensor
    return weights


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_weights(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    """Replace the weights in a directory at once, so that an interrupted write leaves the old ones."""
    directory.mkdir(parents=True, exist_ok=True)
    new = directory / f"{WEIGHTS}.new"
    save_file(weights, new, metadata={"format": "pt"})
    new.chmod(0o644)
    new.replace(directory / WEIGHTS)


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    return load_file(directory / WEIGHTS)


def copy_settings(source: Path, directory: Path) -> None:
    """Copy everything but the weights."""
    directory.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (directory / name).resolve() != (source / name).resolve():
            shutil.copyfile(source / name, directory / name)


def write_untrained(directory: Path) -> None:
    """Write the model before training; the tokenizer is trained here."""
    from training.tokenizer import settings, train_tokenizer  # only this needs the standard library's texts

    directory.mkdir(parents=True, exist_ok=True)
    train_tokenizer(SEED).save(str(directory / "tokenizer.json"), pretty=False)
    write_json(directory / "config.json", CONFIG)
    greedy = {"eos_token_id": [2, 0], "pad_token_id": 0, "temperature": 0}  # too small to be right when sampled
    write_json(directory / "generation_config.json", greedy)
    write_json(directory / "tokenizer_config.json", settings(CONFIG["max_position_embeddings"]))
    write_weights(directory, random_weights(CONFIG))
    size = sum(file.stat().st_size for file in directory.iterdir())
    print(f"{directory}: {size / 1e6:.2f} MB")
