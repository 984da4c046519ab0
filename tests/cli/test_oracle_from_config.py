"""The oracle's answer and its reasons, from a checkpoint's config.json."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from any_models import small_config

from pdserve.config.attention_backends import Platform
from pdserve.config.node_config import DeviceInfo, NodeConfig, NodeOptions
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.errors import CheckpointError, ConfigError

GPU = DeviceInfo(kind="cuda", index=0, name="a GPU", memory=80 << 30)
PLATFORM = Platform(device="cuda", has_triton=True, has_flashinfer=True)

NATIVE = ["llama", "mistral", "qwen3"]
REASONS = {
    "opt": ["architecture: ", "model implementation: V2 runs native layers; OPTForCausalLM runs through transformers"],
    "gemma": ["architecture: ", "model implementation: V2 runs native layers; GemmaForCausalLM"],
    "mixtral": ["model implementation: ", "mixture of experts: V2 runs dense models; this one has 4 experts"],
    "qwen3_moe": ["model implementation: ", "mixture of experts: V2 runs dense models; this one has 4 experts"],
}


def resolved(
    path: Path, model_type: str, variable: str | None = None, impl: str = "auto", **fields: object
) -> NodeConfig:
    config = small_config(model_type, head_dim=64)
    config.architectures = [type_name(model_type)]
    config.save_pretrained(path)
    values = json.loads((path / "config.json").read_text()) | {"dtype": "bfloat16"} | fields
    (path / "config.json").write_text(json.dumps(values))
    options = NodeOptions(model=str(path), load_format="dummy", max_model_len=64, model_impl=impl)
    return resolve(options, GPU, {} if variable is None else {VARIABLE: variable}, PLATFORM)


def type_name(model_type: str) -> str:
    import transformers

    mapping = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return str(mapping[model_type])


@pytest.mark.parametrize("model_type", NATIVE)
def test_dense_native_families_run_on_v2(model_type: str, tmp_path: Path) -> None:
    config = resolved(tmp_path, model_type)
    assert (config.model.impl, config.decision.runner) == ("native", "V2")
    assert config.choices[0] == "model_impl=native: its architecture has native layers"


@pytest.mark.parametrize("model_type", REASONS)
def test_other_architectures_run_on_v1_for_named_reasons(model_type: str, tmp_path: Path) -> None:
    config = resolved(tmp_path, model_type)
    assert (config.model.impl, config.decision.runner, config.attention_backend) == ("transformers", "V1", "torch")
    assert config.choices[0] == "model_impl=transformers: its architecture has no native layers"
    for reason in REASONS[model_type]:
        assert any(found.startswith(reason) for found in config.decision.reasons)


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


def test_several_ranks_are_refused_for_transformers_layers(tmp_path: Path) -> None:
    resolved(tmp_path, "opt")
    options = NodeOptions(model=str(tmp_path), load_format="dummy", tp=2)
    with pytest.raises(ConfigError, match="pp 1 and tp 2: OPTForCausalLM runs through transformers"):
        resolve(options, GPU, {}, PLATFORM)
