"""Writes the checkpoint that CPU figures are measured on: Qwen3's shape with 27 M parameters, random weights, bf16.

    python bench/make_checkpoint.py /tmp/qwen3-27m

Tokenizer and chat template are those of the embedded model, so that it can be served. Any field of config.json can be
given another value: ``--set num_hidden_layers=4``.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from pdserve.embedded import EMBEDDED_MODEL
from pdserve.model_config import load_model_config
from runner.linear import Placement
from runner.models.decoder import Decoder

SHAPE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "vocab_size": 4096,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "tie_word_embeddings": True,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}
STANDARD_DEVIATION = 0.02


def make(directory: Path, changes: dict[str, Any]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in EMBEDDED_MODEL.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, directory)
    (directory / "config.json").write_text(json.dumps(SHAPE | changes, indent=2))
    place = Placement(torch.device("cpu"), torch.bfloat16, torch.bfloat16)
    model = Decoder(load_model_config(directory), place, use_triton=False)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=generator).mul_(STANDARD_DEVIATION).bfloat16()
        for name, tensor in model.named_tensors()
    }
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    size = sum(tensor.numel() for tensor in tensors.values())
    print(f"{directory}: {size / 1e6:.1f} M parameters")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="a field of config.json")
    args = parser.parse_args()
    make(args.directory, {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)})


if __name__ == "__main__":
    main()
