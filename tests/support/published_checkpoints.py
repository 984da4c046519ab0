"""Small random checkpoints in exactly the form in which models are published: fields of config.json, names of tensors.

Each form comes with the checkpoint from which transformers computes the tokens that a node must yield.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from any_models import make_any_checkpoint
from checkpoints import make_checkpoint
from image_checkpoints import stored_form
from quantized_checkpoints import FORMATS, FOUR_BITS, quantize
from safetensors.torch import load_file, save_file

_SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
_MOE_SIZES = ("architectures", "vocab_size", "num_experts_per_tok", "num_local_experts", "max_position_embeddings")
_VISION = {
    "gemma3": {"model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48, "image_size": 28,
               "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2, "vision_use_head": False},
    "mistral3": {"model_type": "pixtral", "hidden_size": 32, "intermediate_size": 48, "image_size": 28,
                 "patch_size": 14, "num_hidden_layers": 1, "num_attention_heads": 2, "head_dim": 16},
    "llava": {"model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, "image_size": 28,
              "patch_size": 14, "num_hidden_layers": 2, "num_attention_heads": 2, "projection_dim": 32},
    "qwen3_vl": {"model_type": "qwen3_vl", "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
                 "out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
}  # fmt: skip
_VISION["exaone4_5"] = {
    "model_type": "exaone4_5_vision",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_key_value_heads": 2,
    "out_hidden_size": 64,
    "fullatt_block_indexes": [0],
}
_VISION["glm4v_moe"] = {
    "model_type": "glm4v_moe_vision",
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_heads": 2,
    "image_size": 28,
    "out_hidden_size": 64,
}
_VISION["qwen2_5_vl"] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "patch_size": 14}  # fmt: skip
_VISION["internvl"] = {
    "model_type": "internvl_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "image_size": [28, 28],
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "patch_size": [14, 14],
}
_VISION["kimi_k25"] = {
    "model_type": "kimi_k25_vision",
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 2,
    "num_hidden_layers": 1,
    "pos_emb_height": 4,
    "pos_emb_width": 4,
}
_VISION["qwen3_vl_moe"] = {**_VISION["qwen3_vl"], "model_type": "qwen3_vl_moe"}
_VISION["qwen3_5"] = _VISION["qwen3_5_moe"] = {
    "depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 64,
    "num_position_embeddings": 16}  # fmt: skip
_EXPERTS = {
    "first_k_dense_replace": 1, "moe_intermediate_size": 32, "n_group": 1, "n_routed_experts": 8,
    "n_shared_experts": 1, "norm_topk_prob": True, "num_experts_per_tok": 2, "routed_scaling_factor": 1.5,
    "topk_group": 1}  # fmt: skip
_DEEPSEEK_ROPE = {"beta_slow": 1, "original_max_position_embeddings": 16}
_FP8 = {"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": None, "dequantize": False,
        "modules_to_not_convert": ["model.vision_tower", "model.multi_modal_projector", "lm_head"]}  # fmt: skip

_W4A16 = {"quant_algo": "W4A16_NVFP4", "group_size": 16}


class Published(NamedTuple):
    checkpoint: Path
    reference: Path  # in a form that transformers reads, with the same numbers
    whole: str  # the class of the reference


def gemma3(path: Path) -> Published:
    """Like gemma-3-4b-it: heads, head size, vocabulary and positions are the library's defaults."""
    text = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "model_type": "gemma3_text",
        "num_hidden_layers": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 8,
    }
    config = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "eos_token_id": [1, 106],
              "image_token_index": 262144, "mm_tokens_per_image": 4, "text_config": text}  # fmt: skip
    return _multimodal(path, config)


def mistral_small(path: Path) -> Published:
    """Like Mistral-Small-3.1: no word of tied embeddings, and a head is stored."""
    text = {**_SIZES, "model_type": "mistral", "vocab_size": 128, "max_position_embeddings": 4096, "hidden_act": "silu",
            "rms_norm_eps": 1e-05, "rope_theta": 1000000000.0, "sliding_window": None, "use_cache": True}  # fmt: skip
    return _multimodal(path, _mistral3(text), tied=False)


