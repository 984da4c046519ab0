"""config.json of published models by their odd fields, with small sizes, and what a node says of each.

Sizes are not the published ones; names, types, nulls and lists are. ``refused`` is a pattern of the error that a node,
``pdserve explain`` and ``doctor`` give; empty if the model is served.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

Fields = dict[str, Any]


class PublishedConfig(NamedTuple):
    config: Fields
    refused: str = ""
    options: Fields | None = None  # hf_quant_config.json
    max_model_len: int = 256

    def write(self, directory: Path) -> Path:
        directory.mkdir(parents=True)
        (directory / "config.json").write_text(json.dumps(self.config))
        if self.options is not None:
            (directory / "hf_quant_config.json").write_text(json.dumps(self.options))
        return directory


_SIZES: Fields = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 160,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-06,
    "hidden_act": "silu",
    "initializer_range": 0.02,
    "use_cache": True,
}
_VISION = {"hidden_size": 32, "model_type": "siglip_vision_model", "num_hidden_layers": 1, "patch_size": 14}


def _causal(architecture: str, model_type: str, **fields: Any) -> Fields:
    return {"architectures": [architecture], "model_type": model_type, "torch_dtype": "bfloat16", **_SIZES, **fields}


def _llama(**fields: Any) -> Fields:
    rope = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    return _causal(
        "LlamaForCausalLM",
        "llama",
        attention_bias=False,
        bos_token_id=1,
        eos_token_id=[2, 3],
        mlp_bias=False,
        pretraining_tp=1,
        rope_scaling={**rope, "rope_type": "llama3"},
        rope_theta=500000.0,
        **fields,
    )


def _qwen3(**fields: Any) -> Fields:
    return _causal(
        "Qwen3ForCausalLM",
        "qwen3",
        head_dim=16,
        max_window_layers=36,
        rope_scaling=None,
        sliding_window=None,
        use_sliding_window=False,
        **fields,
    )


_MLA: Fields = {
    "kv_lora_rank": 16,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_YARN = {
    "beta_fast": 32,
    "beta_slow": 1,
    "factor": 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 256,
    "type": "yarn",
}
_FP8_BLOCKS = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def _deepseek(architecture: str, model_type: str, **fields: Any) -> Fields:
    return _causal(
        architecture,
        model_type,
        **{
            **_MLA,
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"},
            "aux_loss_alpha": 0.001,
            "ep_size": 1,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "moe_layer_freq": 1,
            "n_group": 2,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_nextn_predict_layers": 1,
            "rope_scaling": _YARN,
            "rope_theta": 10000,
            "routed_scaling_factor": 2.5,
            "scoring_func": "sigmoid",
            "seq_aux": True,
            "topk_group": 1,
            "topk_method": "noaux_tc",
            **fields,
        },
    )


def _glm(architecture: str, model_type: str, **fields: Any) -> Fields:
    return _causal(
        architecture,
        model_type,
        **{
            "attention_bias": False,
            "first_k_dense_replace": 1,
            "moe_intermediate_size": 32,
            "n_group": 1,
            "n_routed_experts": 8,
            "n_shared_experts": 1,
            "norm_topk_prob": True,
            "num_experts_per_tok": 2,
            "num_nextn_predict_layers": 1,
            "rope_theta": 1000000,
            "routed_scaling_factor": 1.0,
            "topk_group": 1,
            "use_qk_norm": False,
            **fields,
        },
    )


def _minimax(model_type: str, **fields: Any) -> Fields:
    config = _causal(
        "MiniMaxM2ForCausalLM",
        model_type,
        attn_type_list=[1] * 4,
        auto_map={"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
        head_dim=16,
        mtp_transformer_layers=1,
        num_experts_per_tok=2,
        num_local_experts=4,
        num_mtp_modules=3,
        qk_norm_type="per_layer",
        rope_theta=5000000,
        rotary_dim=8,
        scoring_func="sigmoid",
        shared_intermediate_size=0,
        use_mtp=True,
        use_qk_norm=True,
        use_routing_bias=True,
        **fields,
    )
    del config["torch_dtype"]
    return config


def _gemma(text: Fields, architecture: str, model_type: str, **fields: Any) -> Fields:
    """Like Gemma 3 and 4: the whole has few fields beside its parts."""
    sizes = {name: value for name, value in _SIZES.items() if name not in ("hidden_act", "use_cache")}
    return {
        "architectures": [architecture],
        "boi_token_index": 150,
        "dtype": "bfloat16",
        "eos_token_id": [1, 106],
        "image_token_index": 151,
        "initializer_range": 0.02,
        "model_type": model_type,
        "text_config": {**sizes, "head_dim": 16, "hidden_activation": "gelu_pytorch_tanh", **text},
        "vision_config": _VISION,
        **fields,
    }


_GEMMA_LAYERS = ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"]


def _gemma4(**text: Any) -> Fields:
    rope = {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    }
    fields = {
        "attention_k_eq_v": True,
        "enable_moe_block": False,
        "final_logit_softcapping": 30.0,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 0,
        "layer_types": _GEMMA_LAYERS,
        "model_type": "gemma4_text",
        "num_global_key_value_heads": 1,
        "num_kv_shared_layers": 0,
        "rope_parameters": rope,
        "sliding_window": 64,
        "tie_word_embeddings": True,
        "use_bidirectional_attention": "vision",
        "vocab_size_per_layer_input": 160,
        **text,
    }
    return _gemma(fields, "Gemma4ForConditionalGeneration", "gemma4", vision_config={"model_type": "gemma4_vision"})


def _gemma3n() -> Fields:
    text = {
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "altup_num_inputs": 4,
        "final_logit_softcapping": 30.0,
        "hidden_size_per_layer_input": 16,
        "intermediate_size": [128] * 4,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "model_type": "gemma3n_text",
        "num_kv_shared_layers": 2,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "rope_theta": 1000000.0,
        "sliding_window": 64,
        "torch_dtype": "bfloat16",
        "vocab_size_per_layer_input": 160,
    }
    vision = {"architecture": "mobilenetv5_300m_enc", "hidden_size": 64, "model_type": "gemma3n_vision"}
    audio = {"hidden_size": 32, "model_type": "gemma3n_audio", "conf_num_hidden_layers": 1}
    return _gemma(
        text, "Gemma3nForConditionalGeneration", "gemma3n", vision_config=vision, audio_config=audio, audio_token_id=152
    )


def _llama4() -> Fields:
    text = {
        **_SIZES,
        "attention_bias": False,
        "attention_chunk_size": 128,
        "attn_scale": 0.1,
        "attn_temperature_tuning": True,
        "floor_scale": 8192,
        "for_llm_compressor": False,
        "head_dim": 16,
        "interleave_moe_layer_step": 1,
        "intermediate_size_mlp": 128,
        "model_type": "llama4_text",
        "no_rope_layers": [],
        "num_experts_per_tok": 1,
        "num_local_experts": 4,
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        "rope_scaling": {"factor": 16.0, "high_freq_factor": 1.0, "low_freq_factor": 1.0, "rope_type": "llama3",
                         "original_max_position_embeddings": 256},
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
        "use_qk_norm": True,
    }  # fmt: skip
    return {
        "architectures": ["Llama4ForConditionalGeneration"],
        "boi_token_index": 150,
        "eoi_token_index": 151,
        "image_token_index": 152,
        "model_type": "llama4",
        "text_config": text,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 32, "model_type": "llama4_vision_model", "num_hidden_layers": 1},
    }


def _around(text: Fields, architecture: str, model_type: str, **fields: Any) -> Fields:
    """Return the config of a multimodal model with the parts that all have."""
    vision = {"hidden_size": 32, "num_hidden_layers": 1, **fields.pop("vision_config", {})}
    return {
        "architectures": [architecture],
        "model_type": model_type,
        "text_config": {**_SIZES, **text},
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vision_config": vision,
        **fields,
    }


def _kimi_k2_5() -> Fields:
    text = _deepseek("DeepseekV3ForCausalLM", "kimi_k2", n_group=1, num_nextn_predict_layers=0,
                     quantization_config=_COMPRESSED)  # fmt: skip
    return _around(text, "KimiK25ForConditionalGeneration", "kimi_k25", media_placeholder_token_id=150,
                   vision_config={"mm_hidden_size": 32, "vt_hidden_size": 32, "vt_num_hidden_layers": 1})  # fmt: skip


def _glm_4_5v() -> Fields:
    text = _glm("", "glm4v_moe_text", attention_bias=True, head_dim=16, partial_rotary_factor=0.5,
                rope_scaling={"mrope_section": [1, 1, 2], "rope_type": "default"})  # fmt: skip
    del text["architectures"]
    return _around(text, "Glm4vMoeForConditionalGeneration", "glm4v_moe", image_token_id=150, video_token_id=151,
                   vision_config={"depth": 1, "model_type": "glm4v_moe"})  # fmt: skip


def _mistral3(text: Fields, **fields: Any) -> Fields:
    return {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "image_token_index": 10,
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": {**_SIZES, "attention_dropout": 0.0, "head_dim": 16, **text},
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 32, "model_type": "pixtral", "num_hidden_layers": 1},
        "vision_feature_layer": -1,
        **fields,
    }


_MINISTRAL_ROPE = {**_YARN, "llama_4_scaling_beta": 0.1, "rope_theta": 1000000.0, "rope_type": "yarn"}


def _mistral_small_4() -> Fields:
    text = {
        **_MLA,
        "first_k_dense_replace": 0,
        "head_dim": 24,
        "model_type": "mistral4",
        "qk_head_dim": 24,
        "moe_intermediate_size": 32,
        "n_group": 1,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_experts_per_tok": 2,
        "rope_interleave": True,
        "rope_parameters": {**_YARN, "llama_4_scaling_beta": 0.1, "rope_theta": 10000.0, "rope_type": "yarn"},
        "routed_scaling_factor": 1.0,
        "tie_word_embeddings": False,
        "topk_group": 1,
    }
    return _mistral3(text)


_MODELOPT_GROUP = {
    "input_activations": {"dynamic": False, "num_bits": 8, "type": "float"},
    "targets": ["Linear"],
    "weights": {"dynamic": False, "num_bits": 8, "type": "float"},
}
_MODELOPT_FP8 = {
    "config_groups": {"group_0": _MODELOPT_GROUP},
    "ignore": ["lm_head"],
    "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
    "producer": {"name": "modelopt", "version": "0.37.0"},
    "quant_algo": "FP8",
}
_MODELOPT_MIXED = {
    "exclude_modules": ["lm_head", "mtp*", "model.visual*"],
    "kv_cache_quant_algo": "FP8",
    "producer": {"name": "modelopt", "version": "0.46.0"},
    "quant_algo": "MIXED_PRECISION",
    "quant_method": "modelopt",
    "quantized_layers": {
        **{
            f"model.layers.{layer}.self_attn.{name}_proj": {"quant_algo": "FP8"}
            for layer in range(4)
            for name in "qkvo"
        },
        **{
            f"model.layers.{layer}.mlp.{name}_proj": {"group_size": 16, "quant_algo": "W4A16_NVFP4"}
            for layer in range(4)
            for name in ("gate", "up", "down")
        },
        "lm_head": {"group_size": 16, "quant_algo": "W4A16_NVFP4"},
    },
}
_NVFP4_ARGS = {
    "actorder": None,
    "block_structure": None,
    "group_size": 16,
    "num_bits": 4,
    "strategy": "tensor_group",
    "symmetric": True,
    "type": "float",
}
_COMPRESSED_NVFP4 = {
    "config_groups": {
        "group_0": {
            "format": "nvfp4-pack-quantized",
            "input_activations": {**_NVFP4_ARGS, "dynamic": "local", "observer": "minmax"},
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {**_NVFP4_ARGS, "dynamic": False, "observer": "static_minmax"},
        }
    },
    "format": "nvfp4-pack-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
    "sparsity_config": {},
    "transform_config": {},
    "version": "0.12.0",
}
_AUTO_ROUND = {
    "autoround_version": "0.5.1",
    "bits": 4,
    "block_name_to_quantize": "model.layers",
    "data_type": "int",
    "enable_quanted_input": True,
    "group_size": 128,
    "iters": 1000,
    "low_gpu_mem_usage": True,
    "nsamples": 512,
    "packing_format": "auto_round:auto_gptq",
    "quant_method": "auto-round",
    "sym": True,
}
_AWQ = {
    "bits": 4,
    "group_size": 128,
    "modules_to_not_convert": None,
    "quant_method": "awq",
    "version": "gemm",
    "zero_point": True,
}
_GPTQ = {
    "bits": 4,
    "damp_percent": 0.1,
    "desc_act": True,
    "group_size": 128,
    "model_file_base_name": "model",
    "model_name_or_path": None,
    "quant_method": "gptq",
    "static_groups": False,
    "sym": True,
    "true_sequential": True,
}
_INT4: Fields = {
    "actorder": None,
    "block_structure": None,
    "dynamic": False,
    "group_size": 32,
    "num_bits": 4,
    "observer": "minmax",
    "observer_kwargs": {},
    "strategy": "group",
    "symmetric": True,
    "type": "int",
}
_COMPRESSED = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": _INT4,
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "kv_cache_scheme": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
_GPT_OSS_LAYERS = ["sliding_attention", "full_attention"] * 2
_LINEAR_LAYERS = ["linear_attention"] * 3 + ["full_attention"]
_LONGROPE = {"long_factor": [4.0] * 8, "short_factor": [1.0] * 8, "type": "longrope"}

PUBLISHED: dict[str, PublishedConfig] = {
    # ------------------------------------------------------------ native
    "Llama-3.1-8B-Instruct": PublishedConfig(_llama()),
    "Qwen2.5-7B-Instruct": PublishedConfig(
        _causal("Qwen2ForCausalLM", "qwen2", max_window_layers=28, sliding_window=131072, use_sliding_window=False)
    ),
    "Qwen3-8B": PublishedConfig(_qwen3()),
    "Qwen3-30B-A3B": PublishedConfig(
        _causal("Qwen3MoeForCausalLM", "qwen3_moe", head_dim=16, decoder_sparse_step=1, mlp_only_layers=[],
                max_window_layers=48, moe_intermediate_size=32, norm_topk_prob=True, num_experts=8,
                num_experts_per_tok=2, sliding_window=None, use_sliding_window=False)
    ),
    "gpt-oss-20b": PublishedConfig(
        {name: value for name, value in _causal(
            "GptOssForCausalLM", "gpt_oss", attention_bias=True, experts_per_token=2, head_dim=16,
            initial_context_length=256, layer_types=_GPT_OSS_LAYERS, num_experts_per_tok=2, num_local_experts=4,
            quantization_config={"modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router",
                                                            "model.embed_tokens", "lm_head"], "quant_method": "mxfp4"},
            rope_scaling={"beta_fast": 32.0, "beta_slow": 1.0, "factor": 4.0, "rope_type": "yarn", "truncate": False,
                          "original_max_position_embeddings": 256},
            rope_theta=150000, sliding_window=128, swiglu_limit=7.0).items() if name != "torch_dtype"}
    ),
    "MiniMax-M2": PublishedConfig(
        _minimax("minimax_m2", quantization_config={
            **_FP8_BLOCKS, "fmt": "float8_e4m3fn",
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"]})
    ),
    "DeepSeek-R1": PublishedConfig(
        _deepseek("DeepseekV3ForCausalLM", "deepseek_v3", quantization_config=_FP8_BLOCKS)
    ),
    "Kimi-K2-Thinking": PublishedConfig(
        _deepseek("DeepseekV3ForCausalLM", "kimi_k2", n_group=1, num_nextn_predict_layers=0,
                  quantization_config=_COMPRESSED)
    ),
    "GLM-4.5-Air": PublishedConfig(
        _glm("Glm4MoeForCausalLM", "glm4_moe", head_dim=16, attention_bias=True, partial_rotary_factor=0.5)
    ),
    "GLM-4.7-Flash": PublishedConfig(
        _glm("Glm4MoeLiteForCausalLM", "glm4_moe_lite", **_MLA, partial_rotary_factor=1.0, topk_method="noaux_tc")
    ),
    "MiMo-7B-RL": PublishedConfig(
        _causal("MiMoForCausalLM", "mimo", attention_bias=True, head_dim=16, max_window_layers=32,
                num_nextn_predict_layers=1, rope_scaling=None, rope_theta=640000, sliding_window=512,
                auto_map={"AutoConfig": "configuration_mimo.MiMoConfig"}, use_sliding_window=False)
    ),
    "Qwen3.5-25B-REAP-A3B": PublishedConfig(  # the text part alone, under the class of the whole
        _causal("Qwen3_5MoeForConditionalGeneration", "qwen3_5_moe_text", attention_bias=False, attn_output_gate=True,
                full_attention_interval=4, head_dim=16, linear_conv_kernel_dim=4, linear_key_head_dim=16,
                linear_num_key_heads=2, linear_num_value_heads=4, linear_value_head_dim=16,
                mamba_ssm_dtype="float32", mlp_only_layers=[], moe_intermediate_size=32, mtp_num_hidden_layers=1,
                layer_types=["linear_attention", "linear_attention", "linear_attention", "full_attention"],
                num_experts=8, num_experts_per_tok=2, partial_rotary_factor=0.25, rope_parameters={
                    "mrope_interleaved": True, "mrope_section": [1, 1, 0], "partial_rotary_factor": 0.25,
                    "rope_theta": 10000000, "rope_type": "default"},
                shared_expert_intermediate_size=32)
    ),
    "Qwen3-Next-80B-A3B": PublishedConfig(
        _causal("Qwen3NextForCausalLM", "qwen3_next", decoder_sparse_step=1, full_attention_interval=4, head_dim=16,
                linear_conv_kernel_dim=4, linear_key_head_dim=16, linear_num_key_heads=2, linear_num_value_heads=4,
                linear_value_head_dim=16, mlp_only_layers=[], moe_intermediate_size=32, norm_topk_prob=True,
                num_experts=8, num_experts_per_tok=2, partial_rotary_factor=0.5, rope_scaling=None,
                shared_expert_intermediate_size=32)
    ),
    "Mistral-Small-3.2-24B": PublishedConfig(
        _mistral3({"model_type": "mistral", "rope_theta": 1000000000.0, "sliding_window": None})
    ),
    "Ministral-3-8B-Instruct": PublishedConfig(
        _mistral3({"model_type": "ministral3", "rope_parameters": _MINISTRAL_ROPE, "sliding_window": None,
                   "tie_word_embeddings": False},
                  quantization_config={"activation_scheme": "static", "dequantize": False, "quant_method": "fp8",
                                       "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector",
                                                                  "lm_head", "model.vision_tower", "vision_tower"],
                                       "weight_block_size": None})
    ),
    "Mistral-Medium-3.5": PublishedConfig(
        _mistral3({"model_type": "ministral3", "rope_parameters": {**_MINISTRAL_ROPE, "llama_4_scaling_beta": 0},
                   "sliding_window": None})
    ),
    "Devstral-2 without multimodal parts": PublishedConfig(
        _causal("Ministral3ForCausalLM", "ministral3", attention_dropout=0.0, head_dim=16, pad_token_id=11,
                rope_parameters=_MINISTRAL_ROPE, sliding_window=None)
    ),
    "Mistral-Small-4": PublishedConfig(_mistral_small_4()),
    "Kimi-K2.5": PublishedConfig(_kimi_k2_5()),
    "GLM-4.5V": PublishedConfig(_glm_4_5v()),
    "InternVL3-8B-hf": PublishedConfig(
        _around({"max_window_layers": 70, "model_type": "qwen2", "rope_theta": 1000000.0, "use_sliding_window": False},
                "InternVLForConditionalGeneration", "internvl", image_token_id=150,
                vision_config={"model_type": "internvl_vision", "num_attention_heads": 2})
    ),
    "Meta-Llama-3.1-8B-Instruct-AWQ-INT4": PublishedConfig(_llama(quantization_config=_AWQ)),
    "Llama-2-7B-Chat-GPTQ": PublishedConfig(_llama(quantization_config=_GPTQ)),
    "MiniMax-M2-AWQ with its own model_type": PublishedConfig(_minimax("minimax_m2", quantization_config=_AWQ)),
    "Llama-3.1-8B-Instruct-FP8 without quant_method": PublishedConfig(_llama(quantization_config=_MODELOPT_FP8)),
    "Llama-3.1-8B-Instruct-FP8 with nested options": PublishedConfig(
        _llama(quantization_config={
            "producer": {"name": "modelopt", "version": "0.23.0"},
            "quantization": {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": None, "quant_algo": "FP8"}})
    ),
    "Qwen3-8B-FP8 beside its options": PublishedConfig(
        _qwen3(), options={
            "producer": {"name": "modelopt", "version": "0.31.0"},
            "quantization": {"exclude_modules": ["lm_head"], "kv_cache_quant_algo": "FP8", "quant_algo": "FP8"}}
    ),
    "Llama-3.1-8B-Instruct-NVFP4": PublishedConfig(
        _llama(quantization_config={**_MODELOPT_FP8, "quant_algo": "NVFP4", "quant_method": "modelopt"})
    ),
    "Llama-3.1-8B-Instruct-FP4 beside its options": PublishedConfig(
        _llama(), options={
            "producer": {"name": "modelopt", "version": "0.23.0"},
            "quantization": {"exclude_modules": ["lm_head"], "group_size": 16, "kv_cache_quant_algo": "FP8",
                             "quant_algo": "NVFP4"}}
    ),
    "Qwen3-8B-NVFP4 of llm-compressor": PublishedConfig(_qwen3(quantization_config=_COMPRESSED_NVFP4)),
    "Qwen3-8B in FP8 and NVFP4": PublishedConfig(_qwen3(quantization_config=_MODELOPT_MIXED)),
    "Qwen3-8B-int4-AutoRound": PublishedConfig(_qwen3(quantization_config=_AUTO_ROUND)),
    "Qwen3-8B-int4-AutoRound-AWQ": PublishedConfig(
        _qwen3(quantization_config={**_AUTO_ROUND, "packing_format": "auto_round:auto_awq",
                                    "extra_config": {"lm_head": {"bits": 16, "data_type": "float"}}})
    ),
    # ------------------------------------------------------------ through transformers
    "gemma-3-27b-it": PublishedConfig(
        _gemma({"model_type": "gemma3_text", "num_hidden_layers": 6, "query_pre_attn_scalar": 16, "sliding_window": 64,
                "rope_scaling": {"factor": 8.0, "rope_type": "linear"}},
               "Gemma3ForConditionalGeneration", "gemma3", mm_tokens_per_image=256)
    ),
    "gemma-3-1b-it": PublishedConfig(
        _causal("Gemma3ForCausalLM", "gemma3_text", attn_logit_softcapping=None, cache_implementation="hybrid",
                final_logit_softcapping=None, head_dim=16, hidden_activation="gelu_pytorch_tanh",
                query_pre_attn_scalar=16, rope_local_base_freq=10000, rope_theta=1000000, sliding_window=64,
                sliding_window_pattern=6)
    ),
    "Phi-3-mini-128k-instruct": PublishedConfig(
        _causal("Phi3ForCausalLM", "phi3", attention_bias=False, original_max_position_embeddings=512,
                auto_map={"AutoConfig": "configuration_phi3.Phi3Config"}, rope_scaling=_LONGROPE, rope_theta=10000.0,
                sliding_window=262144, pad_token_id=0)
    ),
    "Olmo-3-7B-Instruct": PublishedConfig(
        _causal("Olmo3ForCausalLM", "olmo3", layer_types=_GEMMA_LAYERS, rope_theta=500000, sliding_window=64,
                rope_scaling={"attention_factor": 1.2, "beta_fast": 32.0, "beta_slow": 1.0, "factor": 8.0,
                              "original_max_position_embeddings": 128, "rope_type": "yarn"}, pad_token_id=0)
    ),
    "c4ai-command-a-03-2025": PublishedConfig(
        _causal("Cohere2ForCausalLM", "cohere2", cache_implementation="hybrid", head_dim=16, layer_norm_eps=1e-05,
                logit_scale=0.25, order_of_interleaved_layers="local_attn_first", position_embedding_type="rope_gptj",
                rotary_pct=1.0, sliding_window=64, sliding_window_pattern=4, use_gated_activation=True,
                use_parallel_block=True, use_qk_norm=False, pad_token_id=0)
    ),
    "SmolLM3-3B": PublishedConfig(
        _causal("SmolLM3ForCausalLM", "smollm3", layer_types=["full_attention"] * 4, max_window_layers=28,
                no_rope_layer_interval=4, no_rope_layers=[1, 1, 1, 0], pad_token_id=3, sliding_window=None,
                use_sliding_window=False)
    ),
    "ERNIE-4.5-21B-A3B": PublishedConfig(
        _causal("Ernie4_5_MoeForCausalLM", "ernie4_5_moe", moe_capacity=[64, 64, 64], moe_intermediate_size=32,
                moe_k=2, moe_layer_end_index=-1, moe_layer_interval=1, moe_layer_start_index=1, moe_num_experts=4,
                moe_num_shared_experts=1, moe_use_aux_free=True, use_bias=False, pad_token_id=0, rope_theta=500000)
    ),
    "granite-3.3-8b-instruct": PublishedConfig(
        _causal("GraniteForCausalLM", "granite", attention_multiplier=0.0625, embedding_multiplier=12.0,
                logits_scaling=16.0, residual_multiplier=0.22, rope_scaling=None, rope_theta=10000000.0, pad_token_id=0)
    ),
    "gemma-3n-E4B-it": PublishedConfig(_gemma3n()),
    "gemma-4-31B-it": PublishedConfig(_gemma4()),
    "gemma-4-26B-A4B-it": PublishedConfig(
        _gemma4(enable_moe_block=True, moe_intermediate_size=32, num_experts=4, top_k_experts=2)
    ),
    "gemma-4-E2B-it": PublishedConfig(
        _gemma4(attention_k_eq_v=False, num_global_key_value_heads=None, hidden_size_per_layer_input=8,
                num_key_value_heads=1, num_kv_shared_layers=2, use_double_wide_mlp=True,
                layer_types=["sliding_attention", "full_attention"] * 2)
    ),
    "EXAONE-4.5-33B": PublishedConfig(
        _around({"head_dim": 16, "layer_types": _GEMMA_LAYERS, "model_type": "exaone4_5_text", "rope_theta": 1000000,
                 "rope_scaling": {"factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                                  "original_max_position_embeddings": 256, "rope_type": "llama3"},
                 "sliding_window": 64, "sliding_window_pattern": "LLLG"},
                "Exaone4_5_ForConditionalGeneration", "exaone4_5", image_token_id=150,
                vision_config={"depth": 1, "fullatt_block_indexes": [0], "model_type": "exaone4_5_vision"})
    ),
    "Llama-4-Scout up to its chunks": PublishedConfig(_llama4(), max_model_len=128),
    "MiMo-V2-Flash": PublishedConfig(
        _causal("MiMoV2FlashForCausalLM", "mimo_v2_flash", head_dim=16, hybrid_layer_pattern=[0, 1, 1, 1],
                layernorm_epsilon=1e-05, moe_intermediate_size=32, moe_layer_freq=[0, 1, 1, 1], n_routed_experts=4,
                num_experts_per_tok=2, partial_rotary_factor=0.5, scoring_func="sigmoid", sliding_window_size=128,
                swa_head_dim=16, swa_num_attention_heads=4, swa_num_key_value_heads=4, v_head_dim=16)
    ),
    # ------------------------------------------------------------ refused
    "Llama-4-Scout": PublishedConfig(_llama4(), "causal for 128 tokens: give --max-model-len 128"),
    "MiniMax-M2-AWQ": PublishedConfig(
        _minimax("mixtral", quantization_config=_AWQ),
        r"model_type = 'mixtral' .*MiniMaxM2ForCausalLM.*, whose model_type is 'minimax_m2'. .* write 'minimax_m2'",
    ),
    "Qwen3-8B-4bit of MLX": PublishedConfig(
        _qwen3(quantization={"bits": 4, "group_size": 64}, quantization_config={"bits": 4, "group_size": 64}),
        r"Apple's MLX format \(4 bits\)",
    ),
    "Mistral-7B-4bit of an older MLX": PublishedConfig(
        _causal("MistralForCausalLM", "mistral", quantization={"bits": 4, "group_size": 64}), r"Apple's MLX format"
    ),
    "Qwen3-8B-unsloth-bnb-4bit": PublishedConfig(
        _qwen3(quantization_config={"bnb_4bit_compute_dtype": "bfloat16", "load_in_4bit": True,
                                    "llm_int8_skip_modules": ["lm_head"], "quant_method": "bitsandbytes"}),
        "quantized checkpoint .'bitsandbytes'.",
    ),
    "DeepSeek-V3.2": PublishedConfig(
        _deepseek("DeepseekV32ForCausalLM", "deepseek_v32", index_head_dim=16, index_n_heads=2, index_topk=64),
        "DeepSeek sparse attention",
    ),
    "GLM-5": PublishedConfig(
        _glm("GlmMoeDsaForCausalLM", "glm_moe_dsa", **_MLA, index_topk=64), "DeepSeek sparse attention"
    ),
    "LFM2-1.2B": PublishedConfig(
        _causal("Lfm2ForCausalLM", "lfm2", block_auto_adjust_ff_dim=True, block_ff_dim=128, block_dim=64,
                block_ffn_dim_multiplier=1.0, block_multiple_of=32, conv_L_cache=3, conv_bias=False,
                full_attn_idxs=[2], norm_eps=1e-05, num_heads=4, tie_embedding=True, use_pos_enc=True),
    ),
    "granite-4.0-h-small": PublishedConfig(
        _causal("GraniteMoeHybridForCausalLM", "granitemoehybrid", layer_types=["mamba", "mamba", "mamba", "attention"],
                mamba_d_conv=4, mamba_d_head=16, mamba_d_state=16, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=8,
                num_experts_per_tok=2, num_local_experts=4, position_embedding_type="nope",
                attention_bias=False, attention_multiplier=0.0078125, embedding_multiplier=12, logits_scaling=16,
                mamba_chunk_size=256, mamba_conv_bias=True, mamba_proj_bias=False, normalization_function="rmsnorm",
                residual_multiplier=0.22, rope_scaling=None, rope_theta=10000, shared_intermediate_size=64)
    ),
    "granite-4.0-h-micro": PublishedConfig(
        _causal("GraniteMoeHybridForCausalLM", "granitemoehybrid", layer_types=["mamba", "mamba", "mamba", "attention"],
                mamba_d_conv=4, mamba_d_head=16, mamba_d_state=16, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=8,
                num_experts_per_tok=0, num_local_experts=0, position_embedding_type="nope", residual_multiplier=0.22,
                shared_intermediate_size=64, tie_word_embeddings=True)
    ),
    "Nemotron-3-Nano-30B-A3B": PublishedConfig(
        _causal("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="MEM*", mamba_head_dim=16,
                attention_bias=False, chunk_size=128, conv_kernel=4, expand=2, head_dim=16, layer_norm_epsilon=1e-05,
                mamba_hidden_act="silu", mamba_num_heads=4, mamba_proj_bias=False, mamba_ssm_cache_dtype="float32",
                mlp_bias=False, mlp_hidden_act="relu2", moe_intermediate_size=32, n_group=1, n_groups=2,
                moe_shared_expert_intermediate_size=64, n_routed_experts=4, n_shared_experts=1, norm_topk_prob=True,
                norm_eps=1e-05, num_experts_per_tok=2, partial_rotary_factor=1.0, rescale_prenorm_residual=True,
                residual_in_fp32=False, rope_theta=10000, routed_scaling_factor=2.5, sliding_window=None,
                ssm_state_size=16, time_step_floor=0.0001, time_step_limit=[0.0, math.inf], time_step_max=0.1,
                time_step_min=0.001, topk_group=1, use_bias=False, use_conv_bias=True, use_mamba_kernels=True)
    ),
    "Nemotron-Nano-9B-v2": PublishedConfig(
        _causal("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="M-M*", mamba_head_dim=16,
                head_dim=16, mamba_num_heads=4, mlp_hidden_act="relu2", n_groups=2, ssm_state_size=16,
                time_step_limit=[0.0, math.inf])
    ),
    "Nemotron-3-Super-120B-A12B": PublishedConfig(
        _causal("NemotronHForCausalLM", "nemotron_h", hybrid_override_pattern="MEM*", mamba_head_dim=16, head_dim=16,
                mamba_num_heads=4, mlp_hidden_act="relu2", moe_latent_size=32, n_groups=2, n_routed_experts=4,
                ssm_state_size=16),
        "moe_latent_size = 32",
    ),
    "Falcon-H1-1.5B-Instruct": PublishedConfig(
        _causal("FalconH1ForCausalLM", "falcon_h1", attention_in_multiplier=1.0, attention_out_multiplier=0.9375,
                embedding_multiplier=5.65, head_dim=16, key_multiplier=0.39, lm_head_multiplier=0.0195,
                mamba_chunk_size=256, mamba_conv_bias=True, mamba_d_conv=4, mamba_d_head=16, mamba_d_ssm=96,
                mamba_d_state=16, mamba_expand=2, mamba_n_groups=1, mamba_n_heads=6, mamba_norm_before_gate=False,
                mamba_proj_bias=False, mamba_rms_norm=False, mamba_use_mlp=True, mlp_expansion_factor=8,
                mlp_multipliers=[0.88, 0.26], projectors_bias=False, rope_scaling=None, rope_theta=100000000000.0,
                ssm_in_multiplier=1.25, ssm_multipliers=[0.35, 0.25, 0.35, 0.5, 0.5], ssm_out_multiplier=0.23)
    ),
    "MiniMax-Text-01": PublishedConfig(
        _causal("MiniMaxText01ForCausalLM", "minimax_text_01", attn_type_list=[0, 0, 0, 1]),
        "linear attention",
    ),
    "Kimi-Linear-48B-A3B": PublishedConfig(
        _causal("KimiLinearForCausalLM", "kimi_linear", linear_attn_config={"full_attn_layers": [4]}, **_MLA),
        "linear attention",
    ),
    "Qwen2.5-VL-7B-Instruct": PublishedConfig(
        _causal("Qwen2_5_VLForConditionalGeneration", "qwen2_5_vl", eos_token_id=2, image_token_id=150,
                video_token_id=151, rope_scaling={"mrope_section": [2, 3, 3], "type": "mrope"}, sliding_window=32768,
                use_sliding_window=False, vision_config={"depth": 1, "hidden_size": 32, "model_type": "qwen2_5_vl"},
                vision_start_token_id=152, vision_end_token_id=153, vision_token_id=154),
    ),
    "gpt-j-6b": PublishedConfig(
        {"architectures": ["GPTJForCausalLM"], "model_type": "gptj", "n_embd": 64, "n_head": 4, "n_inner": None,
         "n_layer": 4, "n_positions": 1024, "rotary_dim": 8, "vocab_size": 160},
        "do not call a given attention function",
    ),
    "mpt-7b-chat": PublishedConfig(
        {"architectures": ["MPTForCausalLM"], "model_type": "mpt", "d_model": 64, "expansion_ratio": 4, "n_heads": 4,
         "n_layers": 4, "max_seq_len": 1024, "no_bias": True, "torch_dtype": "bfloat16", "vocab_size": 160,
         "attn_config": {"alibi": True, "attn_impl": "triton", "clip_qkv": None, "qk_ln": False}},
        "its layers take no positions",
    ),
    "bloomz-7b1": PublishedConfig(
        {"architectures": ["BloomForCausalLM"], "model_type": "bloom", "hidden_size": 64, "n_head": 4, "n_layer": 4,
         "seq_length": None, "vocab_size": 160},
        "lacks 'max_position_embeddings'",
    ),
    "chatglm3-6b": PublishedConfig(
        {"architectures": ["ChatGLMModel"], "model_type": "chatglm", "num_layers": 4, "hidden_size": 64,
         "num_attention_heads": 4, "multi_query_attention": True, "multi_query_group_num": 2, "ffn_hidden_size": 128,
         "padded_vocab_size": 160, "vocab_size": 160, "seq_length": 1024, "torch_dtype": "float16",
         "auto_map": {"AutoConfig": "configuration_chatglm.ChatGLMConfig"}},
        "lacks model type 'chatglm'; checkpoints' code is not run",
    ),
    "Ming-omni": PublishedConfig(
        {"architectures": ["BailingMMNativeForConditionalGeneration"], "model_type": "bailingmm", "mlp_depth": 2,
         "llm_config": {**_SIZES, "model_type": "bailing_moe"}, "torch_dtype": "float32"},
        "lacks 'vocab_size'; transformers lacks model type 'bailingmm', too, and checkpoints' code is not run",
    ),
    "llama3v": PublishedConfig(
        {"model_type": "llama3v", "torch_dtype": "float16", **_SIZES},
        "lacks 'architectures'; it must be a list of classes",
    ),
    "roberta-base": PublishedConfig(
        _causal("RobertaForMaskedLM", "roberta", hidden_act="gelu", is_decoder=True, pad_token_id=1, type_vocab_size=1),
        "positions that begin behind its padding token",
    ),
}  # fmt: skip
