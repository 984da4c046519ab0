"""Write checkpoints of the shapes used for measurements: random weights in bf16, or the config alone.

    python bench/make_checkpoint.py /tmp/qwen3-27m                                       for CPUs
    python bench/make_checkpoint.py /tmp/llama-8b --shape llama-8b --config-only         for GPUs, --load-format dummy

Tokenizer and chat template are those of the embedded model, so the checkpoint can be served; shapes with a vision tower
have small ones with tokens of images, and no weights (``--config-only``). ``--set`` changes fields
of config.json: ``--set num_hidden_layers=4``. Quantized weights are random codes with one scale.

Another server needs the same weights if the model has experts: its own random weights may send all tokens to a few of
them. Norms are 1 here, so that the scores of routers spread tokens over all experts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hybrid_shapes import HYBRID_SHAPES
from safetensors.torch import save_file

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.device import detect_devices
from pdserve.config.parallel import choose_parallel_config, num_parameters
from pdserve.model.model_config import load_model_config
from pdserve.model.quantization.kept_weights import MXFP4_BLOCK
from runner.distributed.parallel_state import ParallelState
from runner.loading.decoder_weights import DecoderWeights
from runner.models.layers.weight_shard import WeightShard
from runner.models.registry import decoder_class
from runner.placement import TensorPlacement

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))

_QWEN3: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
}

_LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}

_LLAMA_8B = _LLAMA | {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}

_GPT_OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 201088,
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "sliding_window": 128,
    "attention_bias": True,
    "num_experts_per_tok": 4,
    "swiglu_limit": 7.0,
    "max_position_embeddings": 131072,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}

# The published checkpoints have MXFP4 experts.
_MXFP4: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
_GPT_OSS_20B = _GPT_OSS | {"num_hidden_layers": 24, "num_local_experts": 32}
_GPT_OSS_120B = _GPT_OSS | {"num_hidden_layers": 36, "num_local_experts": 128}

# FP8 as compressed-tensors writes it (per output, dynamic per token), and as DeepSeek and Qwen do (blocks).
_FP8: dict[str, Any] = {"num_bits": 8, "type": "float", "symmetric": True}
_FP8_CHANNELS: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": _FP8 | {"strategy": "channel", "dynamic": False},
            "input_activations": _FP8 | {"strategy": "token", "dynamic": True},
        }
    },
}
_FP8_BLOCKS: dict[str, Any] = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
}

# 4 bits as ModelOpt and AutoAWQ write them.
_NVFP4: dict[str, Any] = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "group_size": 16,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
            "input_activations": {"num_bits": 4, "type": "float", "group_size": 16, "dynamic": False},
        }
    },
}
_AWQ: dict[str, Any] = {
    "quant_method": "awq",
    "bits": 4,
    "group_size": 128,
    "zero_point": True,
    "version": "gemm",
    "modules_to_not_convert": None,
}

_QWEN3_30B_A3B: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "tie_word_embeddings": False,
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
}

_MIXTRAL_8X7B: dict[str, Any] = {
    "architectures": ["MixtralForCausalLM"],
    "model_type": "mixtral",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
}

_GLM_45_AIR: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "model_type": "glm4_moe",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "vocab_size": 151552,
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 46,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "partial_rotary_factor": 0.5,
    "attention_bias": True,
    "use_qk_norm": False,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.0,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 131072,
    "rope_theta": 1000000,
}

_MINIMAX_M2: dict[str, Any] = {
    "architectures": ["MiniMaxM2ForCausalLM"],
    "model_type": "minimax_m2",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 200064,
    "hidden_size": 3072,
    "intermediate_size": 1536,
    "num_hidden_layers": 62,
    "num_attention_heads": 48,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rotary_dim": 64,
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
    "scoring_func": "sigmoid",
    "max_position_embeddings": 196608,
    "rope_theta": 5000000,
}

# Qwen3-Next with 12 of its 48 layers.
_QWEN3_NEXT_12L: dict[str, Any] = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 5120,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_hidden_layers": 12,
    "full_attention_interval": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
}

# The text model of Qwen3.5-35B-A3B.
_QWEN3_5_35B_A3B = _QWEN3_NEXT_12L | {
    "architectures": ["Qwen3_5MoeForCausalLM"],
    "model_type": "qwen3_5_moe_text",
    "vocab_size": 248320,
    "num_hidden_layers": 40,
    "num_experts": 256,
    "num_experts_per_tok": 8,
}

# The widths of Qwen3.5-27B's text model, with 8 of its 64 layers.
_QWEN3_5_8L: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "vocab_size": 248320,
    "hidden_size": 5120,
    "intermediate_size": 17408,
    "num_hidden_layers": 8,
    "full_attention_interval": 4,
    "num_attention_heads": 24,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_conv_kernel_dim": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "max_position_embeddings": 262144,
    "rope_theta": 10000000,
}

_QWEN_VISION: dict[str, Any] = {
    "depth": 27,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "in_channels": 3,
    "intermediate_size": 4304,
    "num_heads": 16,
    "num_position_embeddings": 2304,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
}

# Qwen3.5-27B with 8 of its 64 text layers, and its whole tower.
_QWEN3_5_8L_IMAGES: dict[str, Any] = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        **{name: value for name, value in _QWEN3_5_8L.items() if name not in ("architectures", "rope_theta")},
        "attn_output_gate": True,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
        "mamba_ssm_dtype": "float32",
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
    "vision_config": _QWEN_VISION | {"model_type": "qwen3_5", "out_hidden_size": 5120, "deepstack_visual_indexes": []},
}

_QWEN3_VL_8B: dict[str, Any] = {
    "architectures": ["Qwen3VLForConditionalGeneration"],
    "model_type": "qwen3_vl",
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "text_config": {
        "attention_bias": False,
        "dtype": "bfloat16",
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "max_position_embeddings": 262144,
        "model_type": "qwen3_vl_text",
        "num_attention_heads": 32,
        "num_hidden_layers": 36,
        "num_key_value_heads": 8,
        "rms_norm_eps": 1e-06,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"},
        "rope_theta": 5000000,
        "tie_word_embeddings": False,
        "vocab_size": 151936,
    },
    "vision_config": _QWEN_VISION
    | {"model_type": "qwen3_vl", "out_hidden_size": 4096, "deepstack_visual_indexes": [8, 16, 24]},
}

_DEEPSEEK: dict[str, Any] = {
    "dtype": "bfloat16",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "max_position_embeddings": 163840,
    "rope_theta": 10000,
}
_DEEPSEEK_YARN: dict[str, Any] = {
    "type": "yarn",
    "factor": 40,
    "beta_fast": 32,
    "beta_slow": 1,
    "original_max_position_embeddings": 4096,
}
_DEEPSEEK_V2_LITE = _DEEPSEEK | {
    "architectures": ["DeepseekV2ForCausalLM"],
    "model_type": "deepseek_v2",
    "vocab_size": 102400,
    "hidden_size": 2048,
    "intermediate_size": 10944,
    "moe_intermediate_size": 1408,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "q_lora_rank": None,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "first_k_dense_replace": 1,
    "topk_method": "greedy",
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": False,
    "routed_scaling_factor": 1.0,
    "rope_scaling": _DEEPSEEK_YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
# DeepSeek-V3 with 5 of its 61 layers: 3 dense ones and 2 with experts.
_DEEPSEEK_V3_5L_FP8 = _DEEPSEEK | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 5,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
    "norm_topk_prob": True,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "num_nextn_predict_layers": 0,
    "rope_scaling": _DEEPSEEK_YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
    "quantization_config": _FP8_BLOCKS,
}

_GLM_47_FLASH = _DEEPSEEK | {
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "rms_norm_eps": 1e-5,
    "vocab_size": 154880,
    "hidden_size": 2048,
    "intermediate_size": 10240,
    "moe_intermediate_size": 1536,
    "num_hidden_layers": 47,
    "num_attention_heads": 20,
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "qk_nope_head_dim": 192,
    "v_head_dim": 256,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "norm_topk_prob": True,
    "routed_scaling_factor": 1.8,
    "num_nextn_predict_layers": 0,
    "max_position_embeddings": 202752,
    "rope_theta": 1000000,
}

_QWEN25_7B: dict[str, Any] = _QWEN3 | {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "tie_word_embeddings": False,
    "vocab_size": 152064,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "use_sliding_window": False,
    "max_position_embeddings": 32768,
    "rope_theta": 1000000.0,
}

_MIMO_7B: dict[str, Any] = _QWEN25_7B | {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "rms_norm_eps": 1e-5,
    "vocab_size": 151680,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "attention_bias": True,
    "num_nextn_predict_layers": 0,
    "rope_theta": 640000,
}

_GEMMA4: dict[str, Any] = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "final_logit_softcapping": 30.0,
    "vocab_size": 262144,
    "head_dim": 256,
    "global_head_dim": 512,
    "hidden_size_per_layer_input": 0,
    "max_position_embeddings": 131072,
}
_GEMMA4_E2B = _GEMMA4 | {
    "vocab_size_per_layer_input": 262144,
    "hidden_size_per_layer_input": 256,
    "hidden_size": 1536,
    "intermediate_size": 6144,
    "num_hidden_layers": 35,
    "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 7,
    "num_attention_heads": 8,
    "num_key_value_heads": 1,
    "num_kv_shared_layers": 20,
    "use_double_wide_mlp": True,
    "sliding_window": 512,
}
_GEMMA4_26B_A4B = _GEMMA4 | {
    "hidden_size": 2816,
    "intermediate_size": 2112,
    "num_hidden_layers": 30,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "num_global_key_value_heads": 2,
    "attention_k_eq_v": True,
    "enable_moe_block": True,
    "num_experts": 128,
    "top_k_experts": 8,
    "moe_intermediate_size": 704,
    "sliding_window": 1024,
}
_GEMMA4_31B = _GEMMA4 | {
    "hidden_size": 5376,
    "intermediate_size": 21504,
    "num_hidden_layers": 60,
    "num_attention_heads": 32,
    "num_key_value_heads": 16,
    "num_global_key_value_heads": 4,
    "attention_k_eq_v": True,
    "sliding_window": 1024,
}

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-27m": _QWEN3
    | {
        "vocab_size": 4096,
        "hidden_size": 512,
        "intermediate_size": 1536,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "max_position_embeddings": 8192,
    },
    "qwen3-0.6b": _QWEN3
    | {
        "vocab_size": 151936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
    },
    "qwen2.5-7b": _QWEN25_7B,
    "mimo-7b": _MIMO_7B,
    "qwen3-30b-a3b": _QWEN3_30B_A3B,
    "qwen3-30b-a3b-fp8": _QWEN3_30B_A3B | {"quantization_config": _FP8_BLOCKS},
    "qwen3-30b-a3b-nvfp4": _QWEN3_30B_A3B | {"quantization_config": _NVFP4},
    "qwen3-30b-a3b-awq": _QWEN3_30B_A3B | {"quantization_config": _AWQ | {"modules_to_not_convert": ["mlp.gate."]}},
    "qwen3-vl-8b": _QWEN3_VL_8B,
    "qwen3-next-12l": _QWEN3_NEXT_12L,
    "qwen3.5-8l": _QWEN3_5_8L,
    "qwen3.5-8l-images": _QWEN3_5_8L_IMAGES,
    "qwen3.5-35b-a3b": _QWEN3_5_35B_A3B,
    "deepseek-v2-lite": _DEEPSEEK_V2_LITE,
    "deepseek-v3-5l-fp8": _DEEPSEEK_V3_5L_FP8,
    "glm-4.7-flash": _GLM_47_FLASH,
    "gemma-4-e2b": _GEMMA4_E2B,
    "gemma-4-26b-a4b": _GEMMA4_26B_A4B,
    "gemma-4-31b": _GEMMA4_31B,
    "mixtral-8x7b": _MIXTRAL_8X7B,
    "glm-4.5-air": _GLM_45_AIR,
    "minimax-m2": _MINIMAX_M2,
    "gpt-oss-20b": _GPT_OSS_20B,
    "gpt-oss-20b-mxfp4": _GPT_OSS_20B | {"quantization_config": _MXFP4},
    "gpt-oss-120b": _GPT_OSS_120B,
    "gpt-oss-120b-mxfp4": _GPT_OSS_120B | {"quantization_config": _MXFP4},
    "llama-8b": _LLAMA_8B,
    "llama-8b-nvfp4": _LLAMA_8B | {"quantization_config": _NVFP4},
    "llama-8b-awq": _LLAMA_8B | {"quantization_config": _AWQ},
    "llama-8b-fp8": _LLAMA_8B | {"quantization_config": _FP8_CHANNELS},
    "llama-8b-fp8-blocks": _LLAMA_8B | {"quantization_config": _FP8_BLOCKS},
    "llama-70b": _LLAMA
    | {
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
    },
    **HYBRID_SHAPES,
}
STANDARD_DEVIATION = 0.02
_FP8_WEIGHTS = "_proj.weight", "_proj_with_mqa.weight"
E2M1_DEVIATION = 2.9  # standard deviation of the values of random codes
INT4_DEVIATION = 4.6
MXFP4_SCALE = 127 - 7  # 2^-7, E8M0: about STANDARD_DEVIATION with random codes


def make(directory: Path, config: dict[str, Any], weights: bool) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for file in EMBEDDED_MODEL.iterdir():
        if file.suffix != ".safetensors" and file.name != "config.json":
            shutil.copy(file, directory)
    if "vision_config" in config:
        config = config | write_image_files(directory)
    (directory / "config.json").write_text(json.dumps(config, indent=2))
    if weights:
        save_file(random_tensors(directory), directory / "model.safetensors", {"format": "pt"})
    model = load_model_config(directory)
    size = num_parameters(model, choose_parallel_config(model, pp=1, tp=1).position(0))
    print(f"{directory}: {size / 1e6:.1f} M parameters" + ("" if weights else ", config only"))


def write_image_files(directory: Path) -> dict[str, int]:
    """Write a small tokenizer with the tokens of images, and the processor as published; return the tokens' ids."""
    from image_checkpoints import PROCESSOR, write_tokenizer

    ids = write_tokenizer(directory)
    sizes = {"longest_edge": 16_777_216, "shortest_edge": 65_536}
    (directory / "preprocessor_config.json").write_text(json.dumps({**PROCESSOR, "size": sizes}))
    names = {"image_pad": "image_token_id", "video_pad": "video_token_id"}
    names |= {name: f"{name}_token_id" for name in ("vision_start", "vision_end")}
    return {field: ids[f"<|{name}|>"] for name, field in names.items()}


