"""config.json in the formats of transformers 4 and 5, and errors for wrong ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import FAMILIES, make_checkpoint
from safetensors.torch import save_file

from pdserve.errors import CheckpointError
from pdserve.model.model_config import ModelConfig, load_model_config
from pdserve.model.rope import RopeConfig

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 100,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "torch_dtype": "bfloat16",
}
MISTRAL = {**LLAMA, "architectures": ["MistralForCausalLM"]}
QWEN = {**LLAMA, "architectures": ["Qwen3ForCausalLM"]}

GLM: dict[str, Any] = {
    "architectures": ["Glm4MoeForCausalLM"],
    "head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}
MINIMAX: dict[str, Any] = {**LLAMA, "architectures": ["MiniMaxM2ForCausalLM"], "head_dim": 16, "num_local_experts": 8}


def windows_of(config: ModelConfig) -> tuple[int | None, ...]:
    """Return each layer's window in tokens; None is full attention."""
    return tuple(spec.window for spec in config.attention)


QWEN3_NEXT: dict[str, Any] = {**LLAMA, "architectures": ["Qwen3NextForCausalLM"], "num_experts": 8}


def load(
    directory: Path, config: dict[str, Any], generation: dict[str, Any] | None = None, impl: str = "auto"
) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (directory / "generation_config.json").write_text(json.dumps(generation))
    return load_model_config(directory, impl)


