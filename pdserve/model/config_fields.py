"""A JSON object on disk, such as a checkpoint's config.json, with typed and bounded access to its fields."""

from __future__ import annotations

import os
from collections.abc import Mapping
from copy import copy
from pathlib import Path
from typing import Any

from pdserve.checkpoint.files import read_object
from pdserve.checkpoint.gguf import conversion
from pdserve.errors import CheckpointError, plain, shown

_MAX_BYTES = 4 << 20

#: The largest value of each number of a config, well beyond those of known models.
LARGEST: Mapping[str, int] = {
    "vocab_size": 1 << 21,
    "draft_vocab_size": 1 << 21,
    "hidden_size": 1 << 17,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1024,
    "max_window_layers": 1024,
    "num_attention_heads": 4096,
    "num_key_value_heads": 4096,
    "head_dim": 4096,
    "num_global_key_value_heads": 4096,
    "global_head_dim": 4096,
    "max_position_embeddings": 1 << 27,
    "original_max_position_embeddings": 1 << 27,
    "sliding_window": 1 << 27,
    "sliding_window_size": 1 << 27,
    "sliding_window_pattern": 1024,
    "rotary_dim": 4096,
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "n_routed_experts": 1 << 14,
    "n_shared_experts": 1 << 10,
    "num_experts_per_tok": 1 << 8,
    "top_k_experts": 1 << 8,
    "num_kv_shared_layers": 1024,
    "hidden_size_per_layer_input": 1 << 14,
    "vocab_size_per_layer_input": 1 << 21,
    "moe_intermediate_size": 1 << 20,
    "n_group": 1 << 10,
    "topk_group": 1 << 10,
    "first_k_dense_replace": 1024,
    "decoder_sparse_step": 1024,
    "num_nextn_predict_layers": 64,
    "num_mtp_modules": 64,
    "num_mtp_layers": 64,
    "mtp_num_hidden_layers": 64,
    "kv_lora_rank": 1 << 16,
    "q_lora_rank": 1 << 16,
    "qk_nope_head_dim": 4096,
    "qk_rope_head_dim": 4096,
    "v_head_dim": 4096,
    "shared_expert_intermediate_size": 1 << 20,
    "full_attention_interval": 1024,
    "linear_num_key_heads": 4096,
    "linear_num_value_heads": 4096,
    "linear_key_head_dim": 4096,
    "linear_value_head_dim": 4096,
    "linear_conv_kernel_dim": 64,
    "conv_L_cache": 64,
    "block_ff_dim": 1 << 20,
    "block_multiple_of": 1 << 16,
    "num_dense_layers": 1024,
    "mamba_n_heads": 4096,
    "mamba_num_heads": 4096,
    "mamba_n_groups": 4096,
    "n_groups": 4096,
    "mamba_d_head": 4096,
    "mamba_head_dim": 4096,
    "mamba_d_state": 4096,
    "ssm_state_size": 4096,
    "mamba_d_conv": 64,
    "conv_kernel": 64,
    "mamba_expand": 64,
    "mamba_d_ssm": 1 << 18,
    "shared_intermediate_size": 1 << 20,
    "moe_shared_expert_intermediate_size": 1 << 20,
    "depth": 1024,
    "num_heads": 4096,
    "patch_size": 256,
    "merge_size": 16,
    "spatial_merge_size": 16,
    "temporal_patch_size": 16,
    "num_position_embeddings": 1 << 20,
    "out_hidden_size": 1 << 17,
    "image_token_id": 1 << 21,
    "image_token_index": 1 << 21,
    "boi_token_id": 1 << 21,
    "eoi_token_id": 1 << 21,
    "pad_token_id": 1 << 21,
    "pooling_kernel_size": 16,
    "position_embedding_size": 1 << 20,
    "mm_embed_dim": 1 << 17,
    "mm_posemb_size": 1 << 20,
    "min_pixels": 1 << 26,
    "max_pixels": 1 << 26,
    "shortest_edge": 1 << 26,
    "longest_edge": 1 << 26,
}


class ConfigFields:
    """Fields of a JSON file. Its errors name file, field, value and limit."""

    def __init__(self, path: Path) -> None:
        """Raises CheckpointError unless the file is a JSON object of bounded size and depth."""
        self.path = path
        self.defaults: Mapping[str, Any] = {}
        self.remedy = "download the checkpoint again"  # remedy for a missing field
        self.names_read: set[str] = set()
        self.within = ""  # name of the object in the file that these fields belong to, after a space
        if not os.path.exists(path):
            if others := sorted(path.parent.glob("*.gguf")):
                raise CheckpointError(conversion(others[0]))
            raise self.error("does not exist; a model directory holds config.json, a tokenizer and *.safetensors")
        self.values = read_object(path, _MAX_BYTES)

    def part(self, name: str) -> ConfigFields:
        """Return the fields of the object ``name``; none if it is null or missing. Raises CheckpointError."""
        values = self.given(name)
        if values is not None and not isinstance(values, dict):
            raise self.error(f"has {name} = {shown(values)}; it must be an object. {REMEDY}")
        part = copy(self)
        part.values = values or {}
        part.defaults = {}
        part.names_read = set()
        part.within = f"{self.within} {name}"
        return part

    def get(self, name: str, default: Any = None) -> Any:
        """Return the field, else the family's default, else ``default``. A null in the file means ``default``."""
        self.names_read.add(name)
        if name in self.values:
            value = self.values[name]
            return default if value is None else value
        return self.defaults.get(name, default)

    def given(self, name: str) -> Any:
        """Return the field in the file; None if it is null or missing, whatever the family's default is."""
        self.names_read.add(name)
        return self.values.get(name)

    def flag(self, name: str) -> bool:
        value = self.get(name, False)
        if not isinstance(value, bool):
            raise self.error(f"has {name} = {shown(value)}; it must be true or false")
        return value

    def integer(self, name: str, default: int | None = None, least: int = 1) -> int:
        """Return a whole number from ``least`` to ``LARGEST[name]``."""
        value = self.get(name, default)
        if value is None:
            raise self.error(f"lacks {name!r}; {self.remedy}")
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= LARGEST[name]:
            raise self.error(
                f"has {name} = {shown(value)}; it must be a whole number from {least} to {LARGEST[name]}. {REMEDY}"
            )
        return value

    def optional_integer(self, name: str) -> int | None:
        return None if self.get(name) is None else self.integer(name)

    def number(self, name: str, default: float, least: float, most: float) -> float:
        """Return a number from ``least`` to ``most``."""
        return self.check_number(name, self.get(name, default), least, most)

    def check_number(self, name: str, value: Any, least: float, most: float) -> float:
        """Return ``value``, which belongs to the field ``name``. Raises CheckpointError."""
        if not isinstance(value, int | float) or isinstance(value, bool) or not least <= value <= most:
            limits = f"it must be a number from {plain(least)} to {plain(most)}"
            raise self.error(f"has {name} = {shown(value)}; {limits}. {REMEDY}")
        return value

    def choice(self, name: str, value: Any, supported: tuple[str, ...]) -> str:
        """Return ``value``, which belongs to the field ``name`` and must be one of ``supported``."""
        if not isinstance(value, str) or value not in supported:
            raise self.error(f"has {name} {shown(value)}; supported are {', '.join(supported)}. {REMEDY}")
        return value

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path}{self.within} {message}")


REMEDY = "Correct the file or choose another checkpoint"
