"""Tiny random checkpoints of any causal model type of transformers."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
import transformers

#: Types that tests serve through a handoff, with the sizes that differ from ``_SMALL``.
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
    "sliding_window": 8,
    "max_position_embeddings": 512,
    "n_positions": 512,
    "layer_types": None,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "float32",
}
_FULL = {"layer_types": ["full_attention"] * 3}
_DECODER = {"is_decoder": True}
_BERTS: tuple[str, ...] = (
    "bert",
    "bert-generation",
    "camembert",
    "data2vec-text",
    "electra",
    "ernie",
    "megatron-bert",
    "rembert",
)
_BERTS += ("roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod")
#: Fields without which a type has no causal attention in every layer. docs/models.md names them.
CONDITIONS: dict[str, dict[str, Any]] = {
    **dict.fromkeys(_BERTS, _DECODER),
    **dict.fromkeys(("lfm3", "minimax"), _FULL),
}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_NO_LAYER_TYPES: dict[str, Any] = {"layer_types": ...}
#: Sizes of types that only the sweep over all types builds. ``...``: the type's own.
_MORE: dict[str, dict[str, Any]] = {
    # Native. Other tests have their recurrent layers.
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next"), _FULL),
    "lfm2": _FULL,
    **dict.fromkeys(("bamba", "qwen4_exp", "recurrent_gemma", "zamba", "zamba2"), _NO_LAYER_TYPES),
    "blenderbot": {"decoder_ffn_dim": 96, "encoder_ffn_dim": 96, "decoder_layers": 3},
    "cohere_compass_text": {"rope_parameters": {"full_attention": {**_ROPE, "mrope_section": [4, 2, 2]}}},
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 96},
    },
    "dots1": {"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
    "dots3_note_text": {
        **_FULL,
        "shared_experts_intermediate_size": 32,
        "mlp_layer_types": ["dense", "sparse", "sparse"],
    },
    "falcon_h1": {
        **_NO_LAYER_TYPES,
        "mamba_d_ssm": 64,
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 16,
    },
    "granitemoehybrid": {
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "mamba_n_heads": 8,
        "mamba_d_state": 16,
    },
    "gemma3n_text": {
        "vocab_size_per_layer_input": 128,
        "hidden_size_per_layer_input": 16,
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    },
    "gemma4_text": {"vocab_size_per_layer_input": 128, "hidden_size_per_layer_input": 16},
    "gpt_bigcode": {"num_key_value_heads": 1},
    "gpt_neo": {"attention_types": [[["global"], 3]]},
    "lfm2_moe": {**_FULL, "num_dense_layers": 1},
    "llama4_text": {"floor_scale": 8},
    "longcat_flash": {"ffn_hidden_size": 96, "expert_ffn_hidden_size": 32, "zero_expert_num": 2, "moe_topk": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16, "n_groups": 2, "state_size": 16},
    "mimo_v2_flash": {"v_head_dim": 8},
    "moshi": {"sliding_window": ...},
    "nemotron_h": {**_NO_LAYER_TYPES, "sliding_window": ..., "mamba_num_heads": 8, "mamba_head_dim": 16},
    "plbart": {"decoder_attention_heads": 4, "decoder_layers": 3, "encoder_layers": 1, "encoder_attention_heads": 4},
    "reformer": _DECODER,
    "whisper": {"decoder_attention_heads": 4, "decoder_layers": 3, "encoder_layers": 1, "encoder_attention_heads": 4},
    "zaya": {"num_experts_per_tok": 1},
}
#: Sizes of the parts of multimodal models other than the text decoder.
_SMALL_PART = {"depth": 1, "embed_dim": 64, "output_dim": 64, "out_hidden_size": 64, "num_blocks": 1}
_LARGEST = 20_000_000  # parameters
#: Sizes of models with latent attention (DeepSeek).
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
        num_parameters = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
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
    """Return a small config of a type, with the sizes here that the type has."""
    config_of: Any = transformers.AutoConfig.for_model
    usual = config_of(model_type)
    sizes = FAMILIES.get(model_type, CONDITIONS.get(model_type, {}) | _MORE.get(model_type, {})) | overrides
    chosen = _known_sizes(usual, sizes)
    for name, part in vars(usual).items():
        if isinstance(part, transformers.PreTrainedConfig) and name not in chosen:
            is_text = part.model_type in transformers.CONFIG_MAPPING
            small = small_config(part.model_type).to_dict() if is_text else _known_sizes(part, _SMALL_PART)
            chosen[name] = small
    while True:
        try:
            return config_of(model_type, **chosen)
        except AttributeError as exc:  # a size that the type computes from others
            match = re.search("property '(\\w+)'", str(exc))
            if match is None or match.group(1) not in chosen:
                raise
            del chosen[match.group(1)]


def _known_sizes(usual: Any, more: dict[str, Any]) -> dict[str, Any]:
    names = usual.to_dict().keys() | getattr(usual, "attribute_map", {}).keys()
    sizes = {**_SMALL, **(_SMALL_LATENT if "kv_lora_rank" in names else {}), **more}
    return {name: value for name, value in sizes.items() if name in names and value is not ...}
