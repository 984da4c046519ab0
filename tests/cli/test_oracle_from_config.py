"""The oracle's answer and its reasons, from a checkpoint's config.json."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from any_models import small_config

from cli.explain import as_text
from pdserve.config.attention_backends import Platform
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import weight_bytes
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.errors import CheckpointError, ConfigError

GPU = DeviceInfo(kind="cuda", index=0, name="a GPU", memory=80 << 30)
HOPPER, ADA = (msgspec.structs.replace(GPU, capability=capability) for capability in ((9, 0), (8, 9)))
PLATFORM = Platform(device="cuda", has_triton=True, has_flashinfer=True)

ON_V2 = ["llama", "mistral", "qwen3", "qwen3_moe", "mixtral", "gpt_oss", "glm4_moe", "minimax_m2"]
REASONS = {
    "opt": ["architecture: ", "model implementation: V2 runs native layers; OPTForCausalLM runs through transformers"],
    "gemma": ["architecture: ", "model implementation: V2 runs native layers; GemmaForCausalLM"],
    "olmoe": ["model implementation: V2 runs native layers; OlmoeForCausalLM runs through transformers"],
}


def resolved(
    path: Path,
    model_type: str,
    variable: str | None = None,
    impl: str = "auto",
    split: tuple[int, int] = (1, 1),
    device: DeviceInfo = GPU,
    quantization: str = "auto",
    **fields: object,
) -> NodeConfig:
    config = small_config(model_type, head_dim=64)
    config.architectures = [type_name(model_type)]
    config.save_pretrained(path)
    values = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16"} | fields
    (path / "config.json").write_text(json.dumps(values))
    pp, tp = split
    options = NodeOptions(
        model=str(path),
        load_format="dummy",
        max_model_len=64,
        model_impl=impl,
        quantization=quantization,
        pp=pp,
        tp=tp,
    )
    return resolve(options, device, {} if variable is None else {VARIABLE: variable}, PLATFORM)


def type_name(model_type: str) -> str:
    import transformers

    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return str(mapping[model_type])


@pytest.mark.parametrize("model_type", ON_V2)
def test_native_families_with_figures_run_on_v2(model_type: str, tmp_path: Path) -> None:
    config = resolved(tmp_path, model_type)
    assert (config.model.impl, config.decision.runner) == ("native", "V2")
    assert config.choices[0] == "model_impl=native: its architecture has native layers"


def test_a_native_family_without_figures_runs_on_v1_and_on_a_forced_v2(tmp_path: Path) -> None:
    config = resolved(tmp_path / "default", "qwen2")
    assert (config.model.impl, config.decision.runner) == ("native", "V1")
    lack, advice = config.decision.reasons
    assert f"docs/numbers.md has no figures of {config.model.architecture} on V2 yet" in lack
    assert advice == f"{VARIABLE}=1 chooses V2"
    assert resolved(tmp_path / "forced", "qwen2", "1").decision.runner == "V2"


@pytest.mark.parametrize("model_type", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_explain_counts_experts(model_type: str, tmp_path: Path) -> None:
    config = resolved(tmp_path, model_type)
    assert config.model.moe is not None
    assert (config.model.moe.num_experts, config.model.moe.top_k) == (4, 2)
    rows = r"^experts +4 in each of \d+ layers\n +a token uses 2: [\d.]+ M of [\d.]+ M parameters$"
    assert re.search(rows, as_text(config), re.MULTILINE)


@pytest.mark.parametrize("model_type", REASONS)
def test_other_architectures_run_on_v1_for_named_reasons(model_type: str, tmp_path: Path) -> None:
    config = resolved(tmp_path, model_type)
    assert (config.model.impl, config.decision.runner, config.attention_backend) == ("transformers", "V1", "torch")
    assert config.choices[0] == "model_impl=transformers: its architecture has no native layers"
    for reason in REASONS[model_type]:
        assert any(given.startswith(reason) for given in config.decision.reasons)


@pytest.mark.parametrize("method", ["fp8", "mxfp4"])
@pytest.mark.parametrize(
    ("device", "dtype", "variable", "expected"),
    [
        (HOPPER, "bfloat16", None, "V2"),
        (HOPPER, "bfloat16", "0", "V1"),
        (HOPPER, "float32", None, "V1"),
        (ADA, "bfloat16", None, "V1"),
        (ADA, "bfloat16", "1", "V2"),
        (GPU, "bfloat16", None, "V1"),
    ],
)
def test_quantized_weights_are_kept_by_default_on_hopper_in_bfloat16(
    method: str, device: DeviceInfo, dtype: str, variable: str | None, expected: str, tmp_path: Path
) -> None:
    family = "gpt_oss" if method == "mxfp4" else "qwen3_moe"
    quantized: dict[str, Any] = {"quantization_config": {"quant_method": method, "weight_block_size": [128, 128]}}
    config = resolved(tmp_path, family, variable, device=device, **quantized | {"dtype": dtype})
    assert (config.decision.runner, config.model.keeps_quantized) == (expected, expected == "V2")
    if expected == "V1" and variable is None:
        assert config.decision.reasons == (
            f"quantization: V2 is the default for {method} weights in bfloat16 on GPUs of compute capability 9.0 "
            f"(Hopper) only; this is {dtype} on a GPU",
            f"{VARIABLE}=1 chooses V2",
        )


def test_weights_in_fp8_are_dequantized_on_v1_and_kept_on_v2(tmp_path: Path) -> None:
    quantized: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config, kept = (resolved(tmp_path / value, "llama", value, **quantized) for value in ("0", "1"))
    assert kept.compat_fields == config.compat_fields
    tables = 2 * 4 * config.model.vocab_size * config.model.hidden_size  # bytes
    dequantized, kept_bytes = (
        weight_bytes(of_node.model, of_node.position, "float32") - tables for of_node in (config, kept)
    )
    assert kept_bytes == int(dequantized / 4 * 1.001)


def test_weights_are_quantized_at_load_on_v2_only(tmp_path: Path) -> None:
    plain = resolved(tmp_path / "plain", "llama", "1")
    config = resolved(tmp_path / "fp8", "llama", "1", quantization="fp8")
    assert config.model.keeps_quantized
    assert config.compat_fields != plain.compat_fields, "their KV differs"
    tables = 2 * 4 * config.model.vocab_size * config.model.hidden_size  # bytes
    stored, kept = (weight_bytes(of_node.model, of_node.position, "float32") - tables for of_node in (plain, config))
    assert kept == int(stored / 4 * 1.001)
    with pytest.raises(ConfigError, match="quantization fp8 needs runner V2"):
        resolved(tmp_path / "0", "llama", "0", quantization="fp8")
    with pytest.raises(ConfigError, match="quantization awq: the checkpoint has unquantized weights"):
        resolved(tmp_path / "awq", "llama", "1", quantization="awq")
    own: dict[str, Any] = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    config = resolved(tmp_path / "own", "llama", "1", quantization="fp8", **own)
    assert config.model.weight_format == "fp8"


def test_experts_in_mxfp4_are_dequantized_on_v1_and_kept_on_v2(tmp_path: Path) -> None:
    quantized: dict[str, Any] = {"quantization_config": {"quant_method": "mxfp4"}}
    config, kept = (resolved(tmp_path / value, "gpt_oss", value, **quantized) for value in ("0", "1"))
    assert kept.compat_fields == config.compat_fields
    moe = config.model.moe
    assert moe is not None
    experts = 3 * config.model.num_layers * moe.num_experts * config.model.hidden_size * moe.intermediate_size
    dequantized, kept_bytes = (weight_bytes(of_node.model, of_node.position, "bfloat16") for of_node in (config, kept))
    assert dequantized - kept_bytes == experts * 2 - experts * 17 // 32
    assert f"weights    {kept_bytes / 2**30:.2f} GiB in memory" in as_text(kept).splitlines()


def test_v2_refuses_to_dequantize_other_formats(tmp_path: Path) -> None:
    gptq = {"quant_method": "gptq", "bits": 8, "group_size": 32}
    with pytest.raises(ConfigError, match=r"V2 runs unquantized, FP8, MXFP4, NVFP4 .* weights; these are gptq"):
        resolved(tmp_path, "llama", "1", quantization_config=gptq)


@pytest.mark.parametrize(
    ("options", "bits"),
    [
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        ({"quant_method": "awq", "bits": 4, "group_size": 32}, 4 + 24 / 32),
        ({"quant_method": "gptq", "bits": 4, "group_size": 32}, 4 + 24 / 32),
    ],
)
def test_4_bit_weights_are_kept_by_default_on_gpus(options: dict[str, Any], bits: float, tmp_path: Path) -> None:
    config = resolved(tmp_path / "gpu", "qwen3", device=ADA, quantization_config=options, dtype="bfloat16")
    assert (config.decision.runner, config.model.keeps_quantized) == ("V2", True)
    tables = 2 * 2 * config.model.vocab_size * config.model.hidden_size
    plain = resolved(tmp_path / "plain", "qwen3", device=ADA, dtype="bfloat16")
    weights, plain_weights = (weight_bytes(each.model, each.position, "bfloat16") - tables for each in (config, plain))
    assert weights == pytest.approx(plain_weights * bits / 16, rel=0.01)
    cpu = DeviceInfo(kind="cpu", index=0, name="a CPU", memory=80 << 30)
    config = resolved(tmp_path / "cpu", "qwen3", device=cpu, quantization_config=options)
    assert (config.decision.runner, config.model.keeps_quantized) == ("V1", False)
    assert any("V2 is the default for 4-bit weights on CUDA GPUs only" in reason for reason in config.decision.reasons)


@pytest.mark.parametrize("model_type", REASONS)
def test_forcing_v2_on_them_fails_with_these_reasons(model_type: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="V2 cannot run this") as caught:
        resolved(tmp_path, model_type, "1")
    for reason in REASONS[model_type]:
        assert reason in str(caught.value) or reason == "architecture: "


def test_any_listed_architecture_may_be_a_native_one(tmp_path: Path) -> None:
    names = ["LlamaForRewards", "LlamaForCausalLM"]
    assert resolved(tmp_path, "llama", architectures=names).model.architecture == "LlamaForCausalLM"


def test_transformers_layers_are_used_for_a_native_family_if_asked(tmp_path: Path) -> None:
    config = resolved(tmp_path, "llama", impl="transformers")
    assert (config.model.impl, config.decision.runner) == ("transformers", "V1")
    assert config.compat_fields["model_impl"] == "transformers", "peers with other layers are refused"


def test_native_layers_are_refused_where_there_are_none(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"'OPTForCausalLM'; native are LlamaForCausalLM, .*--model-impl"):
        resolved(tmp_path, "opt", impl="native")


@pytest.mark.parametrize(("model_type", "split"), [("gemma2", (2, 2)), ("olmoe", (1, 2))])
def test_a_model_of_transformers_is_split_by_the_librarys_plans(
    model_type: str, split: tuple[int, int], tmp_path: Path
) -> None:
    config = resolved(tmp_path, model_type, split=split)
    assert f"pp={split[0]}, tp={split[1]}: by transformers' plans for {model_type}" in config.choices
    assert [share.num_heads for share in config.shares] == [2 // split[1]] * (split[0] * split[1])


@pytest.mark.parametrize(
    ("model_type", "split", "reason"),
    [
        ("gpt2", (1, 2), "tp 2: transformers has no tensor-parallel plan for 'gpt2'; use 1"),
        ("gpt2", (2, 1), "pp 2: transformers has no pipeline-parallel plan for 'gpt2'; use 1"),
        ("olmoe", (2, 1), "pp 2: transformers has no pipeline-parallel plan for 'olmoe'; use 1"),
        ("mixtral", (1, 3), "tp 3 does not divide the model's attention heads, 4"),
    ],
)
def test_a_split_without_a_plan_or_of_heads_that_do_not_divide_is_refused(
    model_type: str, split: tuple[int, int], reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolved(tmp_path, model_type, split=split)
