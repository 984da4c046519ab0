"""EAGLE-3 heads in their published forms are loaded; what is missing or odd in one is refused by its name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, make_eagle3, node_config
from drafted_node import WatchedNode, run
from safetensors.torch import load_file, save_file

from pdserve.errors import CheckpointError, ConfigError
from pdserve.model.eagle3 import Eagle3Config
from pdserve.sampling_params import SamplingParams
from runner.loading.checkpoint_check import check_tensors

Tensors = dict[str, torch.Tensor]
_FLAGS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("target"), "llama")


@pytest.fixture
def head(target: Path, tmp_path: Path) -> Path:
    return make_eagle3(tmp_path / "head", target)


def rewrite(head: Path, change: Callable[[dict[str, Any], Tensors], object]) -> None:
    """Change config.json and tensors of a head in place."""
    config = json.loads((head / "config.json").read_text())
    tensors = load_file(head / "model.safetensors")
    change(config, tensors)
    (head / "config.json").write_text(json.dumps(config))
    save_file(tensors, head / "model.safetensors")


def as_speculators(config: dict[str, Any], tensors: Tensors) -> None:
    """Write the form of the Speculators library, whose layer ids count hidden states from the embedding on."""
    ids = [layer + 1 for layer in config.pop("eagle_config")["eagle_aux_hidden_state_layer_ids"]]
    flags = {name: config.pop(name, False) for name in _FLAGS}
    layer = {name: config.pop(name) for name in list(config) if name not in ("architectures", "draft_vocab_size")}
    config |= {"architectures": ["Eagle3Speculator"], "eagle_aux_hidden_state_layer_ids": ids, **flags}
    config["transformer_layer_config"] = layer
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def with_own_embedding(config: dict[str, Any], tensors: Tensors, target: Path) -> None:
    """Write the form of a model behind "model.", which brings the embedding along."""
    tensors["embed_tokens.weight"] = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    for name in [name for name in tensors if name not in ("d2t", "t2d", "lm_head.weight")]:
        tensors[f"model.{name}"] = tensors.pop(name)


def drafts_of(target: Path, head: Path) -> list[Any]:
    node = WatchedNode(node_config(target, draft_head=head), 2)
    run(node, [(list(range(3, 20)), SamplingParams(8, temperature=0.0, ignore_eos=True))])
    return node.made


def test_each_published_form_makes_the_same_drafts(target: Path, head: Path) -> None:
    expected = drafts_of(target, head)
    rewrite(head, lambda config, tensors: with_own_embedding(config, tensors, target))
    assert drafts_of(target, head) == expected
    rewrite(head, as_speculators)
    assert drafts_of(target, head) == expected
    assert len({drafts for _, drafts in expected}) > 1


def test_doctor_counts_the_tensors_of_the_head(target: Path, head: Path) -> None:
    tensors = load_file(head / "model.safetensors").keys() - {"t2d"}
    with_head, without = (check_tensors(node_config(target, draft_head=draft_head)) for draft_head in (head, None))
    assert (with_head, without) == (len(tensors) + (without or 0), without)


def test_layers_are_those_that_config_names(target: Path, head: Path) -> None:
    def layers(**fields: Any) -> tuple[int, ...]:
        rewrite(head, lambda config, tensors: config.update(fields))
        draft_head = node_config(target, draft_head=head).model.draft_head
        assert isinstance(draft_head, Eagle3Config)
        return draft_head.layers

    assert layers() == (1, 2)
    assert layers(eagle_aux_hidden_state_layer_ids=[0, 3]) == (0, 3)
    with pytest.raises(
        CheckpointError, match=r"layer_ids = \[2, 1, 0\]; ids must ascend within 0 … 3, as the model has 3"
    ):
        layers(eagle_aux_hidden_state_layer_ids=None, eagle_config=None)  # 2, n / 2, n - 3


ODD_TENSORS: dict[str, tuple[Callable[[Tensors], object], str]] = {
    "missing": (lambda tensors: tensors.pop("fc.weight"), r"lacks the tensors fc\.weight"),
    "missing d2t": (lambda tensors: tensors.pop("d2t"), r"draft_vocab_size 64 of 128 tokens, .* no tensor d2t"),
    "further": (
        lambda tensors: tensors.update({"midlayer.self_attn.q_norm.weight": torch.ones(16)}),
        r"tensor midlayer\.self_attn\.q_norm\.weight has no place",
    ),
    "shape": (
        lambda tensors: tensors.update({"midlayer.self_attn.q_proj.weight": torch.zeros(64, 64)}),
        r"tensor midlayer\.self_attn\.q_proj\.weight has shape \(64, 64\), config\.json asks for \(64, 128\)",
    ),
    "dtype": (
        lambda tensors: tensors.update({"lm_head.weight": tensors["lm_head.weight"].to(torch.int8)}),
        r"tensor lm_head\.weight has dtype I8",
    ),
}


@pytest.mark.parametrize("case", ODD_TENSORS)
def test_odd_tensors_are_refused_by_name(case: str, target: Path, head: Path) -> None:
    change, message = ODD_TENSORS[case]
    rewrite(head, lambda config, tensors: change(tensors))
    with pytest.raises(CheckpointError, match=message):
        check_tensors(node_config(target, draft_head=head))


def test_tokens_beyond_the_vocabulary_are_refused(target: Path, head: Path) -> None:
    rewrite(head, lambda config, tensors: tensors["d2t"].add_(60))
    with pytest.raises(CheckpointError, match=r"tensor d2t names tokens \d+ … 1\d\d, the model has 128"):
        drafts_of(target, head)


ODD_FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "another kind": (
        {"architectures": ["LlamaForCausalLM"]},
        r"architectures = \['LlamaForCausalLM'\]; an EAGLE-3 head",
    ),
    "EAGLE-1": ({"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
    "another model": ({"num_key_value_heads": 4}, "num_key_value_heads 4, here it must be 2"),
    "another size": ({"head_dim": 32}, "head_dim 32, here it must be 16"),
    "several layers": ({"num_hidden_layers": 2}, "num_hidden_layers 2, here it must be 1"),
    "another target": ({"target_hidden_size": 128}, "target_hidden_size 128, here it must be 64"),
    "narrower": ({"hidden_size": 32}, r"hidden_size 32, and its checkpoint no embed_tokens\.weight"),
    "quantized": ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config"),
    "more tokens": ({"draft_vocab_size": 200}, "draft_vocab_size 200, more than the model's vocab_size 128"),
    "window": ({"layer_types": ["sliding_attention"]}, "a layer with a sliding window"),
    "flag": ({"norm_before_residual": 1}, "norm_before_residual = 1; it must be true or false"),
}


@pytest.mark.parametrize("case", ODD_FIELDS)
def test_odd_fields_are_refused_by_name(case: str, target: Path, head: Path) -> None:
    fields, message = ODD_FIELDS[case]
    rewrite(head, lambda config, tensors: config.update(fields))
    with pytest.raises((CheckpointError, ConfigError), match=message):
        node_config(target, draft_head=head)