def ministral(path: Path) -> Published:
    """Like Ministral-3-8B-Instruct: FP8 with a scale per tensor, YaRN with scaled queries."""
    rope = {"rope_type": "yarn", "type": "yarn", "rope_theta": 1e6, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16}  # fmt: skip
    text = {**_SIZES, "model_type": "ministral3", "vocab_size": 128, "max_position_embeddings": 256,
            "rms_norm_eps": 1e-05, "rope_parameters": rope, "sliding_window": None,
            "tie_word_embeddings": False}  # fmt: skip
    return _in_fp8(_multimodal(path, _mistral3(text), tied=False))


def mistral_small_4(path: Path) -> Published:
    """Latents, experts chosen by softmax, and queries that are scaled by their position."""
    rope = {"rope_type": "yarn", "type": "yarn", "rope_theta": 1e4, "factor": 16.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "llama_4_scaling_beta": 0.1, "mscale": 1.0, "mscale_all_dim": 1.0,
            "original_max_position_embeddings": 16}  # fmt: skip
    text = {**_SIZES, "model_type": "mistral4", "vocab_size": 128, "max_position_embeddings": 256, "head_dim": 16,
            "num_key_value_heads": 4, "kv_lora_rank": 16, "q_lora_rank": 24, "qk_head_dim": 16, "qk_nope_head_dim": 8,
            "qk_rope_head_dim": 8, "v_head_dim": 16, "first_k_dense_replace": 0, "moe_intermediate_size": 32,
            "n_group": 1, "topk_group": 1, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2,
            "norm_topk_prob": True, "rms_norm_eps": 1e-06, "rope_interleave": True, "rope_parameters": rope,
            "routed_scaling_factor": 1.0, "tie_word_embeddings": False}  # fmt: skip
    return _multimodal(path, _mistral3(text), tied=False)


def gemma3n(path: Path) -> Published:
    """Like gemma-3n-E4B-it: layers that share KV, whose own projections are stored. Its image part needs timm."""
    sizes: dict[str, Any] = {
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0],
        "hidden_size_per_layer_input": 8,
        "intermediate_size": [96] * 4,
        "laurel_rank": 8,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "sliding_window": 8,
    }
    text = make_any_checkpoint(path / "text", "gemma3n_text", tie_word_embeddings=True, **sizes)
    config = json.loads((text / "config.json").read_text())
    fields = {name: config[name] for name in (*_SIZES, *sizes, "model_type", "vocab_size_per_layer_input")}
    whole = {"architectures": ["Gemma3nForConditionalGeneration"], "audio_config": {"model_type": "gemma3n_audio"},
             "eos_token_id": [1, 106], "model_type": "gemma3n", "torch_dtype": "float32",
             "text_config": {**fields, "max_position_embeddings": 512, "vocab_size": config["vocab_size"]},
             "vision_config": {"architecture": "mobilenetv5_300m_enc", "model_type": "gemma3n_vision"}}  # fmt: skip
    published = _renamed(text, path / "published", lambda name: name.replace("model.", "model.language_model.", 1))
    tensors = load_file(published / "model.safetensors")
    for name in list(tensors):
        if ".layers.1." in name and ("k_proj" in name or "v_proj" in name or "k_norm" in name):
            tensors[name.replace(".1.", ".3.", 1)] = torch.ones_like(tensors[name])
    tensors["model.vision_tower.timm_model.conv_stem.conv.weight"] = torch.ones(4, 3, 3, 3)
    save_file(tensors, published / "model.safetensors", {"format": "pt"})
    (published / "config.json").write_text(json.dumps(whole))
    return Published(published, text, "Gemma3nForCausalLM")