def test_defaults_equal_transformers(tmp_path: Path) -> None:
    llama = load(tmp_path, {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"})
    assert (llama.num_kv_heads, llama.head_dim, llama.rms_norm_eps) == (4, 16, 1e-6)
    assert llama.rope == RopeConfig(theta=10_000.0)
    flags = (llama.tie_word_embeddings, llama.attention_bias, llama.mlp_bias)
    assert flags == (False,) * 3
    assert windows_of(llama) == (None,) * 4
    assert windows_of(load(tmp_path, MISTRAL)) == (4096,) * 4
    assert windows_of(load(tmp_path, {**MISTRAL, "sliding_window": None})) == (None,) * 4
    qwen = load(tmp_path, QWEN)
    assert (qwen.head_dim, windows_of(qwen)) == (128, (None,) * 4)


@pytest.mark.parametrize("family", FAMILIES)
def test_configs_written_by_transformers_are_read(family: str, tmp_path: Path) -> None:
    config = load_model_config(make_checkpoint(tmp_path / "model", family, tie_word_embeddings=True, dtype="bfloat16"))
    tied = family != "nemotron_h"  # the library stores another head beside the embedding
    assert (config.dtype, config.tie_word_embeddings, config.eos_token_ids) == ("bfloat16", tied, (2,))


@pytest.mark.parametrize(
    ("rope_type", "numbers"),
    [
        ("linear", {"factor": 2.0}),
        ("dynamic", {"factor": 2.0}),
        ("yarn", {"factor": 4.0, "original_max_position_embeddings": 128, "beta_fast": 16}),
        ("llama3", {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    ],
)
def test_rope_means_the_same_in_every_format(rope_type: str, numbers: dict[str, Any], tmp_path: Path) -> None:
    oldest = load(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"type": rope_type, **numbers}})
    old = load(tmp_path, {**LLAMA, "rope_theta": 5e5, "rope_scaling": {"rope_type": rope_type, **numbers}})
    new = load(tmp_path, {**LLAMA, "rope_parameters": {"rope_type": rope_type, "rope_theta": 5e5, **numbers}})
    per_layer_type = {"full_attention": {"rope_type": rope_type, "rope_theta": 5e5, **numbers}}
    assert oldest == old == new == load(tmp_path, {**LLAMA, "rope_parameters": per_layer_type})
    assert (new.rope.theta, new.rope.rope_type) == (5e5, rope_type)
    if rope_type != "linear":
        assert new.rope.params["original_max_position_embeddings"] == (128 if rope_type == "yarn" else 512)


def test_the_part_of_a_head_that_rotates_is_a_size_or_a_factor(tmp_path: Path) -> None:
    size = load(tmp_path, {**MINIMAX, "rotary_dim": 8})  # as the published MiniMax-M2 has it
    factor = load(tmp_path, {**MINIMAX, "rope_parameters": {"rope_type": "default", "partial_rotary_factor": 0.5}})
    assert (size.head_dim, size.rope.rotary_dim) == (16, 8)
    assert factor.rope.rotary_dim == 8


def test_qwen_windows_follow_layer_types(tmp_path: Path) -> None:
    on = {**QWEN, "use_sliding_window": True, "sliding_window": 32}
    assert windows_of(load(tmp_path, {**on, "max_window_layers": 3})) == (None, None, None, 32)
    types = ["sliding_attention", "full_attention"] * 2
    assert windows_of(load(tmp_path, {**on, "layer_types": types})) == (32, None, 32, None)
    assert windows_of(load(tmp_path, {**on, "use_sliding_window": False})) == (None,) * 4


def test_mistral_windows_follow_layer_types(tmp_path: Path) -> None:
    types = ["full_attention", "sliding_attention", "sliding_attention", "sliding_attention"]
    ministral = load(tmp_path, {**MISTRAL, "sliding_window": 32, "layer_types": types})  # as Ministral-8B-2410 has it
    assert windows_of(ministral) == (None, 32, 32, 32)


def test_yarn_added_to_a_config_of_transformers_5_is_used_or_refused(tmp_path: Path) -> None:
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    saved = {**QWEN, "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    for added in ({"rope_scaling": yarn, "rope_theta": 5e5}, {"rope_scaling": {**yarn, "rope_theta": 5e5}}):
        rope = load(tmp_path, {**saved, **added}).rope
        assert (rope.rope_type, rope.theta, rope.params["factor"]) == ("yarn", 5e5, 4.0)
    with pytest.raises(CheckpointError, match=r"rope_scaling, which replaces .* rope_theta 500000.0. Move the fields"):
        load(tmp_path, {**saved, "rope_scaling": yarn})  # transformers would use theta 10,000


@pytest.mark.parametrize("fields", [{"rope_scaling": None}, {"rope_parameters": None}, {"rope_scaling": {}}, {}])
def test_gpt_oss_without_rope_parameters_has_its_yarn(fields: dict[str, Any], tmp_path: Path) -> None:
    rope = load(tmp_path, {**LLAMA, "architectures": ["GptOssForCausalLM"], **fields}).rope
    assert (rope.rope_type, rope.theta, rope.params["factor"]) == ("yarn", 150_000, 32.0)


def test_unknown_fields_are_named(tmp_path: Path) -> None:
    fields = {"qk_scale_of_next_year": 2, "use_cache": False, "sliding_window": None, "_name_or_path": "x"}
    assert load(tmp_path, {**LLAMA, **fields}).unread_fields == ("qk_scale_of_next_year",)


def test_eos_comes_from_the_generation_config_first(tmp_path: Path) -> None:
    assert load(tmp_path, {**LLAMA, "eos_token_id": 7}).eos_token_ids == (7,)
    assert load(tmp_path, {**LLAMA, "eos_token_id": 7}, {"eos_token_id": [8, 9]}).eos_token_ids == (8, 9)
    assert load(tmp_path, {**LLAMA, "eos_token_id": 7}, {"temperature": 1}).eos_token_ids == (7,)


def write_tokenizer(directory: Path, eos: Any, model: dict[str, Any]) -> None:
    tokenizer = {"added_tokens": [{"id": 9, "content": "<|im_end|>", "special": True}], "model": model}
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    config = {"eos_token": eos, "added_tokens_decoder": {"11": {"content": "<|eot|>", "special": True}}}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))


@pytest.mark.parametrize(
    ("eos", "model", "token_ids"),
    [
        ("<|im_end|>", {"type": "BPE", "vocab": {"a": 0}}, (0, 9)),
        ({"content": "<|im_end|>", "lstrip": False}, {"type": "BPE", "vocab": {"a": 0}}, (0, 9)),
        ("<|eot|>", {"type": "BPE", "vocab": {"a": 0}}, (0, 11)),
        ("</s>", {"type": "BPE", "vocab": {"a": 0, "</s>": 3}}, (0, 3)),
        ("</s>", {"type": "Unigram", "vocab": [["<unk>", 0.0], ["</s>", -1.0]]}, (0, 1)),
        ("a", {"type": "BPE", "vocab": {"a": 0}}, (0,)),
        ("</s>", {"type": "BPE", "vocab": {"</s>": 100}}, (0,)),  # a token without weights
        ("</s>", {"type": "BPE", "vocab": {"a": 0}}, (0,)),
        (None, {"type": "BPE", "vocab": {"a": 0}}, (0,)),
        (7, {"type": "BPE", "vocab": {"a": 0}}, (0,)),
    ],
)
def test_the_end_token_of_the_tokenizer_ends_answers_too(
    eos: Any, model: dict[str, Any], token_ids: tuple[int, ...], tmp_path: Path
) -> None:
    write_tokenizer(tmp_path, eos, model)
    assert load(tmp_path, LLAMA, {"eos_token_id": 0}).eos_token_ids == token_ids


def test_a_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, "</s>", {"type": "BPE", "vocab": {"</s>": "3"}})
    with pytest.raises(CheckpointError, match=r"tokenizer.json: its tokens cannot be read .* download"):
        load(tmp_path, LLAMA)


