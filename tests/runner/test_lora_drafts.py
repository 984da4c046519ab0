"""Adapters beside drafts, and around quantized weights, have the tokens of a node without drafts and quantization."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import add_mtp, add_predictor, make_checkpoint, node_config
from drafted_node import Answers, DraftedNode, Request, run
from lora_adapters import KINDS, LIMITS, load, make_adapter, with_adapters
from quantized_checkpoints import quantize
from safetensors.torch import load_file, save_file
from stepper import Running, Stepper

import runner
from engine.speculation.draft_source import DraftSource, ModelDrafts
from engine.speculation.prompt_lookup import PromptLookup
from pdserve.adapters.adapter import NO_ADAPTER, NO_ADAPTER_SLOT, Adapter, AdapterLimits, AdapterSlot
from pdserve.sampling_params import SamplingParams
from runner.models.quantization.fp8 import E4M3

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # on a CPU Triton's interpreter runs V2's kernels
TRITON: dict[str, Any] = {"runner": "V2", "attention_backend": "triton", "device": DEVICE, "num_blocks": 16}
SCORED = SamplingParams(1, temperature=0.0, logprobs=3)
TWO_KINDS: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
SOURCES: dict[str, type[DraftSource]] = {"lookup": PromptLookup, "mtp": ModelDrafts}


def adapters_of(model: Path, folder: Path) -> list[Adapter]:
    return [load(make_adapter(folder / kind, model, kind, seed), model) for seed, kind in enumerate(KINDS)]


def requests_of(adapters: Sequence[Adapter], num_tokens: int) -> list[Request]:
    """Return requests of the base and of each adapter. A bias makes answers repeat tokens of the prompts."""
    numbers = random.Random(5)
    prompts = [[5, 6, 7, 8, 9, 10] * 4, numbers.choices(range(3, 128), k=21)]
    few = dict.fromkeys((5, 6, 7, 8), 3.0)
    return [
        (
            prompt,
            SamplingParams(
                num_tokens, temperature=temperature, seed=3, ignore_eos=True, logit_bias=few, logprobs=2, adapter=digest
            ),
        )
        for digest in (NO_ADAPTER, *(adapter.digest for adapter in adapters))
        for prompt, temperature in zip(prompts, (0.0, 0.6), strict=True)
    ]


def answers(
    model: Path, adapters: Sequence[Adapter], num_tokens: int, source: str = "", slots: int = 2, **options: Any
) -> tuple[Answers, DraftedNode]:
    limits = AdapterLimits(slots, LIMITS.max_lora_rank, LIMITS.max_cpu_loras)
    config = with_adapters(node_config(model, draft_layers=int(source == "mtp"), **options), limits)
    node = DraftedNode(config, 3, SOURCES[source]) if source else DraftedNode(config)
    for adapter in adapters:
        node.load(adapter)
    answered = run(node, requests_of(adapters, num_tokens))
    assert not node.num_refused
    return answered, node


def check_drafts(model: Path, folder: Path, source: str, num_tokens: int, **options: Any) -> None:
    """Compare answers with drafts, in fewer slots than adapters, with those without."""
    adapters = adapters_of(model, folder)
    expected, _ = answers(model, adapters, num_tokens, slots=len(adapters))
    actual, node = answers(model, adapters, num_tokens, source, **options)
    assert actual.keys() == expected.keys()
    for key, answer in expected.items():
        ours = actual[key]
        assert (ours.token_ids, ours.finish) == (answer.token_ids, answer.finish), f"request and choice {key}"
        for a, b in zip(ours.logprobs, answer.logprobs, strict=True):
            assert a is not None
            assert b is not None
            assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=1e-4)
    assert node.num_drafts > 0
    assert node.num_accepted > 0 or source == "mtp"
    with_adapters_too = {tuple(answer.token_ids) for answer in expected.values()}
    assert len(with_adapters_too) > len(adapters), "adapters change nothing"


def test_answers_of_adapters_with_drafts_are_those_without(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=2)
    check_drafts(model, tmp_path / "adapters", "lookup", 16)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize(("family", "sizes"), [("deepseek_v3", {"num_hidden_layers": 2}), ("qwen3_5_text", TWO_KINDS)])
def test_answers_of_adapters_with_the_models_own_drafts_are_those_without(
    tmp_path: Path, family: str, sizes: dict[str, Any], version: str
) -> None:
    """Layers that make drafts have no adapters, so many drafts are wrong."""
    model = make_checkpoint(tmp_path / "base", family, **sizes)
    if family == "deepseek_v3":
        add_predictor(model, family, **sizes)
    else:
        add_mtp(model, family, **sizes)
    options = {} if version == "V1" else TRITON | {"num_blocks": 128}
    check_drafts(model, tmp_path / "adapters", "mtp", 8, **options)


@pytest.mark.slow
def test_answers_of_adapters_with_drafts_are_those_without_on_v2(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "qwen3", num_hidden_layers=2)
    check_drafts(model, tmp_path / "adapters", "lookup", 8, **TRITON | {"num_blocks": 128})


def scored(model: Path, adapters: Sequence[Adapter], num_tokens: int, **options: Any) -> tuple[list[Running], Any]:
    model_runner: Any = runner.build(with_adapters(node_config(model, **options)), lambda stage, fraction: None)
    stepper = Stepper(model_runner)
    for slot, adapter in enumerate(adapters):
        model_runner.load_adapter(adapter)
        stepper.filling.append(AdapterSlot(slot, adapter.digest))
    prompts = [random.Random(seed).choices(range(3, 128), k=length) for seed, length in enumerate((9, 5))]
    slots = (0, NO_ADAPTER_SLOT)
    return stepper.generate(prompts, num_tokens, SCORED, adapter_slots=slots), model_runner


def check_scored(actual: Sequence[Running], expected: Sequence[Running]) -> None:
    """Bound log-probabilities by 2e-4.

    Kernels multiply the stored numbers and then the scales in float32, so sums differ by their order alone.
    """
    for ours, theirs in zip(actual, expected, strict=True):
        assert ours.output == theirs.output
        for a, b in zip(ours.samples, theirs.samples, strict=True):
            assert a.logprobs is not None
            assert b.logprobs is not None
            assert a.logprobs.top_logprobs == pytest.approx(b.logprobs.top_logprobs, abs=2e-4)


def dequantized(model: Path) -> None:
    """Replace all linear weights with the numbers that FP8 at load makes of them; these do not change any more."""
    for path in model.glob("*.safetensors"):
        tensors = load_file(path)
        for name in filter(lambda name: name.endswith("_proj.weight"), tensors):
            scales = tensors[name].float().abs().amax(1, keepdim=True) / 448
            tensors[name] = (tensors[name].float() / scales).to(E4M3).float() * scales
        save_file(tensors, path)


FORMATS = ("fp8 blocks", "compressed fp8 rows", "awq 32", "gptq 32", "nvfp4", "compressed mxfp4")
SIZES: dict[str, Any] = {"num_hidden_layers": 1, "hidden_size": 192, "intermediate_size": 320}


def test_an_adapter_around_weights_quantized_at_load_adds_what_it_adds_to_their_numbers(tmp_path: Path) -> None:
    model = make_checkpoint(tmp_path / "base", "qwen3", **SIZES)
    dequantized(model)
    adapter = load(make_adapter(tmp_path / "all", model, "all"), model)
    actual, quantized = scored(model, [adapter], 2, quantization="fp8", **TRITON)
    assert quantized._model.decoder.layers[0].attention._qkv._linear._base.weight.dtype == E4M3
    expected, _ = scored(model, [adapter], 2)
    check_scored(actual, expected)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize(
    "name", ["fp8 blocks", "compressed fp8 rows", "awq 32", "gptq 32", "nvfp4", "compressed mxfp4"]
)
def test_an_adapter_around_quantized_weights_adds_what_it_adds_to_their_numbers(
    tmp_path: Path, name: str, version: str
) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3", **SIZES)
    stored = quantize(plain, tmp_path / "quantized", name)
    folder = make_adapter(tmp_path / "all", plain, "all")
    actual, _ = scored(stored, [load(folder, stored)], 3, **(TRITON if version == "V2" else {}))
    expected, _ = scored(plain, [load(folder, plain)], 3)
    check_scored(actual, expected)
