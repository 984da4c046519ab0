"""Quantized checkpoints become the numbers that their tools meant; test_refused_quantization.py has errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from any_models import make_any_checkpoint
from checkpoints import make_checkpoint, node_config, reference_greedy, reference_model
from quantized_checkpoints import FORMATS, mxfp4_experts, quantize
from safetensors.torch import load_file, save_file
from stepper import Stepper
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import runner
from pdserve.checkpoint.weight_digests import checkpoint_digests, fold_digests
from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import weight_bytes
from pdserve.config.resolve import resolve
from pdserve.errors import CheckpointError, ConfigError
from pdserve.model.model_config import ModelConfig, load_model_config
from pdserve.model.rope import RopeConfig
from runner.loading.weights import open_weights

CPU = torch.device("cpu")
ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)
PROMPT = list(range(5, 40))


def model_with(options: dict[str, Any]) -> ModelConfig:
    """Return a config of which only the quantization counts."""
    rope = RopeConfig(theta=1e4)
    return ModelConfig(
        *("X", 1, 1, 1, 1, 1, 1, 1, 1e-6, rope, 1, "float32"),
        weight_format=options["quant_method"],
        quantization=options,
    )


def weight_of(
    directory: Path,
    options: dict[str, Any],
    stored: dict[str, Tensor],
    name: str,
    index: Any = ...,
    device: torch.device = CPU,
) -> Tensor:
    directory.mkdir(exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in stored.items()}, directory / "model.safetensors")
    with open_weights(directory, model_with(options), device, torch.float32) as weights:
        assert list(weights) == [name]
        part: Tensor = weights[name][index]
        return part


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [(272, 160), (64, 400)])
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_weights_and_their_parts_are_exact(name: str, size: tuple[int, int], device: str, tmp_path: Path) -> None:
    """Parts begin and end within words, groups and blocks, as tensor shards may."""
    config, quantizer = FORMATS[name]
    weight = torch.randn(size, generator=torch.Generator().manual_seed(size[0]))
    stored, expected = quantizer("m.proj", weight)
    assert (expected - weight).abs().max() < 0.5 * weight.abs().max()
    for index in (..., slice(37, 61), (slice(None), slice(61, 139)), (slice(3, 50), slice(1, 2))):
        values_of_part = weight_of(tmp_path, config, stored, "m.proj.weight", index, torch.device(device)).cpu()
        torch.testing.assert_close(values_of_part, expected[index], rtol=0, atol=0)


def test_large_weights_are_computed_in_parts(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("runner.models.quantization.dequantize._PART", 500)
    for name, (config, quantizer) in FORMATS.items():
        stored, expected = quantizer("m.proj", torch.randn(48, 64))
        assert torch.equal(weight_of(tmp_path / name, config, stored, "m.proj.weight"), expected), name


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.float8_e8m0fnu])
def test_fp8_blocks_equal_those_of_transformers(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    values = torch.randn(256, 384).to(torch.float8_e4m3fn)
    scales = torch.rand(2, 3).add(0.1).to(scale_dtype)
    library: Any = Fp8Dequantize
    expected = library(None)._dequantize_one(values, scales, torch.bfloat16)
    stored = {"a.weight": values, "a.weight_scale_inv": scales}
    weight = weight_of(tmp_path, FORMATS["fp8 blocks"].config, stored, "a.weight").bfloat16()
    assert torch.equal(weight, expected)


def test_fused_fp8_experts_have_blocks_per_expert(tmp_path: Path) -> None:
    values = torch.randn(3, 200, 300).to(torch.float8_e4m3fn)
    scales = torch.rand(3, 2, 3)
    spread = scales.repeat_interleave(128, 1).repeat_interleave(128, 2)[:, :200, :300]
    stored = {"experts.gate_up_proj": values, "experts.gate_up_proj_scale_inv": scales}
    for index in (..., slice(1, 3), (slice(None), slice(100, 150), slice(7, 290))):
        weight = weight_of(tmp_path, FORMATS["fp8 blocks"].config, stored, "experts.gate_up_proj", index)
        assert torch.equal(weight, (values.float() * spread)[index])


def test_mxfp4_equals_that_of_transformers(tmp_path: Path) -> None:
    blocks = torch.randint(256, (2, 6, 3, 16), dtype=torch.uint8)
    scales = torch.randint(110, 140, (2, 6, 3), dtype=torch.uint8)
    stored = {"experts.down_proj_blocks": blocks, "experts.down_proj_scales": scales}
    expected = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    for index in (..., slice(1, 2), (slice(None), slice(5, 70), slice(2, 5))):
        weight = weight_of(tmp_path, {"quant_method": "mxfp4"}, stored, "experts.down_proj", index)
        assert torch.equal(weight, expected[index])


def test_mxfp4_by_hand(tmp_path: Path) -> None:
    """Low four bits first: 0x21 is 0.5 then 1; 0xF7 is 6 then -6. Scale 129 is 2^2, 0 is 2^-127."""
    blocks = torch.zeros(1, 1, 2, 16, dtype=torch.uint8)
    blocks[0, 0, :, 0] = 0x21
    blocks[0, 0, :, 1] = 0xF7
    stored = {"x_blocks": blocks, "x_scales": torch.tensor([[[129, 0]]], dtype=torch.uint8)}
    weight = weight_of(tmp_path, {"quant_method": "mxfp4"}, stored, "x")[0, :, 0]
    assert weight[:5].tolist() == [2.0, 4.0, 24.0, -24.0, 0.0]
    assert weight[32:35].tolist() == [2.0**-128, 2.0**-127, 6 * 2.0**-127]
    assert weight_of(tmp_path, {"quant_method": "mxfp4"}, stored, "x").shape == (1, 64, 1)


def test_awq_words_by_hand(tmp_path: Path) -> None:
    """The fields of a word are columns 0, 2, 4, 6, 1, 3, 5, 7."""
    options = {"quant_method": "awq", "bits": 4, "group_size": -1, "zero_point": True, "version": "GEMM"}
    words = torch.tensor([[0x75316420], [0x75316420]], dtype=torch.int32)
    stored = {
        "a.qweight": words,
        "a.qzeros": torch.tensor([[0x11111111]], dtype=torch.int32),
        "a.scales": torch.full((1, 8), 2.0).half(),
    }
    assert weight_of(tmp_path, options, stored, "a.weight").tolist() == [[2.0 * (n - 1)] * 2 for n in range(8)]


@pytest.mark.parametrize(
    ("options", "word", "zeros"),
    [
        ({"checkpoint_format": "gptq_v2"}, 0x76543210, [0, 1, 2, 3, 4, 5, 6, 7]),
        ({}, 0x76543210, [1, 2, 3, 4, 5, 6, 7, 8]),
        ({}, 0x7777777F, [0, 8, 8, 8, 8, 8, 8, 8]),  # AutoGPTQ subtracts 1 in each field
        # GPTQModel subtracts 0x11111111 from the whole word, so a field of 0 borrows from the next field.
        ({"meta": {"quantizer": ["gptqmodel:1.4"]}}, 0x7777776F, [0, 8, 8, 8, 8, 8, 8, 8]),
    ],
)
def test_gptq_zero_points_by_hand(options: dict[str, Any], word: int, zeros: list[int], tmp_path: Path) -> None:
    stored = {
        "a.qweight": torch.zeros(2, 8, dtype=torch.int32),
        "a.qzeros": torch.tensor([[word], [0x77777777]], dtype=torch.int32),
        "a.scales": torch.ones(2, 8).half(),
        "a.g_idx": torch.tensor([0, 1] * 8, dtype=torch.int32),
    }
    config = {"quant_method": "gptq", "bits": 4, "group_size": 8, "desc_act": True, "sym": False, **options}
    weight = weight_of(tmp_path, config, stored, "a.weight")
    assert weight[:, 0].tolist() == [-zero for zero in zeros]
    assert weight[:, 1].tolist() == ([-7] * 8 if options.get("checkpoint_format") else [-8] * 8)


def tokens(directory: Path, **options: Any) -> list[int]:
    model_runner = runner.build(node_config(directory, **options), lambda stage, fraction: None)
    (result,) = Stepper(model_runner).generate([PROMPT], 6)
    return result.output


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("name", ["fp8 blocks", "compressed w4a16 zero points", "awq", "gptq desc_act", "auto-round"])
@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_quantized_model_has_the_tokens_of_the_dequantized_one(
    impl: str, name: str, device: str, tmp_path: Path
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3", num_hidden_layers=2)
    quantized = quantize(plain, tmp_path / "quantized", name)
    assert tokens(quantized, impl=impl, device=device) == reference_greedy(reference_model(plain), PROMPT, 6)


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize(
    "options",
    [
        {"quant_algo": "FP8", "ignore": ["lm_head"], "producer": {"name": "modelopt", "version": "0.37.0"}},
        {"producer": {"name": "modelopt"}, "quantization": {"exclude_modules": ["lm_head"], "quant_algo": "FP8"}},
    ],
)
def test_fp8_of_modelopt_needs_no_quant_method(impl: str, options: dict[str, Any], tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    quantized = quantize(plain, tmp_path / "quantized", "modelopt fp8")
    config = json.loads((quantized / "config.json").read_text())
    (quantized / "config.json").write_text(json.dumps({**config, "quantization_config": options}))
    assert tokens(quantized, impl=impl) == reference_greedy(reference_model(plain), PROMPT, 6)


@pytest.mark.parametrize(
    ("model_type", "name", "impl"),
    [
        ("mixtral", "fp8 blocks", "transformers"),
        ("qwen3_moe", "awq", "transformers"),
        ("mixtral", "awq", "native"),
        ("qwen3_moe", "fp8 blocks", "native"),
    ],
)
def test_weights_of_single_experts_are_dequantized_before_they_are_fused(
    model_type: str, name: str, impl: str, tmp_path: Path
) -> None:
    plain = make_any_checkpoint(tmp_path / "plain", model_type)
    quantized = quantize(plain, tmp_path / "quantized", name)
    options: dict[str, Any] = {"max_model_len": 256, "max_batch_tokens": 64, "impl": impl}
    assert tokens(quantized, **options) == reference_greedy(reference_model(plain), PROMPT, 6)


def test_parts_in_other_files_are_found(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    quantized = quantize(plain, tmp_path / "quantized", "fp8 blocks")
    tensors = load_file(quantized / "model.safetensors")
    scales = {name: tensors.pop(name) for name in list(tensors) if name.endswith("_scale_inv")}
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    save_file(scales, quantized / "model-2.safetensors", {"format": "pt"})
    assert tokens(quantized) == reference_greedy(reference_model(plain), PROMPT, 6)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_biases_of_zeros_that_autogptq_adds_are_left_out(impl: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    quantized = quantize(plain, tmp_path / "quantized", "gptq")
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.0.self_attn.o_proj.bias"
    save_file({**tensors, name: torch.zeros(64).half()}, quantized / "model.safetensors", {"format": "pt"})
    assert tokens(quantized, impl=impl) == reference_greedy(reference_model(plain), PROMPT, 6)
    save_file({**tensors, name: torch.ones(64).half()}, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"o_proj.bias"):
        tokens(quantized, impl=impl)


def resolved(directory: Path, impl: str = "auto", **environ: str) -> Any:
    options = NodeOptions(model=str(directory), device="cpu", kv_cache_memory=1 << 22, model_impl=impl)
    return resolve(options, DeviceInfo(kind="cpu", index=0, name="cpu", memory=1 << 34), environ)


@pytest.mark.parametrize("impl", ["native", "transformers"])
def test_the_dequantized_size_counts_and_is_said(impl: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    quantized = quantize(plain, tmp_path / "quantized", "compressed w4a16")
    config = resolved(quantized, impl)
    position = resolved(plain, impl).position
    assert weight_bytes(config.model, position, "float32") == weight_bytes(
        load_model_config(plain, impl), position, "float32"
    )
    (said,) = (choice for choice in config.choices if choice.startswith("weights="))
    assert "compressed-tensors, dequantized when loaded: 0.00 GiB stored take 0.00 GiB of memory in float32" in said
    assert config.decision.runner == "V1"
    with pytest.raises(ConfigError, match=r"V2 runs unquantized, FP8, .*; these are compressed-tensors"):
        resolved(quantized, impl, PDSERVE_USE_V2_MODEL_RUNNER="1")


def test_digests_cover_the_stored_bytes(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "llama", num_hidden_layers=1)
    quantized = quantize(plain, tmp_path / "quantized", "gptq")
    before = fold_digests(checkpoint_digests(quantized).tensors)
    tensors = load_file(quantized / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.qzeros"][0, 0] += 1
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    after = fold_digests(checkpoint_digests(quantized).tensors)
    assert {group for group in before if before[group] != after[group]} == {"layers.0.mlp"}
    assert resolved(quantized).compat_fields["config"] != resolved(plain).compat_fields["config"]


def test_mxfp4_experts_round_trip(tmp_path: Path) -> None:
    stored, expected = mxfp4_experts("experts.down_proj", torch.randn(2, 64, 5))
    assert torch.equal(weight_of(tmp_path, {"quant_method": "mxfp4"}, stored, "experts.down_proj"), expected)