def qwen3_vl(path: Path) -> Published:
    """Like Qwen3-VL-4B-Instruct: three positions of a token, tied embeddings, new names."""
    text = {**_SIZES, "model_type": "qwen3_vl_text", "vocab_size": 160, "max_position_embeddings": 4096,
            "attention_bias": False, "dtype": "float32", "eos_token_id": 2, "hidden_act": "silu", "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
            "rope_theta": 5000000, "tie_word_embeddings": True}  # fmt: skip
    config = {"architectures": ["Qwen3VLForConditionalGeneration"], "model_type": "qwen3_vl", "text_config": text,
              "image_token_id": 155, "video_token_id": 156, "vision_start_token_id": 152, "vision_end_token_id": 153,
              "tie_word_embeddings": True}  # fmt: skip
    return _multimodal(path, config, new_names=True)


def qwen3_vl_moe(path: Path) -> Published:
    """Like Qwen3-VL-30B-A3B-Instruct: fused experts, with inputs before outputs."""
    text = {**_SIZES, "model_type": "qwen3_vl_moe_text", "vocab_size": 160, "max_position_embeddings": 4096,
            "attention_bias": False, "decoder_sparse_step": 1, "dtype": "float32", "eos_token_id": 2,
            "hidden_act": "silu", "mlp_only_layers": [], "moe_intermediate_size": 48, "norm_topk_prob": True,
            "num_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-06,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [4, 2, 2], "rope_type": "default"},
            "rope_theta": 5000000}  # fmt: skip
    config = {"architectures": ["Qwen3VLMoeForConditionalGeneration"], "model_type": "qwen3_vl_moe",
              "image_token_id": 155, "text_config": text, "video_token_id": 156, "vision_start_token_id": 152,
              "vision_end_token_id": 153, "tie_word_embeddings": False}  # fmt: skip
    return _multimodal(path, config, tied=False, new_names=True)


def qwen3_5(path: Path) -> Published:
    """Like Qwen3.5-27B: recurrent layers, new names, and a layer that predicts further tokens."""
    return _with_mtp(_multimodal(path, _qwen3_5("Qwen3_5", {}), tied=False, new_names=True))


def qwen3_5_moe(path: Path) -> Published:
    """Like Qwen3.5-35B-A3B: ``qwen3_5`` with fused experts."""
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 48,
               "shared_expert_intermediate_size": 48}  # fmt: skip
    return _with_mtp(_multimodal(path, _qwen3_5("Qwen3_5Moe", experts), tied=False, new_names=True))


def qwen3_6_nvfp4(path: Path) -> Published:
    """Like nvidia's Qwen3.6-27B-NVFP4: ``qwen3_5`` in mixed precision, with a plain layer that predicts tokens."""
    return _in_fp8_and_nvfp4(qwen3_5(path))


def qwen3_6_moe_nvfp4(path: Path) -> Published:
    """Like nvidia's Qwen3.6-35B-A3B-NVFP4: its experts are stored one by one."""
    return _in_fp8_and_nvfp4(qwen3_5_moe(path))


def qwen3_5_moe_alone(path: Path) -> Published:
    """Like a pruned Qwen3.5: the config of the text part alone, under the class and with the tensors of the whole."""
    published = qwen3_5_moe(path)
    config = json.loads((published.checkpoint / "config.json").read_text())
    alone = {**config["text_config"], "architectures": config["architectures"], "tie_word_embeddings": False}
    (published.checkpoint / "config.json").write_text(json.dumps(alone))
    return published


def _qwen3_5(name: str, experts: dict[str, Any]) -> dict[str, Any]:
    kind = "qwen3_5_moe" if experts else "qwen3_5"
    rope = {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "rope_type": "default", "rope_theta": 10000000,
            "partial_rotary_factor": 0.5}  # fmt: skip
    text = {**_SIZES, **experts, "model_type": f"{kind}_text", "vocab_size": 160, "max_position_embeddings": 4096,
            "attention_bias": False, "attn_output_gate": True, "dtype": "float32", "eos_token_id": 2,
            "full_attention_interval": 3, "layer_types": ["linear_attention", "linear_attention", "full_attention"],
            "hidden_act": "silu", "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2,
            "linear_num_value_heads": 4, "linear_value_head_dim": 16, "mamba_ssm_dtype": "float32",
            "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False, "rms_norm_eps": 1e-06,
            "rope_parameters": rope}  # fmt: skip
    if experts:
        del text["intermediate_size"]
    return {"architectures": [f"{name}ForConditionalGeneration"], "model_type": kind, "text_config": text,
            "image_token_id": 155, "video_token_id": 156, "vision_start_token_id": 152, "vision_end_token_id": 153,
            "tie_word_embeddings": False}  # fmt: skip