def random_tensors(directory: Path) -> dict[str, torch.Tensor]:
    config = load_model_config(directory)
    placement = TensorPlacement(torch.device("cpu"), torch.bfloat16, torch.bfloat16)
    parallel = ParallelState(choose_parallel_config(config, pp=1, tp=1).position(0), detect_devices("cpu", 1)[0], "")
    model = decoder_class(config.architecture)(config, parallel, placement)
    quantization = json.loads((directory / "config.json").read_text()).get("quantization_config", {})

    def tensors_of(item: tuple[str, WeightShard]) -> dict[str, torch.Tensor]:
        name = item[0]
        shape = item[1].full_shape
        if quantization == _MXFP4 and name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            return mxfp4_tensors(name, *shape)
        if quantization in (_FP8_BLOCKS, _FP8_CHANNELS) and name.endswith(_FP8_WEIGHTS):
            return fp8_tensors(name, shape, quantization)
        if quantization == _NVFP4 and name.endswith(_FP8_WEIGHTS):
            return nvfp4_tensors(name, *shape)
        if quantization.get("quant_method") == "awq" and name.endswith(_FP8_WEIGHTS):
            return awq_tensors(name, *shape)
        if name.endswith("norm.weight"):
            return {name: torch.ones(shape, dtype=torch.bfloat16)}
        return {name: random_values(name, shape).mul_(STANDARD_DEVIATION).bfloat16()}

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        return dict(
            item for tensors in pool.map(tensors_of, DecoderWeights(model).shards()) for item in tensors.items()
        )


