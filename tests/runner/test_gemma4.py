"""Gemma 4's text models, each size made small: native on V1 and V2 and through transformers, in its config's forms.

test_config_fields.py and test_random_models.py have this family, too; test_window_groups.py hands it off.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GEMMA4_SIZES, add_tensors, make_checkpoint, node_config, reference_greedy, reference_model
from differential import EQUAL, compare, edited, random_prompts
from fast_set import sampled
from quantized_checkpoints import quantize
from safetensors.torch import load_file, save_file
from stepper import Stepper

import runner
from pdserve.config.parallel import choose_parallel_config, num_parameters
from pdserve.config.resolution.quantized_layers import keep_layers, kept_problem
from pdserve.errors import CheckpointError, ConfigError
from pdserve.kv.groups import KVHeads
from pdserve.kv.layout import KVScales
from pdserve.model.model_config import load_model_config

PROMPTS = random_prompts(random.Random(1), 128, (1, 19, 20, 21, 90))
SHORT = random_prompts(random.Random(2), 128, (3, 33))


def checkpoint(directory: Path, size: str, **fields: Any) -> Path:
    return make_checkpoint(directory / size, "gemma4_text", **GEMMA4_SIZES[size] | fields)


def published(source: Path, target: Path, size: str) -> Path:
    """Write the config as its authors publish it: heads of full layers in fields of their own."""
    given = {name: value for name, value in GEMMA4_SIZES[size].items() if name == "num_global_key_value_heads"}
    return edited(source, target, {"global_head_dim": 32, **given}, ("per_layer_config",))


@pytest.mark.parametrize("impl", ["native", pytest.param("transformers", marks=pytest.mark.slow)])
@pytest.mark.parametrize("size", sampled(GEMMA4_SIZES, every=2))
def test_tokens_and_logprobs_of_every_size_are_those_of_transformers(size: str, impl: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, size)
    assert compare(directory, PROMPTS, impl=impl) == EQUAL
    assert compare(directory, PROMPTS, impl=impl, chunk=37, stagger=2, block_size=48) == EQUAL


@pytest.mark.parametrize("size", sampled(GEMMA4_SIZES, every=5))
def test_tokens_and_logprobs_on_v2_are_those_of_transformers(size: str, tmp_path: Path) -> None:
    setup: dict[str, Any] = {"runner": "V2", "attention_backend": "triton", "chunk": 20, "stagger": 1, "num_tokens": 3}
    device = "cuda" if torch.cuda.is_available() else "cpu"
    assert compare(checkpoint(tmp_path, size), SHORT, device=device, **setup) == EQUAL


@pytest.mark.parametrize("size", sampled(("E2B", "26B-A4B"), every=2))
def test_blocks_behind_windows_are_never_read(size: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, size, sliding_window=9)
    reference = reference_model(directory)
    config = node_config(directory, num_blocks=200, block_size=4, kernel_block_size=4)
    stepper = Stepper(runner.build(config, lambda stage, fraction: None))
    results = stepper.generate(PROMPTS[2:], 8, chunk=13, stagger=1)
    assert [result.output for result in results] == [reference_greedy(reference, prompt, 8) for prompt in PROMPTS[2:]]
    assert stepper.num_freed > 0


@pytest.mark.parametrize("size", GEMMA4_SIZES)
def test_published_config_means_what_transformers_saves(size: str, tmp_path: Path) -> None:
    saved = checkpoint(tmp_path, size)
    directory = published(saved, tmp_path / "published", size)
    model = load_model_config(saved)
    assert load_model_config(directory) == model
    config = json.loads((directory / "config.json").read_text())
    whole = {
        "architectures": ["Gemma4ForConditionalGeneration"],
        "model_type": "gemma4",
        "text_config": config,
        "vision_config": {"model_type": "gemma4_vision"},
        "dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(whole))
    tensors = load_file(directory / "model.safetensors")
    renamed = {f"model.language_model.{name.removeprefix('model.')}": value for name, value in tensors.items()}
    head = renamed.pop("model.language_model.lm_head.weight", None)
    save_file(renamed | ({} if head is None else {"lm_head.weight": head}), directory / "model.safetensors")
    text = load_model_config(directory)
    assert text.multimodal == "Gemma4ForConditionalGeneration"
    assert (text.kv_heads, text.kv_sources, text.gemma4) == (model.kv_heads, model.kv_sources, model.gemma4)
    stepper = Stepper(runner.build(node_config(directory), lambda stage, fraction: None))
    expected = reference_greedy(reference_model(saved), SHORT[1], 4)
    assert stepper.generate([SHORT[1]], 4)[0].output == expected


def test_layers_that_share_kv_have_no_cache_and_may_store_projections(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, "E2B")
    model = load_model_config(directory)
    assert model.kv_layers == (0, 1, 2)
    assert model.kv_sources == (0, 1, 2, 1, 1, 2)
    assert model.num_kv_layers == 3
    assert set(model.kv_heads) == {KVHeads(1, 16), KVHeads(1, 32)}
    expected = reference_greedy(reference_model(directory), SHORT[1], 4)
    add_tensors(directory, {f"model.layers.{layer}.self_attn.k_norm.weight": torch.ones(16) for layer in (3, 4)})
    stepper = Stepper(runner.build(node_config(directory), lambda stage, fraction: None))
    assert stepper.generate([SHORT[1]], 4)[0].output == expected


@pytest.mark.parametrize("size", GEMMA4_SIZES)
def test_parameters_are_those_of_the_checkpoint(size: str, tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, size)
    stored = sum(
        tensor.numel() for name, tensor in load_file(directory / "model.safetensors").items() if tensor.dim() > 1
    )
    model = load_model_config(directory)
    counted = num_parameters(model, choose_parallel_config(model, 1, 1).position(0))
    assert counted == pytest.approx(stored, rel=0.05)


@pytest.mark.parametrize(
    ("size", "fields", "message"),
    [
        ("31B", {"hidden_activation": "silu"}, "hidden_activation = 'silu'; supported is 'gelu_pytorch_tanh'"),
        ("31B", {"use_bidirectional_attention": "all"}, "attention to later tokens"),
        ("31B", {"attention_bias": True}, "attention_bias = true"),
        ("E2B", {"vocab_size_per_layer_input": 64}, "vocab_size_per_layer_input 64 beside vocab_size 128"),
        ("E2B", {"num_kv_shared_layers": 5}, "num_kv_shared_layers 5 of 6"),
        ("31B", {"layer_types": ["full_attention"]}, "no list of 6 layers"),
        ("31B", {"num_global_key_value_heads": 3}, "layers of 3 and of 4 key/value heads"),
        ("31B", {"global_head_dim": 1 << 20}, "global_head_dim = 1048576; it must be a whole number from 1 to 4096"),
        ("31B", {"per_layer_config": {"1": {"rms_norm_eps": 0.1}}}, "rms_norm_eps per layer"),
        ("31B", {"per_layer_config": {"9": {"head_dim": 32}}}, "layer '9' in per_layer_config; it has 6 layers"),
        ("31B", {"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, "it must have full_attention"),
        ("26B-A4B", {"top_k_experts": 9}, "chooses 9 of 8 experts"),
        ("31B", {"final_logit_softcapping": 0}, "final_logit_softcapping = 0; it must be a number from 0.001"),
    ],
)
def test_impossible_config_is_refused(size: str, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved = checkpoint(tmp_path, size)
    directory = published(saved, tmp_path / "published", size)
    directory = edited(directory, tmp_path / "edited", fields)
    with pytest.raises(CheckpointError) as error:
        load_model_config(directory)
    assert message in str(error.value)


def test_quantized_weights_are_dequantized_on_v1_and_refused_on_v2(tmp_path: Path) -> None:
    plain = checkpoint(tmp_path, "31B", hidden_size=128, intermediate_size=128)
    directory = quantize(plain, tmp_path / "fp8", "fp8 blocks")
    model = load_model_config(directory)
    kept = keep_layers(model, choose_parallel_config(model, 1, 1))
    assert "V2 runs Gemma 4 with unquantized weights" in kept_problem(model, choose_parallel_config(model, 1, 1), kept)
    expected = reference_greedy(reference_model(plain), SHORT[1], 4)
    stepper = Stepper(runner.build(node_config(directory), lambda stage, fraction: None))
    assert stepper.generate([SHORT[1]], 4)[0].output == expected


def test_fp8_cache_of_unlike_heads_is_read_alike_by_v1_and_v2(tmp_path: Path) -> None:
    directory = checkpoint(tmp_path, "E2B")
    scales = (KVScales(0.02, 0.03),) * 3  # one per layer with a cache of its own
    outputs = []
    for version, backend in (("V1", "torch"), ("V2", "triton")):
        config = node_config(directory, runner=version, attention_backend=backend, kv_scales=scales)
        stepper = Stepper(runner.build(config, lambda stage, fraction: None))
        outputs.append([result.output for result in stepper.generate(SHORT[:1], 3, chunk=20)])
    assert outputs[0] == outputs[1]


def test_stages_are_refused_where_layers_need_those_of_others(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="pp 2: some layers of Gemma4ForCausalLM read the KV of other layers"):
        choose_parallel_config(load_model_config(checkpoint(tmp_path, "E2B")), 2, 1)
    embedded = checkpoint(tmp_path, "31B", hidden_size_per_layer_input=8)
    with pytest.raises(ConfigError, match="pp 2: layers of Gemma4ForCausalLM read embeddings of token ids"):
        choose_parallel_config(load_model_config(embedded), 2, 1)


def test_shards_must_split_or_repeat_the_heads_of_all_layers(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 24, "num_key_value_heads": 12, "num_global_key_value_heads": 4}
    model = load_model_config(checkpoint(tmp_path, "31B", **heads, hidden_size=96))
    with pytest.raises(ConfigError, match="4 KV heads cannot be spread over 6 tensor shards"):
        choose_parallel_config(model, 1, 6)
    assert choose_parallel_config(model, 1, 4).shares(model)[3].heads_in(model.kv_cache_groups, 0) == range(3, 4)