def qwen3_next(path: Path) -> Published:
    """Like Qwen3-Next-80B-A3B-Instruct: an expert by its own name, and a layer that predicts further tokens."""
    plain = make_checkpoint(path / "plain", "qwen3_next")
    published = path / "published"
    shutil.copytree(plain, published)
    return _with_mtp(Published(published, plain, "Qwen3NextForCausalLM"))


def deepseek_v2_lite(path: Path) -> Published:
    """Like DeepSeek-V2-Lite: one group of experts, YaRN by its first name, fields of DeepSeek's own code."""
    rope = {**_DEEPSEEK_ROPE, "beta_fast": 32, "factor": 40, "mscale": 0.707, "mscale_all_dim": 0.707}
    sizes = {"q_lora_rank": None, "topk_method": "greedy", "n_group": 1, "topk_group": 1}
    return _deepseek(path, "deepseek_v2", sizes, rope, {"scoring_func": "softmax", "norm_topk_prob": False})


def kimi_k2(path: Path) -> Published:
    """Like Kimi-K2-Instruct: DeepSeek-V3 by a model type of its own, and a ramp of YaRN without a width."""
    rope = {**_DEEPSEEK_ROPE, "beta_fast": 1.0, "factor": 32.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    config = {"model_type": "kimi_k2", "scoring_func": "sigmoid", "topk_method": "noaux_tc",
              "num_nextn_predict_layers": 0}  # fmt: skip
    return _deepseek(path, "deepseek_v3", {"n_group": 1, "topk_group": 1}, rope, config)


def kimi_k2_5(path: Path) -> Published:
    """Like Kimi-K2.5 and its successors: the config of Kimi K2 around which is a tower, and each expert by its name."""
    sizes = {name: value for name, value in _SIZES.items() if name != "head_dim"}
    rope = {**_DEEPSEEK_ROPE, "beta_fast": 32.0, "factor": 16.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    text = {**sizes, **_EXPERTS, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
            "auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}, "aux_loss_alpha": 0.001,
            "ep_size": 1, "hidden_act": "silu", "kv_lora_rank": 16, "max_position_embeddings": 256,
            "moe_layer_freq": 1, "num_key_value_heads": 4, "num_nextn_predict_layers": 0, "q_lora_rank": 24,
            "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "rms_norm_eps": 1e-05,
            "rope_scaling": {**rope, "type": "yarn"}, "rope_theta": 50000.0, "scoring_func": "sigmoid",
            "seq_aux": True, "topk_method": "noaux_tc", "v_head_dim": 16, "vocab_size": 160}  # fmt: skip
    config = {"architectures": ["Kimi_K25ForConditionalGeneration"], "model_type": "kimi_k25", "text_config": text,
              "image_token_id": 155, "media_placeholder_token_id": 155, "tie_word_embeddings": False,
              "torch_dtype": "float32"}  # fmt: skip
    published = _multimodal(path, config, tied=False)
    written = json.loads((published.checkpoint / "config.json").read_text())
    written["architectures"] = ["KimiK25ForConditionalGeneration"]
    (published.checkpoint / "config.json").write_text(json.dumps(written))
    return _with_single_experts(published)


def glm_4_5v(path: Path) -> Published:
    """Like GLM-4.5V and GLM-4.6V: GLM-4.5 with three positions of a token, and each expert by its name."""
    rope = {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5, "rope_theta": 10000.0, "rope_type": "default"}
    text = {**_SIZES, **_EXPERTS, "model_type": "glm4v_moe_text", "attention_bias": True, "dtype": "float32",
            "hidden_act": "silu", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "rope_parameters": rope,
            "use_qk_norm": False, "vocab_size": 160}  # fmt: skip
    config = {"architectures": ["Glm4vMoeForConditionalGeneration"], "model_type": "glm4v_moe", "text_config": text,
              "eos_token_id": [2, 3], "image_token_id": 155, "image_start_token_id": 152, "image_end_token_id": 153,
              "tie_word_embeddings": False, "video_token_id": 156, "video_start_token_id": 157,
              "video_end_token_id": 158}  # fmt: skip
    return _with_single_experts(_multimodal(path, config, tied=False, new_names=True))


def exaone_4_5(path: Path) -> Published:
    """Like EXAONE-4.5-33B: the text model has the kind of the first release."""
    text = {**_SIZES, "model_type": "exaone4_5_text", "hidden_act": "silu", "max_position_embeddings": 4096,
            "layer_types": ["sliding_attention", "full_attention", "full_attention"], "rms_norm_eps": 1e-05,
            "rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}, "sliding_window": 8,
            "sliding_window_pattern": "LGG", "vocab_size": 160}  # fmt: skip
    config = {"architectures": ["Exaone4_5_ForConditionalGeneration"], "model_type": "exaone4_5", "text_config": text,
              "image_token_id": 155, "tie_word_embeddings": False, "video_token_id": 156}  # fmt: skip
    return _multimodal(path, config, tied=False, new_names=True)


def internvl(path: Path) -> Published:
    """Like InternVL3-8B-hf: Qwen2, by the first names."""
    sizes = {name: value for name, value in _SIZES.items() if name != "head_dim"}
    text = {**sizes, "model_type": "qwen2", "max_position_embeddings": 4096, "rms_norm_eps": 1e-06,
            "rope_theta": 1000000.0, "use_sliding_window": False, "vocab_size": 160}  # fmt: skip
    return _multimodal(path, _internvl(text), tied=False)


def qwen2_5_vl(path: Path) -> Published:
    """Like Qwen2.5-VL-7B-Instruct: the text model's fields lie beside the whole's, by the first names."""
    sizes = {name: value for name, value in _SIZES.items() if name != "head_dim"}
    config = {**sizes, "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
              "bos_token_id": 1, "eos_token_id": 2, "image_token_id": 155, "max_position_embeddings": 4096,
              "max_window_layers": 2, "rms_norm_eps": 1e-06,
              "rope_scaling": {"mrope_section": [2, 3, 3], "type": "mrope"}, "rope_theta": 1000000.0,
              "sliding_window": 64, "tie_word_embeddings": False, "use_sliding_window": False,
              "vision_end_token_id": 157, "vision_start_token_id": 156, "vision_token_id": 158,
              "vocab_size": 160}  # fmt: skip
    plain = _multimodal(path, config, tied=False, new_names=True)
    names = {"model.language_model.": "model.", "model.visual.": "visual."}
    file = plain.checkpoint / "model.safetensors"
    tensors = load_file(file)
    for new, old in names.items():
        tensors = {name.replace(new, old): tensor for name, tensor in tensors.items()}
    save_file(tensors, file, {"format": "pt"})
    return plain


def internvl_moe(path: Path) -> Published:
    """Like InternVL3.5-30B-A3B-HF: Qwen3 with experts."""
    text = {**_SIZES, "model_type": "qwen3_moe", "decoder_sparse_step": 1, "max_position_embeddings": 4096,
            "mlp_only_layers": [], "moe_intermediate_size": 48, "norm_topk_prob": True, "num_experts": 8,
            "num_experts_per_tok": 2, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "vocab_size": 160}  # fmt: skip
    return _with_single_experts(_multimodal(path, _internvl(text), tied=False))


def _internvl(text: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["InternVLForConditionalGeneration"], "model_type": "internvl", "image_token_id": 155,
            "downsample_ratio": 0.5, "projector_hidden_act": "gelu", "text_config": text,
            "tie_word_embeddings": False, "vision_feature_layer": -1}  # fmt: skip


def _with_single_experts(plain: Published) -> Published:
    """Store each expert's projections by their names in the published checkpoint."""
    file = plain.checkpoint / "model.safetensors"
    tensors = {}
    for name, tensor in load_file(file).items():
        module, _, projection = name.rpartition(".")
        if not module.endswith(".mlp.experts"):
            tensors[name] = tensor
            continue
        names = ("gate_proj", "up_proj") if projection == "gate_up_proj" else ("down_proj",)
        for expert, weight in enumerate(tensor):
            parts = zip(names, weight.chunk(len(names)), strict=True)
            tensors |= {f"{module}.{expert}.{part}.weight": rows.contiguous() for part, rows in parts}
    save_file(tensors, file, {"format": "pt"})
    return plain


def _deepseek(path: Path, family: str, sizes: dict[str, Any], rope: dict[str, Any], more: dict[str, Any]) -> Published:
    """Rewrite the config of a random model as in 2024; ``more`` are further fields."""
    parameters = {**rope, "rope_type": "yarn", "rope_theta": 1e4}
    plain = make_checkpoint(path / "plain", family, **sizes, rope_parameters=parameters, max_position_embeddings=256)
    config = json.loads((plain / "config.json").read_text())
    del config["rope_parameters"]
    published = path / "published"
    shutil.copytree(plain, published)
    config |= {"rope_scaling": {**rope, "type": "yarn"}, "rope_theta": 10000, "aux_loss_alpha": 0.001, "seq_aux": True,
               "moe_layer_freq": 1, "auto_map": {"AutoConfig": "configuration_deepseek.Config"}}  # fmt: skip
    (published / "config.json").write_text(json.dumps(config | more))
    return Published(published, plain, config["architectures"][0])


def _with_mtp(plain: Published) -> Published:
    file = plain.checkpoint / "model.safetensors"
    tensors = load_file(file) | {
        "mtp.fc.weight": torch.ones(64, 128),
        "mtp.layers.0.mlp.gate.weight": torch.ones(8, 64),
    }
    save_file(tensors, file, {"format": "pt"})
    return plain


def llava(path: Path) -> Published:
    """Like LLaVA 1.5: most fields of the text model are Llama's."""
    text = {**_SIZES, "model_type": "llama", "max_position_embeddings": 4096, "rms_norm_eps": 1e-05, "vocab_size": 128}
    config = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 120,
              "projector_hidden_act": "gelu", "text_config": text, "vision_feature_layer": -2}  # fmt: skip
    return _multimodal(path, config, tied=False)


def minimax_m2(path: Path) -> Published:
    """Like MiniMax-M2: FP8 blocks, whose format has the name that torch gives it."""
    plain = make_checkpoint(path / "plain", "minimax_m2")
    config = json.loads((plain / "config.json").read_text())
    checkpoint = quantize(plain, path / "published", "fp8 blocks")
    published = {
        **{name: config[name] for name in (*_SIZES, *_MOE_SIZES, "rms_norm_eps")},
        "attn_type_list": [1] * config["num_hidden_layers"],
        "auto_map": {"AutoModelForCausalLM": "modeling_minimax_m2.MiniMaxM2ForCausalLM"},
        "dtype": "float32",
        "hidden_act": "silu",
        "model_type": "minimax_m2",
        "mtp_transformer_layers": 1,
        "num_mtp_modules": 3,
        "qk_norm_type": "per_layer",
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "float8_e4m3fn",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "modules_to_not_convert": ["gate", "e_score_correction_bias", "lm_head"],
        },
        "rope_theta": 5000000,
        "rotary_dim": 16,
        "scoring_func": "sigmoid",
        "shared_intermediate_size": 0,
        "tie_word_embeddings": False,
        "use_mtp": True,
        "use_qk_norm": True,
        "use_routing_bias": True,
    }  # fmt: skip
    (checkpoint / "config.json").write_text(json.dumps(published))
    return Published(checkpoint, plain, "MiniMaxM2ForCausalLM")


