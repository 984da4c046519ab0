"""Adapters in PEFT's format: each field and tensor is used or refused by name; garbage is a CheckpointError."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from lora_adapters import KINDS, LIMITS, adapter_tensors, load, make_adapter, write_adapter
from safetensors.torch import load_file, save_file

from pdserve.adapters.adapter import AdapterLimits
from pdserve.adapters.adapter_files import read_adapter
from pdserve.adapters.peft_config import PeftConfig, read_peft_config
from pdserve.errors import CheckpointError
from pdserve.model.model_config import load_model_config

Tensors = dict[str, torch.Tensor]
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "llama", "llama", num_hidden_layers=1)


def tensors_of(base: Path) -> Tensors:
    return adapter_tensors(base, r"[qv]_proj$", {"r": 8}, seed=0)


def test_patterns_and_rslora_give_each_module_its_rank_and_scaling(base: Path, tmp_path: Path) -> None:
    kind = "base_model.model.model.layers.0."
    modules = load(make_adapter(tmp_path / "patterns", base, "patterns"), base).modules
    assert {name.removeprefix("model.layers.0."): (m.rank, m.scaling) for name, m in modules.items()} == {
        "self_attn.k_proj": (20, 31 / 20),
        "mlp.down_proj": (17, 16 / 17),
        "mlp.gate_proj": (5, 16 / 5),
    }
    assert modules["model.layers.0.mlp.down_proj"].a == f"{kind}mlp.down_proj.lora_A.weight"
    some = load(make_adapter(tmp_path / "some", base, "some"), base)
    assert {module.scaling for module in some.modules.values()} == {16 / 3**0.5}
    assert some.rank == 3


def test_the_first_pattern_that_matches_the_end_of_a_name_counts() -> None:
    config = PeftConfig(
        rank=8, alpha=4.0, rank_pattern={"q_proj": 2, r"layers\.1\.self_attn\.q_proj": 16}, alpha_pattern={"o.*": 1.0}
    )
    assert config.rank_of("model.layers.1.self_attn.q_proj") == 2
    assert config.rank_of("model.layers.1.self_attn.zq_proj") == 8
    assert config.scaling_of("model.layers.1.self_attn.o_proj") == 1 / 8
    assert config.scaling_of("model.layers.1.self_attn.q_proj") == 4 / 2


def test_digest_depends_on_content_alone(base: Path, tmp_path: Path) -> None:
    tensors = tensors_of(base)
    digests = {
        "one": load(write_adapter(tmp_path / "one", tensors), base).digest,
        "other order": load(write_adapter(tmp_path / "two", dict(reversed(tensors.items()))), base).digest,
        "ignored field": load(write_adapter(tmp_path / "three", tensors, lora_dropout=0.1, revision="x"), base).digest,
        "alpha": load(write_adapter(tmp_path / "four", tensors, lora_alpha=17), base).digest,
        "dtype": load(write_adapter(tmp_path / "five", {n: t.bfloat16() for n, t in tensors.items()}), base).digest,
    }
    tensors[Q][0, 0] += 1
    digests["value"] = load(write_adapter(tmp_path / "six", tensors), base).digest
    assert digests["one"] == digests["other order"] == digests["ignored field"]
    assert len(set(digests.values())) == 4
    assert all(len(digest) == 64 for digest in digests.values())


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("peft_type", "LOHA"),
        ("use_dora", True),
        ("bias", "all"),
        ("lora_bias", True),
        ("alora_invocation_tokens", [1, 2]),
        ("use_qalora", True),
        ("use_bdlora", {"nblocks": 2}),
        ("layer_replication", [[0, 2]]),
        ("trainable_token_indices", [3]),
        ("modules_to_save", ["lm_head"]),
        ("target_parameters", ["mlp.experts.gate_up_proj"]),
        ("fan_in_fan_out", True),
        ("megatron_config", {"a": 1}),
        ("arrow_config", {"top_k": 3}),
        ("kasa_config", {"beta": 1e-4}),
        ("monteclora_config", {"num_samples": 8}),
        ("init_lora_weights", "pissa"),
        ("init_lora_weights", "pissa_niter_16"),
        ("init_lora_weights", "olora"),
        ("init_lora_weights", "corda"),
        ("init_lora_weights", "loftq"),
        ("init_lora_weights", "lora_ga"),
        ("init_lora_weights", "mica"),
        ("a_field_of_the_future", 1),
        ("r", 0),
        ("r", True),
        ("r", "8"),
        ("lora_alpha", "16"),
        ("lora_alpha", 1e9),
        ("use_rslora", "yes"),
        ("rank_pattern", [1]),
        ("rank_pattern", {"q_proj": -1}),
        ("rank_pattern", {"(a+)+b": 4}),
        ("rank_pattern", {"(": 4}),
        ("rank_pattern", {".*.*.*.*": 4}),
        ("target_modules", [1]),
        ("layers_to_transform", "all"),
    ],
)
def test_fields_that_are_not_implemented_are_refused_by_name_and_value(tmp_path: Path, field: str, value: Any) -> None:
    write_adapter(tmp_path, {Q: torch.zeros(8, 64)}, **{field: value})
    with pytest.raises(CheckpointError) as error:
        read_peft_config(tmp_path)
    assert field in str(error.value)
    assert (str(next(iter(value))) if isinstance(value, dict) else str(value)) in str(error.value)


def test_fields_of_peft_at_their_defaults_are_accepted(base: Path, tmp_path: Path) -> None:
    """The configuration is one that PEFT 0.21 writes."""
    fields: dict[str, Any] = {
        "alora_invocation_tokens": None,
        "alpha_pattern": {},
        "arrow_config": None,
        "auto_mapping": None,
        "base_model_name_or_path": "meta-llama/Llama-3.1-8B",
        "bias": "none",
        "corda_config": None,
        "ensure_weight_tying": False,
        "eva_config": None,
        "exclude_modules": None,
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "kasa_config": None,
        "layer_replication": None,
        "layers_pattern": None,
        "layers_to_transform": [0],
        "loftq_config": {},
        "lora_bias": False,
        "lora_dropout": 0.05,
        "lora_ga_config": None,
        "megatron_config": None,
        "megatron_core": "megatron.core",
        "modules_to_save": None,
        "monteclora_config": None,
        "peft_version": "0.21.2",
        "qalora_group_size": 16,
        "rank_pattern": {},
        "revision": None,
        "target_modules": ["q_proj", "v_proj"],
        "target_parameters": None,
        "task_type": "CAUSAL_LM",
        "trainable_token_indices": None,
        "use_bdlora": None,
        "use_dora": False,
        "use_qalora": False,
        "use_rslora": False,
        "velora_config": None,
    }
    assert len(load(write_adapter(tmp_path, tensors_of(base), **fields), base).modules) == 2


def renamed(old: str, new: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name.replace(old, new): tensor for name, tensor in tensors.items()}


def added(name: str, *shape: int) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {**tensors, name: torch.zeros(shape)}


P = "base_model.model.model.layers.0."
BROKEN: dict[str, tuple[Callable[[Tensors], Tensors], str]] = {
    "no prefix": (renamed("base_model.model.", ""), "does not begin with"),
    "another layer": (renamed("layers.0", "layers.7"), "has no such linear layer"),
    "experts": (renamed("self_attn.q_proj", "mlp.experts.base_layer"), "experts take no adapters"),
    "router": (renamed("self_attn.q_proj", "mlp.gate"), "router of experts"),
    "kv_b_proj": (renamed("self_attn.q_proj", "self_attn.kv_b_proj"), "kv_b_proj is absorbed"),
    "head": (renamed("model.layers.0.self_attn.q_proj", "lm_head"), "embedding and the head"),
    "vision": (renamed("model.layers.0.self_attn.q_proj", "model.visual.blocks.0.attn.q"), "vision tower"),
    "embedding": (added("base_model.model.model.embed_tokens.lora_embedding_A", 8, 128), "changes an embedding"),
    "copy of the base": (added("base_model.model.lm_head.base_layer.weight", 128, 64), "save_embedding_layers=False"),
    "saved module": (added("base_model.model.lm_head.weight", 128, 64), "modules_to_save is not served"),
    "magnitudes": (added(f"{P}self_attn.q_proj.lora_magnitude_vector", 64), "DoRA"),
    "bias": (added(f"{P}self_attn.q_proj.lora_B.bias", 64), "is a bias"),
    "A alone": (added(f"{P}self_attn.k_proj.lora_A.weight", 8, 64), "without lora_B.weight"),
    "B alone": (added(f"{P}self_attn.k_proj.lora_B.weight", 32, 8), "without lora_A.weight"),
    "another rank": (lambda tensors: {**tensors, Q: torch.zeros(4, 64)}, r"shape \(4, 64\)"),
    "another size": (lambda tensors: {**tensors, Q: torch.zeros(8, 65)}, r"ask for \(8, 64\)"),
    "dtype": (lambda tensors: {**tensors, Q: torch.zeros(8, 64, dtype=torch.float64)}, "dtype F64"),
    "none": (lambda tensors: {}, "no tensor of an adapter"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_tensors_that_are_not_used_are_refused_by_name(base: Path, tmp_path: Path, name: str) -> None:
    change, message = BROKEN[name]
    write_adapter(tmp_path, change(tensors_of(base)))
    with pytest.raises(CheckpointError, match=message) as error:
        load(tmp_path, base)
    assert str(tmp_path) in str(error.value)


def test_rank_above_the_limit_and_modules_beside_the_targets_are_refused(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path, tensors_of(base))
    with pytest.raises(CheckpointError, match=r"rank 8 .*limit is 4; raise --max-lora-rank"):
        load(tmp_path, base, AdapterLimits(1, 4, 1))
    write_adapter(tmp_path, tensors_of(base), target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match="leave out"):
        load(tmp_path, base)
    write_adapter(tmp_path, tensors_of(base), layers_to_transform=[1])
    with pytest.raises(CheckpointError, match="leave out"):
        load(tmp_path, base)
    (tmp_path / "adapter_model.safetensors").rename(tmp_path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="safe_serialization"):
        load(tmp_path, base)


def test_names_of_multimodal_bases_map_as_the_bases_tensors_do(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "qwen3_5_text")
    config = json.loads((base / "config.json").read_text())
    config["architectures"] = ["Qwen3_5ForConditionalGeneration"]  # a text part that was saved alone
    (base / "config.json").write_text(json.dumps(config))
    assert load_model_config(base).multimodal
    tensors = adapter_tensors(base, r"in_proj_qkv$|q_proj$", {"r": 8}, seed=0)
    of_text = load(write_adapter(tmp_path / "text", tensors), base)
    whole = renamed("base_model.model.model.layers", "base_model.model.model.language_model.layers")(tensors)
    of_whole = load(write_adapter(tmp_path / "whole", whole), base)
    assert of_whole.modules.keys() == of_text.modules.keys()
    write_adapter(tmp_path / "both", {**tensors, **whole})
    with pytest.raises(CheckpointError, match="twice"):
        load(tmp_path / "both", base)


@pytest.fixture(scope="module")
def whole_file(base: Path, tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory = write_adapter(tmp_path_factory.mktemp("adapter"), tensors_of(base))
    return (directory / "adapter_model.safetensors").read_bytes()


def check_refused(base: Path, directory: Path, config: bytes, weights: bytes) -> None:
    (directory / "adapter_config.json").write_bytes(config)
    (directory / "adapter_model.safetensors").write_bytes(weights)
    with pytest.raises(CheckpointError):
        load(directory, base)


VALID = b'{"peft_type": "LORA", "r": 8, "lora_alpha": 16}'


@given(st.data())
@examples(30)
def test_truncated_and_damaged_files_are_checkpoint_errors(
    base: Path, whole_file: bytes, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A header of another length, or cut anywhere, cannot describe the same file."""
    directory = tmp_path_factory.mktemp("damaged")
    (length,) = struct.unpack("<Q", whole_file[:8])
    match data.draw(st.sampled_from(["cut", "length", "header", "random", "config"])):
        case "cut":
            check_refused(base, directory, VALID, whole_file[: data.draw(st.integers(0, len(whole_file) - 1))])
        case "length":
            other = data.draw(st.integers(0, 2**64 - 1).filter(lambda value: value != length))
            check_refused(base, directory, VALID, struct.pack("<Q", other) + whole_file[8:])
        case "header":
            at = data.draw(st.integers(8, 8 + length - 1))
            check_refused(base, directory, VALID, whole_file[:at] + b"\xff" + whole_file[at + 1 :])
        case "random":
            check_refused(base, directory, VALID, data.draw(st.binary(max_size=200)))
        case "config":
            check_refused(base, directory, data.draw(st.binary(max_size=200)), whole_file)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@given(st.sampled_from([*json.loads(VALID), "rank_pattern", "alpha_pattern", "target_modules"]), _JSON)