@pytest.mark.parametrize(
    ("tensors", "quantized", "dtype"),
    [
        ({"a": ("bfloat16", 8)}, False, "bfloat16"),
        ({"a": ("float16", 8), "scale": ("float32", 2)}, False, "float16"),
        ({"experts": ("uint8", 64), "router": ("float32", 2), "embedding": ("bfloat16", 8)}, True, "bfloat16"),
        ({"a": ("float32", 8), "b": ("bfloat16", 4)}, False, "float32"),
        ({"experts": ("uint8", 64)}, True, "bfloat16"),
        ({}, True, "bfloat16"),
        ({}, False, "float32"),
    ],
)
def test_without_a_dtype_the_stored_tensors_tell_it(
    tensors: dict[str, tuple[str, int]], quantized: bool, dtype: str, tmp_path: Path
) -> None:
    """As published, gpt-oss and MiniMax-M2 have none."""
    if tensors:
        stored = {name: torch.zeros(size, dtype=getattr(torch, kind)) for name, (kind, size) in tensors.items()}
        save_file(stored, tmp_path / "model.safetensors")
    config = {name: value for name, value in LLAMA.items() if name != "torch_dtype"} | {"tie_word_embeddings": False}
    quantization = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    assert load(tmp_path, config | (quantization if quantized else {})).dtype == dtype