def glm_without_shared_experts(path: Path) -> Published:
    checkpoint = make_checkpoint(path / "published", "glm4_moe", n_shared_experts=0)
    return Published(checkpoint, checkpoint, "Glm4MoeForCausalLM")


def body_with_head(path: Path) -> Published:
    """Names without ``model.``, as a body that is saved alone has them, beside a head."""
    whole = make_checkpoint(path / "plain", "llama")
    return Published(
        _renamed(whole, path / "published", lambda name: name.removeprefix("model.")), whole, "LlamaForCausalLM"
    )


def config_with_infinity(path: Path) -> Published:
    """Python writes Infinity, as in ``time_step_limit`` of Nemotron-H."""
    whole = make_checkpoint(path / "plain", "llama")
    config = json.loads((whole / "config.json").read_text())
    (whole / "config.json").write_text(json.dumps({**config, "time_step_limit": [0.0, float("inf")]}))
    return Published(whole, whole, "LlamaForCausalLM")


FORMS: dict[str, Callable[[Path], Published]] = {
    "MiniMax-M2": minimax_m2,
    "GLM without shared experts": glm_without_shared_experts,
    "a body beside a head": body_with_head,
    "Infinity": config_with_infinity,
    "gemma-3-4b-it": gemma3,
    "gemma-3n-E4B-it": gemma3n,
    "Mistral-Small-3.1": mistral_small,
    "Ministral-3": ministral,
    "Mistral-Small-4": mistral_small_4,
    "Qwen3-VL": qwen3_vl,
    "Qwen3-VL with experts": qwen3_vl_moe,
    "Qwen3.5": qwen3_5,
    "Qwen3.5 with experts": qwen3_5_moe,
    "Qwen3.5 with experts, the text alone": qwen3_5_moe_alone,
    "Qwen3.6 in NVFP4": qwen3_6_nvfp4,
    "Qwen3.6 with experts in NVFP4": qwen3_6_moe_nvfp4,
    "Qwen3-Next": qwen3_next,
    "DeepSeek-V2-Lite": deepseek_v2_lite,
    "Kimi-K2": kimi_k2,
    "Kimi-K2.5": kimi_k2_5,
    "GLM-4.5V": glm_4_5v,
    "EXAONE-4.5": exaone_4_5,
    "Qwen2.5-VL": qwen2_5_vl,
    "InternVL3": internvl,
    "InternVL3.5 with experts": internvl_moe,
    "LLaVA 1.5": llava,
}


