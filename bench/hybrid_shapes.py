"""Shapes of models with short convolutions or Mamba2 beside attention, for ``make_checkpoint.py``."""

from __future__ import annotations

from typing import Any

_COMMON = {"dtype": "bfloat16", "max_position_embeddings": 131_072}
_GRANITE_LAYERS = ["mamba"] * 5 + ["attention"] + (["mamba"] * 9 + ["attention"]) * 3 + ["mamba"] * 4

HYBRID_SHAPES: dict[str, dict[str, Any]] = {
    "lfm2-1.2b": _COMMON
    | {
        "architectures": ["Lfm2ForCausalLM"],
        "model_type": "lfm2",
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "block_auto_adjust_ff_dim": False,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["conv", "conv", "full_attention"] * 4 + ["conv", "full_attention"] * 2,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 16,
        "rope_theta": 1_000_000.0,
        "vocab_size": 65_536,
    },
    "lfm2-8b-a1b": _COMMON
    | {
        "architectures": ["Lfm2MoeForCausalLM"],
        "model_type": "lfm2_moe",
        "hidden_size": 2048,
        "intermediate_size": 7168,
        "moe_intermediate_size": 1792,
        "conv_L_cache": 3,
        "conv_bias": False,
        "layer_types": ["conv", "conv", "full_attention", "conv"] * 6,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 24,
        "num_dense_layers": 2,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "use_expert_bias": True,
        "routed_scaling_factor": 1.0,
        "rope_theta": 1_000_000.0,
        "vocab_size": 65_536,
    },
    "granite-4-h-small": _COMMON
    | {
        "architectures": ["GraniteMoeHybridForCausalLM"],
        "model_type": "granitemoehybrid",
        "hidden_size": 4096,
        "intermediate_size": 768,
        "shared_intermediate_size": 1536,
        "layer_types": _GRANITE_LAYERS,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 40,
        "mamba_d_conv": 4,
        "mamba_d_head": 64,
        "mamba_d_state": 128,
        "mamba_expand": 2,
        "mamba_n_groups": 1,
        "mamba_n_heads": 128,
        "num_local_experts": 72,
        "num_experts_per_tok": 10,
        "position_embedding_type": "nope",
        "attention_multiplier": 0.0078125,
        "embedding_multiplier": 12,
        "residual_multiplier": 0.22,
        "logits_scaling": 16,
        "tie_word_embeddings": True,
        "vocab_size": 100_352,
    },
    "nemotron-3-nano": _COMMON
    | {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "hidden_size": 2688,
        "intermediate_size": 1856,
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "num_attention_heads": 32,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 52,
        "mamba_num_heads": 64,
        "mamba_head_dim": 64,
        "ssm_state_size": 128,
        "conv_kernel": 4,
        "n_groups": 8,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "n_shared_experts": 1,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "norm_topk_prob": True,
        "routed_scaling_factor": 2.5,
        "mlp_hidden_act": "relu2",
        "tie_word_embeddings": False,
        "vocab_size": 131_072,
    },
    "falcon-h1-7b": _COMMON
    | {
        "architectures": ["FalconH1ForCausalLM"],
        "model_type": "falcon_h1",
        "hidden_size": 3072,
        "intermediate_size": 12_288,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_hidden_layers": 44,
        "mamba_d_ssm": 3072,
        "mamba_n_heads": 24,
        "mamba_d_head": 128,
        "mamba_d_state": 256,
        "mamba_n_groups": 1,
        "mamba_d_conv": 4,
        "rope_theta": 1e11,
        "tie_word_embeddings": False,
        "vocab_size": 130_049,
    },
}


def first_layers(shape: dict[str, Any], num_layers: int) -> dict[str, Any]:
    """Return the fields of a shape's first layers."""
    fields: dict[str, Any] = {"num_hidden_layers": num_layers}
    for name in ("layer_types", "hybrid_override_pattern"):
        if name in shape:
            fields[name] = shape[name][:num_layers]
    return fields