def scaled(**rope: Any) -> dict[str, Any]:
    return {"rope_scaling": rope}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["../x"]}, "architectures = .*; it must be a list of classes"),
        ({"architectures": None}, "lacks 'architectures'; it must be a list of classes"),
        ({"quantization_config": {"quant_method": "hqq"}}, "quantized checkpoint .'hqq'.; supported are float32"),
        ({"hidden_size": None}, "lacks 'hidden_size'"),
        ({"vocab_size": -3}, "vocab_size = -3; it must be a whole number from 1 to 2097152"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers = '4'"),
        ({"num_key_value_heads": 3}, "4 attention heads cannot share 3 key/value heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"rms_norm_eps": 0}, "rms_norm_eps = 0"),
        ({"torch_dtype": "float8_e4m3fn"}, "dtype 'float8_e4m3fn'; supported are float32, bfloat16, float16"),
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'; supported is 'silu'"),
        (scaled(rope_type="longrope"), "'longrope'; supported are default, linear, dynamic, yarn, llama3"),
        (scaled(rope_type="linear"), "'linear' without 'factor'"),
        (scaled(rope_type="linear", factor="2"), "factor = '2'.*must be a number"),
        ({"rope_parameters": [1]}, r"rope_parameters = \[1\]; it must be an object"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5; supported is 1.0"),
        (GLM | {"partial_rotary_factor": 0.01}, "rotates 0 values of heads of 16"),
        (GLM | {"topk_group": 3, "n_group": 2}, "keeps 3 of 2 groups of 8 experts"),
        (GLM | {"num_experts_per_tok": 9}, "chooses 9 of 8 experts per token"),
        (
            MINIMAX | {"rotary_dim": 8, "partial_rotary_factor": 1.0},
            "rotary_dim 8, but partial_rotary_factor 1.0 .* 16",
        ),
        ({"model_type": "qwen2"}, "model_type = 'qwen2' beside architectures = .'LlamaForCausalLM'., .* 'llama'"),
        ({"is_causal": False}, "is_causal = False: attention to later tokens; supported is true"),
        ({"per_layer_config": {"0": {}}}, "per_layer_config = .*: layers of different shapes; supported is none"),
        ({"sliding_window": 32}, "sliding_window = 32, but layers of this architecture attend to all tokens"),
        ({"layer_types": ["sliding_attention"] * 4}, "layer_types, but all layers of this .* have no sliding window"),
        (QWEN | {"layer_types": ["sliding_attention"] * 4}, "sliding_attention layers but no sliding_window"),
        (MINIMAX | {"num_experts": 4}, "different numbers of experts in num_experts and num_local_experts"),
        ({"eos_token_id": "</s>"}, "eos_token_id = '</s>'"),
    ],
)
def test_errors_name_file_value_and_what_is_supported(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as caught:
        load(tmp_path, {**LLAMA, **changes})
    assert str(tmp_path / "config.json") in str(caught.value)


def test_wrong_qwen_layer_types_are_refused(tmp_path: Path) -> None:
    on = {**QWEN, "use_sliding_window": True, "sliding_window": 32}
    with pytest.raises(CheckpointError, match="2 layer_types for 4 layers"):
        load(tmp_path, {**on, "layer_types": ["full_attention"] * 2})
    with pytest.raises(CheckpointError, match="'linear_attention'; supported are"):
        load(tmp_path, {**on, "layer_types": ["linear_attention"] * 4})


def gemma3(**text: Any) -> dict[str, Any]:
    """Like the config.json of gemma-3-4b-it, 12b-it and 27b-it."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"],
        "eos_token_id": [1, 106],
        "model_type": "gemma3",
        "text_config": {"model_type": "gemma3_text", "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, **text},
        "torch_dtype": "bfloat16",
        "vision_config": {"hidden_size": 1152, "model_type": "siglip_vision_model", "num_attention_heads": 16},
    }


@pytest.mark.parametrize(
    ("text", "heads"),
    [
        ({"hidden_size": 2560, "num_hidden_layers": 34}, (8, 4, 256)),
        ({"hidden_size": 3840, "num_attention_heads": 16, "num_key_value_heads": 8}, (16, 8, 256)),
        ({"head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16}, (32, 16, 128)),
    ],
)
def test_fields_that_a_text_config_leaves_out_are_those_of_transformers(
    text: dict[str, Any], heads: tuple[int, int, int], tmp_path: Path
) -> None:
    config = load(tmp_path, gemma3(**text))
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == heads
    assert (config.vocab_size, config.max_position_embeddings) == (262_208, 131_072)
    assert (config.dtype, config.eos_token_ids) == ("bfloat16", (1, 106))
    assert config.multimodal == "Gemma3ForConditionalGeneration"


def test_a_native_family_serves_the_text_model_of_a_multimodal_checkpoint(tmp_path: Path) -> None:
    whole = {"architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3", "torch_dtype": "bfloat16"}
    text = {name: value for name, value in LLAMA.items() if name not in ("architectures", "torch_dtype")}
    config = load(tmp_path, {**whole, "text_config": {**text, "model_type": "mistral", "sliding_window": None}})
    assert (config.architecture, config.impl, config.num_heads) == ("MistralForCausalLM", "native", 4)
    assert (config.dtype, windows_of(config)) == ("bfloat16", (None,) * 4)
    library = load_model_config(tmp_path, "transformers")
    assert (library.architecture, library.impl) == ("Mistral3ForConditionalGeneration", "transformers")


MINISTRAL = {
    **{name: value for name, value in LLAMA.items() if not name.startswith("rope")},
    "architectures": ["Ministral3ForCausalLM"],
    "model_type": "ministral3",
}
SCALED = {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1}


def test_queries_are_scaled_by_the_library_s_factor_unless_a_config_has_another(tmp_path: Path) -> None:
    default = load(tmp_path, MINISTRAL).rope
    assert (default.query_beta, default.params["original_max_position_embeddings"]) == (0.1, 16384)
    assert load(tmp_path, {**MINISTRAL, "rope_parameters": {**SCALED, "llama_4_scaling_beta": 0}}).rope.query_beta == 0
    older = load(tmp_path, {**MINISTRAL, "rope_scaling": {**SCALED, "type": "yarn"}, "rope_theta": 1e6}).rope
    assert older == load(tmp_path, {**MINISTRAL, "rope_parameters": {**SCALED, "rope_theta": 1e6}}).rope
    assert load(tmp_path, {**LLAMA, "rope_scaling": SCALED}).rope.query_beta == 0  # Llama's layers do not read it


@pytest.mark.parametrize(
    ("rope", "message"),
    [
        ({"rope_type": "yarn", "factor": 4.0}, r"without 'llama_4_scaling_beta'.*write 0 there"),
        ({**SCALED, "llama_4_scaling_beta": -0.1}, r"llama_4_scaling_beta = -0.1; it must be a number from 0 to 100"),
        ({**SCALED, "llama_4_scaling_beta": 101}, r"llama_4_scaling_beta = 101; it must be a number from 0 to 100"),
        ({**SCALED, "rope_type": "dynamic"}, r"llama_4_scaling_beta = 0.1 with rope type 'dynamic'; supported are 0"),
        ({"llama_4_scaling_beta": 0.1}, r"0.1 with rope type 'default'; .*original_max_position_embeddings"),
    ],
)
def test_a_scale_of_queries_that_cannot_be_is_refused(rope: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path, {**MINISTRAL, "rope_parameters": rope})


@pytest.mark.parametrize(("factor", "refused"), [(0.4, False), (0.5, True), (None, False)])
def test_a_factor_of_rotated_values_must_fit_latents(factor: float | None, refused: bool, tmp_path: Path) -> None:
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 24, "qk_rope_head_dim": 16, "v_head_dim": 16}
    rope = {**SCALED, "partial_rotary_factor": factor}
    config = {**MINISTRAL, **sizes, "architectures": ["Mistral4ForCausalLM"], "model_type": "mistral4"}
    for fields in ({"rope_parameters": rope}, {"rope_parameters": SCALED, "partial_rotary_factor": factor}):
        if refused:
            with pytest.raises(CheckpointError, match=r"factor 0.5, but qk_rope_head_dim 16 of heads of 40"):
                load(tmp_path, {**config, **fields})
        else:
            assert load(tmp_path, {**config, **fields}).rope_head_dim == 16


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "falcon_h1", "mamba_d_ssm": 64}, "Mamba state .model_type falcon_h1"),
        ({"model_type": "nemotron_h", "hybrid_override_pattern": "M-M*"}, "Mamba state"),
        ({"hybrid_override_pattern": "M-M*"}, "Mamba state .hybrid_override_pattern"),
        ({"layer_types": ["mamba", "attention"]}, "Mamba state .layer_types has 'mamba'"),
        ({"layer_types": ["linear_attention", "attention"], "mamba_d_state": 8}, "Mamba state"),
        ({"layer_types": ["linear_attention", "full_attention"]}, "linear attention .layer_types"),
        ({"model_type": "qwen3_next", "full_attention_interval": 4}, "linear attention .full_attention_interval 4"),
        ({"attn_type_list": [0, 0, 0, 1]}, "linear attention .attn_type_list"),
        ({"linear_attn_config": {"kda_layers": [1, 2]}}, "linear attention .linear_attn_config"),
        ({"layer_types": ["conv", "full_attention"]}, "short convolutions"),
        ({"model_type": "deepseek_v32", "index_topk": 2048}, "DeepSeek sparse attention .index_topk"),
        ({"layer_types": [{"a": 1}, "compressed_sparse_attention"]}, "DeepSeek sparse attention"),
        ({"quantization_config": {"quant_method": "modelopt", "quant_algo": "MXFP8"}}, "ModelOpt quantized .'MXFP8'"),
    ],
)
def test_a_true_refusal_says_what_the_model_has(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message) as refused:
        load(tmp_path, {**LLAMA, "architectures": ["OtherForCausalLM"], **changes})
    assert "Choose a" in str(refused.value)


def test_recurrent_layers_need_the_native_implementation(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"recurrent layers.*leave --model-impl at auto"):
        load(tmp_path, QWEN3_NEXT, impl="transformers")


def test_weights_of_modelopt_are_known_without_a_quantization_config(tmp_path: Path) -> None:
    """Older versions of ModelOpt write only a file of their own. It may also speak of the KV cache alone."""
    beside = tmp_path / "hf_quant_config.json"
    beside.write_text(json.dumps({"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}))
    assert load(tmp_path, LLAMA).weight_format == "unquantized"
    beside.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}))
    assert load(tmp_path, LLAMA).weight_format == "modelopt"
    beside.write_text(json.dumps({"quantization": {"quant_algo": "W4A8_AWQ"}}))
    with pytest.raises(CheckpointError, match=r"ModelOpt quantized .'W4A8_AWQ'.*supported of ModelOpt are FP8"):
        load(tmp_path, LLAMA)


@pytest.mark.parametrize("kind", [["gemma3"], {"a": 1}, 5, None])
def test_a_model_type_that_is_no_text_is_no_multimodal_one(kind: Any, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="lacks 'vocab_size'"):
        load(tmp_path, {**gemma3(), "model_type": kind, "text_config": {}})


@pytest.mark.parametrize("text", ["{", "[1, 2]", "", '{"a": \xff}'])
def test_broken_files_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(CheckpointError, match=r"config.json .*download the checkpoint again"):
        load_model_config(tmp_path)
    with pytest.raises(CheckpointError, match=r"config.json does not exist"):
        load_model_config(tmp_path / "nowhere")