def _mistral3(text: dict[str, Any]) -> dict[str, Any]:
    return {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "image_token_index": 10,
            "multimodal_projector_bias": False, "projector_hidden_act": "gelu", "spatial_merge_size": 2,
            "text_config": text, "torch_dtype": "float32", "vision_feature_layer": -1}  # fmt: skip


def _multimodal(path: Path, config: dict[str, Any], *, tied: bool = True, new_names: bool = False) -> Published:
    """Write a random model with ``config`` as it stands, by the names of the first releases or by newer ones."""
    reference = path / "reference"
    library = transformers.AutoConfig
    reference.mkdir(parents=True)
    config = {**config, "vision_config": _VISION[config["model_type"]]}
    (reference / "config.json").write_text(json.dumps(config))
    model_class: Any = getattr(transformers, config["architectures"][0])
    model = model_class(library.from_pretrained(reference))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        if not tied:
            model.lm_head.weight = torch.nn.Parameter(torch.empty_like(model.lm_head.weight))
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            spread = 0.1 if parameter.dim() == 1 else 1.0 if "embed_tokens" in name else parameter.shape[-1] ** -0.5
            is_centered = config["model_type"] in ("gemma3", "qwen3_5", "qwen3_5_moe")  # norms scale by 1 + weight
            parameter.copy_(noise * spread + ("norm" in name and not is_centered))
    kind = config["model_type"]
    tensors = {name: stored_form(kind, name, tensor) for name, tensor in model.state_dict().items()}
    if tied:
        del tensors["lm_head.weight"]
    save_file(tensors, reference / "model.safetensors", {"format": "pt"})
    published = _renamed(reference, path / "published", (lambda name: name) if new_names else _first_name)
    return Published(published, reference, config["architectures"][0])