def seed_of(name: str) -> int:
    return int.from_bytes(name.encode()) % 2**32


def random_values(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed_of(name)))


def fp8_tensors(name: str, shape: tuple[int, ...], quantization: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a weight [out, in] in FP8 with its scales: of blocks, else of each output."""
    weight = {name: random_values(name, shape).to(torch.float8_e4m3fn)}
    if quantization == _FP8_CHANNELS:
        return weight | {f"{name}_scale": torch.full((shape[0], 1), STANDARD_DEVIATION, dtype=torch.bfloat16)}
    blocks = [-(-size // block) for size, block in zip(shape, quantization["weight_block_size"], strict=True)]
    return weight | {f"{name}_scale_inv": torch.full(blocks, STANDARD_DEVIATION)}


def mxfp4_tensors(name: str, experts: int, inputs: int, outputs: int) -> dict[str, torch.Tensor]:
    """Return random codes and scales of stacked experts."""
    shape = (experts, outputs, inputs // MXFP4_BLOCK, MXFP4_BLOCK // 2)
    scales = torch.full(shape[:3], MXFP4_SCALE, dtype=torch.uint8)
    return {f"{name}_blocks": random_bytes(name, shape), f"{name}_scales": scales}


def nvfp4_tensors(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    """Return a weight of random codes whose blocks have the scale 1."""
    return {
        name: random_bytes(name, (outputs, inputs // 2)),
        f"{name}_scale": torch.ones(outputs, inputs // 16).to(torch.float8_e4m3fn),
        f"{name}_scale_2": torch.tensor(STANDARD_DEVIATION / E2M1_DEVIATION),
        f"{name.removesuffix('weight')}input_scale": torch.tensor(1.0),
    }


def awq_tensors(name: str, outputs: int, inputs: int) -> dict[str, torch.Tensor]:
    """Return a weight of random codes with zeros of 8."""
    module = name.removesuffix("weight")
    groups = inputs // _AWQ["group_size"]
    return {
        f"{module}qweight": random_bytes(name, (inputs, outputs // 2)).view(torch.int32),
        f"{module}qzeros": torch.full((groups, outputs // 2), 0x88, dtype=torch.uint8).view(torch.int32),
        f"{module}scales": torch.full((groups, outputs), STANDARD_DEVIATION / INT4_DEVIATION, dtype=torch.float16),
    }


def random_bytes(name: str, shape: tuple[int, ...]) -> torch.Tensor:
    data = np.random.default_rng(seed_of(name)).bytes(math.prod(shape))
    return torch.from_numpy(np.frombuffer(bytearray(data), np.uint8).reshape(shape))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-27m")
    parser.add_argument("--config-only", action="store_true", help="no weights: serve it with --load-format dummy")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=JSON", help="a field of config.json")
    args = parser.parse_args()
    changes = {name: json.loads(value) for name, value in (item.split("=", 1) for item in args.set)}
    config = SHAPES[args.shape] | changes
    if "vision_config" in config and not args.config_only:
        parser.error(f"--shape {args.shape} has a vision tower, whose weights are not written; add --config-only")
    make(args.directory, config, weights=not args.config_only)


if __name__ == "__main__":
    main()