@examples(25)
def test_any_value_of_a_field_is_read_or_a_checkpoint_error(
    base: Path, whole_file: bytes, tmp_path_factory: pytest.TempPathFactory, field: str, value: Any
) -> None:
    directory = tmp_path_factory.mktemp("field")
    (directory / "adapter_config.json").write_text(json.dumps(json.loads(VALID) | {field: value}))
    (directory / "adapter_model.safetensors").write_bytes(whole_file)
    try:
        adapter = load(directory, base)
    except CheckpointError:
        return
    assert len(adapter.modules) == 2


def test_models_of_the_library_are_refused(base: Path, tmp_path: Path) -> None:
    write_adapter(tmp_path, tensors_of(base))
    with pytest.raises(CheckpointError, match="runs through transformers"):
        read_adapter(tmp_path, load_model_config(base, "transformers"), LIMITS)


def test_a_file_that_is_rewritten_has_another_digest(base: Path, tmp_path: Path) -> None:
    before = load(make_adapter(tmp_path, base, "all"), base)
    path = tmp_path / "adapter_model.safetensors"
    tensors = load_file(path)
    save_file({name: -tensor for name, tensor in tensors.items()}, path)
    after = load(tmp_path, base)
    assert after.modules == before.modules
    assert after.digest != before.digest
    assert KINDS["all"][1]["r"] == before.rank