def _first_name(name: str) -> str:
    if name.startswith("lm_head."):
        return f"language_model.{name}"
    name = name.removeprefix("model.")
    return name.replace("language_model.", "language_model.model.", 1)


def _renamed(source: Path, target: Path, rename: Callable[[str], str]) -> Path:
    shutil.copytree(source, target)
    tensors = {rename(name): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, target / "model.safetensors", {"format": "pt"})
    return target


def _in_fp8_and_nvfp4(plain: Published) -> Published:
    """Store what ModelOpt's mixed precision does: attention in FP8; MLPs, experts one by one, and the head in NVFP4."""
    reference = load_file(plain.reference / "model.safetensors")
    published = load_file(plain.checkpoint / "model.safetensors")
    layers: dict[str, Any] = {}
    for name in [name for name in reference if "language_model" in name or name == "lm_head.weight"]:
        module = name.removesuffix(".weight")
        part = module.rpartition(".")[2]
        if ".experts." in name:
            parts, reference[name] = _experts_in_nvfp4(
                module.rpartition(".")[0], reference[name], part == "gate_up_proj"
            )
            layers[module.rpartition(".")[0]] = _W4A16
        elif module.endswith("_proj") or part in ("lm_head", "in_proj_qkv", "in_proj_z"):
            is_attention = "attn" in name
            layers[module] = {"quant_algo": "FP8"} if is_attention else _W4A16
            form = FORMATS["modelopt fp8"] if is_attention else FOUR_BITS["nvfp4"]
            parts, reference[name] = form.quantize(module, reference[name])
        else:
            continue
        del published[name]
        published |= parts
    save_file(
        {name: tensor.contiguous() for name, tensor in reference.items()},
        plain.reference / "model.safetensors",
        {"format": "pt"},
    )
    save_file(published, plain.checkpoint / "model.safetensors", {"format": "pt"})
    options = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quant_method": "modelopt",
               "ignore": ["model.visual*", "mtp*"], "quantized_layers": layers}  # fmt: skip
    config = json.loads((plain.checkpoint / "config.json").read_text())
    (plain.checkpoint / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    return plain


def _experts_in_nvfp4(module: str, fused: torch.Tensor, gated: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Return the tensors of each expert, and the rounded fused one [experts, outputs, inputs]."""
    stored: dict[str, torch.Tensor] = {}
    rounded = torch.empty_like(fused)
    for expert, weight in enumerate(fused):
        names = ("gate_proj", "up_proj") if gated else ("down_proj",)
        for rows, name in zip(torch.arange(len(weight)).chunk(len(names)), names, strict=True):
            parts, rounded[expert, rows] = FOUR_BITS["nvfp4"].quantize(f"{module}.{expert}.{name}", weight[rows])
            stored |= parts
    return stored, rounded


def _in_fp8(plain: Published) -> Published:
    """Round the linear layers of the text model in both checkpoints, and store them in FP8 in the published one."""
    reference = load_file(plain.reference / "model.safetensors")
    published = {}
    for name, tensor in reference.items():
        stored = _first_name(name)
        published[stored] = tensor
        if "language_model" in name and name.endswith("_proj.weight"):
            scale = tensor.abs().max() / 448
            published[stored] = (tensor / scale).to(torch.float8_e4m3fn)
            published[stored + "_scale_inv"] = scale
            published[stored.removesuffix("weight") + "activation_scale"] = torch.tensor(1.0)
            reference[name] = published[stored].float() * scale
    save_file(reference, plain.reference / "model.safetensors", {"format": "pt"})
    save_file(published, plain.checkpoint / "model.safetensors", {"format": "pt"})
    config = json.loads((plain.checkpoint / "config.json").read_text())
    (plain.checkpoint / "config.json").write_text(json.dumps({**config, "quantization_config": _FP8}))
    return plain
