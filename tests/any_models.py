"""Tiny random checkpoints of any causal model type of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers

#: Types that `scripts/test` serves exactly, with the sizes that differ from ``_SMALL``.
FAMILIES: dict[str, dict[str, Any]] = {
    "opt": {},
    "gpt2": {},
    "gpt_neox": {},
    "phi3": {"sliding_window": 8},
    "gemma2": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "gemma3_text": {"sliding_window": 8, "query_pre_attn_scalar": 16},
    "olmo2": {},
    "granite": {},
    "cohere2": {"sliding_window": 8},
    "mixtral": {},
    "qwen3_moe": {},
    "gpt_oss": {"sliding_window": 8},
}

_SMALL: dict[str, Any] = {
    **dict.fromkeys(("num_hidden_layers", "n_layer", "n_layers", "num_layers"), 3),
    **dict.fromkeys(("hidden_size", "n_embd", "d_model", "word_embed_proj_dim"), 64),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "moe_intermediate_size"), 96),
    **dict.fromkeys(("num_attention_heads", "n_head", "n_heads", "num_heads"), 4),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    "num_key_value_heads": 2,
    "num_experts_per_tok": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "layer_types": None,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
#: Sizes of types that only the sweep over all types builds. None: the type's own.
_MORE: dict[str, dict[str, Any]] = {
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "lfm2_moe": {"layer_types": ["full_attention"] * 3, "num_dense_layers": 1},
}
_LARGEST = 20_000_000  # parameters
#: Of models with latent attention (DeepSeek).
_SMALL_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "head_dim": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 12,
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}


def make_any_checkpoint(path: Path, model_type: str, *, seed: int = 0, **overrides: Any) -> Path:
    """Write a random checkpoint and return its directory. Weights are wide, so that logits differ clearly."""
    auto: Any = transformers.AutoModelForCausalLM
    config = small_config(model_type, **overrides)
    with torch.device("meta"):
        num_parameters = sum(each.numel() for each in auto.from_config(config).parameters())
    if num_parameters > _LARGEST:
        raise ValueError(f"a small {model_type} has {num_parameters} parameters; set more of its sizes in _SMALL")
    model = auto.from_config(config, attn_implementation="eager")
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1:
                parameter.add_(0.1 * noise)
            else:
                parameter.copy_(noise if "embed" in name else 1.3 * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    return path


def small_config(model_type: str, **overrides: Any) -> Any:
    """Return a small config of a type: of the sizes here, those that the type has."""
    config_of: Any = transformers.AutoConfig.for_model
    usual = config_of(model_type)
    known = usual.to_dict().keys() | getattr(usual, "attribute_map", {}).keys()
    sizes = {
        **_SMALL,
        **(_SMALL_LATENT if "kv_lora_rank" in known else {}),
        **FAMILIES.get(model_type, _MORE.get(model_type, {})),
        **overrides,
    }
    chosen = {name: value for name, value in sizes.items() if name in known}
    while True:
        try:
            return config_of(model_type, **chosen)
        except AttributeError as exc:  # a size that the type computes from others
            found = re.search("property '(\\w+)'", str(exc))
            if found is None or found.group(1) not in chosen:
                raise
            del chosen[found.group(1)]
