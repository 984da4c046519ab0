"""A batch of base and adapters samples, for each request, the tokens of a checkpoint with its adapter merged."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import GEMMA4_SIZES, make_checkpoint, node_config
from lora_adapters import KINDS, LIMITS, adapter_tensors, load, make_adapter, merge, with_adapters, write_adapter
from ranks import Answer, Case, answer_of, answers_of_ranks
from stepper import Running, Stepper

import runner
from pdserve.adapters.adapter import NO_ADAPTER_SLOT, Adapter, AdapterSlot
from pdserve.adapters.base_layers import base_layers
from pdserve.config.memory_fit import slots_memory
from pdserve.errors import CheckpointError, ConfigError
from pdserve.protocols import ModelRunner
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BACKENDS = {"V1": ("torch", "cpu"), "V2": ("triton", DEVICE)}
SCORED = SamplingParams(1, temperature=0.0, logprobs=3)
LENGTHS = (5, 37, 1, 20)  # tokens of prompts: with each adapter, and the base
SLOTS = (0, 1, 2, NO_ADAPTER_SLOT)
TWO_KINDS: dict[str, Any] = {"num_hidden_layers": 4, "layer_types": ["linear_attention", "full_attention"] * 2}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {"attention_bias": True, "num_hidden_layers": 1}),
    "qwen3": ("qwen3", {"num_hidden_layers": 2}),
    "qwen3-moe": ("qwen3_moe", {"num_hidden_layers": 2}),
    "qwen3.5": ("qwen3_5_text", {"linear_num_key_heads": 4} | TWO_KINDS),
    "qwen3-next": ("qwen3_next", {"linear_num_key_heads": 4, "linear_num_value_heads": 8} | TWO_KINDS),
    "deepseek-v2": ("deepseek_v2", {"q_lora_rank": None, "num_hidden_layers": 2}),
    "deepseek-v3": ("deepseek_v3", {"num_hidden_layers": 2}),
    "glm4-moe": ("glm4_moe", {"num_hidden_layers": 2}),
    "gemma4": ("gemma4_text", GEMMA4_SIZES["E2B"]),
}
FEW = [("llama", "V1"), ("llama", "V2"), ("qwen3.5", "V1"), ("deepseek-v3", "V1"), ("qwen3-moe", "V1")]


def prompts_of(lengths: Sequence[int], seed: int = 3) -> tuple[tuple[int, ...], ...]:
    numbers = random.Random(seed)
    return tuple(tuple(numbers.randrange(3, 128) for _ in range(length)) for length in lengths)


def build(directory: Path, version: str = "V1", adapters: bool = True, **options: Any) -> ModelRunner:
    backend, device = BACKENDS[version]
    config = node_config(directory, runner=version, attention_backend=backend, device=device, max_num_seqs=8, **options)
    return runner.build(with_adapters(config) if adapters else config, lambda stage, fraction: None)


def adapters_of(directory: Path, folder: Path) -> list[Path]:
    return [make_adapter(folder / kind, directory, kind, seed) for seed, kind in enumerate(KINDS)]


def filled(model_runner: ModelRunner, adapters: Sequence[Adapter]) -> Stepper:
    """Return an engine whose first step fills the slots with adapters."""
    stepper = Stepper(model_runner)
    for slot, adapter in enumerate(adapters):
        model_runner.load_adapter(adapter)
        stepper.filling.append(AdapterSlot(slot, adapter.digest))
    return stepper


def check_equal(actual: Running, expected: Running) -> None:
    assert actual.output == expected.output
    for ours, theirs in zip(actual.samples, expected.samples, strict=True):
        assert ours.logprobs is not None
        assert theirs.logprobs is not None
        assert ours.logprobs.top_ids == theirs.logprobs.top_ids
        assert ours.logprobs.top_logprobs == pytest.approx(theirs.logprobs.top_logprobs, abs=2e-4)


def check_model(name: str, version: str, folder: Path, num_tokens: int = 5) -> None:
    """Compare one batch of base and adapters with the merged checkpoints, which the same runner runs alone."""
    family, sizes = MODELS[name]
    directory = make_checkpoint(folder / "base", family, **sizes)
    folders = adapters_of(directory, folder / "adapters")
    prompts = prompts_of(LENGTHS)
    stepper = filled(build(directory, version), [load(path, directory) for path in folders])
    actual = stepper.generate(prompts, num_tokens, SCORED, chunk=18, stagger=1, adapter_slots=SLOTS)
    merged = [merge(directory, path, folder / f"merged-{path.name}") for path in folders]
    outputs = []
    for prompt, result, checkpoint in zip(prompts, actual, [*merged, directory], strict=True):
        (expected,) = Stepper(build(checkpoint, "V1", adapters=False)).generate([prompt], num_tokens, SCORED)
        check_equal(result, expected)
        outputs.append(expected)
    base = Stepper(build(directory, "V1", adapters=False)).generate(prompts, num_tokens, SCORED)
    for with_adapter, without in zip(outputs[:-1], base, strict=False):
        ours = with_adapter.samples[-1].logprobs
        theirs = without.samples[-1].logprobs
        assert ours is not None
        assert theirs is not None
        assert abs(ours.top_logprobs[0] - theirs.top_logprobs[0]) > 1e-3, "the adapter changes nothing"


@pytest.mark.parametrize(("name", "version"), FEW)
def test_a_batch_of_base_and_adapters_samples_as_merged_checkpoints(tmp_path: Path, name: str, version: str) -> None:
    check_model(name, version, tmp_path, num_tokens=5 if version == "V1" else 2)


@pytest.mark.slow
@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize("name", MODELS)
def test_every_model_with_adapters_samples_as_merged_checkpoints(tmp_path: Path, name: str, version: str) -> None:
    check_model(name, version, tmp_path)


@pytest.mark.parametrize("name", MODELS)
def test_sizes_of_layers_and_memory_of_slots_are_those_of_the_runner(tmp_path: Path, name: str) -> None:
    family, sizes = MODELS[name]
    directory = make_checkpoint(tmp_path, family, **sizes)
    config = with_adapters(node_config(directory))
    model_runner: Any = runner.build(config, lambda stage, fraction: None)
    places = model_runner._model.weights.adapter_places()
    expected = {name: (layer.out_features, layer.in_features) for name, layer in base_layers(config.model).items()}
    assert {name: place.full_shape for name, place in places.items()} == expected
    assert model_runner._model.adapter_slots.num_bytes == slots_memory(config)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("llama") / "base", "llama", num_hidden_layers=1)


@pytest.mark.parametrize("version", ["V1", pytest.param("V2", marks=pytest.mark.slow)])
def test_nothing_of_an_adapter_stays_in_a_slot_that_another_takes(llama: Path, tmp_path: Path, version: str) -> None:
    """The second adapter has a smaller rank, and fewer modules."""
    first = load(make_adapter(tmp_path / "all", llama, "all"), llama)
    tensors = adapter_tensors(llama, r"layers\.0\.self_attn\.k_proj$", {"r": 2}, seed=9)
    second = load(write_adapter(tmp_path / "small", tensors, r=2), llama)
    prompts = prompts_of((9, 4))
    reused = filled(build(llama, version), [first])
    reused.generate(prompts, 2, adapter_slots=(0, 0))
    reused.runner.load_adapter(second)
    reused.filling.append(AdapterSlot(0, second.digest))
    fresh = filled(build(llama, version), [second])
    for actual, expected in zip(
        reused.generate(prompts, 2, SCORED, adapter_slots=(0, 0)),
        fresh.generate(prompts, 2, SCORED, adapter_slots=(0, 0)),
        strict=True,
    ):
        assert actual.samples == expected.samples


@pytest.mark.parametrize("version", ["V1", pytest.param("V2", marks=pytest.mark.slow)])
def test_base_requests_beside_adapters_have_the_bits_of_a_node_without(
    llama: Path, tmp_path: Path, version: str
) -> None:
    adapter = load(make_adapter(tmp_path / "all", llama, "all"), llama)
    prompts = prompts_of((7, 12, 3))
    without = Stepper(build(llama, version, adapters=False)).generate(prompts, 2, SCORED)
    stepper = filled(build(llama, version), [adapter])
    beside = stepper.generate(prompts, 2, SCORED, adapter_slots=(NO_ADAPTER_SLOT, 0, NO_ADAPTER_SLOT))
    assert [beside[0].samples, beside[2].samples] == [without[0].samples, without[2].samples]
    assert beside[1].samples != without[1].samples
    alone = stepper.generate(prompts, 2, SCORED)
    assert [one.samples for one in alone] == [one.samples for one in without]


def test_weights_of_the_base_change_beneath_adapters(llama: Path, tmp_path: Path) -> None:
    """A reload leaves slots and host copies as they are."""
    other = make_checkpoint(tmp_path / "other", "llama", num_hidden_layers=1, initializer_range=0.05)
    folder = make_adapter(tmp_path / "all", llama, "all")
    stepper = filled(build(llama), [load(folder, llama)])
    prompts = prompts_of((8,))
    stepper.generate(prompts, 2, adapter_slots=(0,))
    stepper.runner.change_weights(WeightChange(model_dir=str(other)))
    (actual,) = stepper.generate(prompts, 3, SCORED, adapter_slots=(0,))
    merged = merge(other, folder, tmp_path / "merged")
    (expected,) = Stepper(build(merged, adapters=False)).generate(prompts, 3, SCORED)
    check_equal(actual, expected)


def test_files_that_changed_since_they_were_read_are_refused(llama: Path, tmp_path: Path) -> None:
    adapter = load(make_adapter(tmp_path / "one", llama, "some", seed=1), llama)
    make_adapter(tmp_path / "one", llama, "some", seed=2)
    model_runner = build(llama)
    with pytest.raises(CheckpointError, match="has changed since"):
        model_runner.load_adapter(adapter)
    again = load(tmp_path / "one", llama)
    assert again.digest != adapter.digest
    model_runner.load_adapter(again)
    model_runner.drop_adapter(again.digest)
    model_runner.drop_adapter(again.digest)


def test_values_that_are_not_finite_are_refused(llama: Path, tmp_path: Path) -> None:
    wanted, config = KINDS["some"]
    tensors = adapter_tensors(llama, wanted, config, seed=0)
    name = next(name for name in tensors if name.endswith("lora_B.weight"))
    tensors[name][1, 1] = float("nan")
    adapter = load(write_adapter(tmp_path / "nan", tensors, **config), llama)
    with pytest.raises(CheckpointError, match="not finite"):
        build(llama).load_adapter(adapter)


def test_nodes_without_adapters_and_models_of_the_library_refuse_them(llama: Path, tmp_path: Path) -> None:
    adapter = load(make_adapter(tmp_path / "one", llama, "some"), llama)
    with pytest.raises(CheckpointError, match="takes no adapters"):
        build(llama, adapters=False).load_adapter(adapter)
    with pytest.raises(ConfigError, match="runs through transformers"):
        build(llama, impl="transformers")


def case_of(directory: Path, adapters: Sequence[Adapter], tp: int, pp: int, version: str) -> Case:
    config = node_config(
        directory, tp=tp, pp=pp, runner=version, attention_backend=BACKENDS[version][0], max_num_seqs=8
    )
    prompts = prompts_of(LENGTHS)
    num_tokens = 4 if version == "V1" else 2
    return Case(
        with_adapters(config, LIMITS),
        prompts,
        (SCORED,),
        num_tokens,
        chunk=18,
        adapters=tuple(adapters),
        adapter_slots=SLOTS,
    )


def check_ranks(cases: list[tuple[str, str]], tp: int, pp: int, folder: Path) -> None:
    """Compare ranks with one rank."""
    both = []
    for name, version in cases:
        family, sizes = MODELS[name]
        directory = make_checkpoint(folder / name / version, family, **sizes)
        adapters = [load(path, directory) for path in adapters_of(directory, folder / f"{name}-{version}-adapters")]
        both.append((case_of(directory, adapters, tp, pp, version), case_of(directory, adapters, 1, 1, version)))
    answers = answers_of_ranks([split for split, _ in both], tp * pp)
    for ranks, (_, whole) in zip(answers, both, strict=True):
        expected = answer_of(whole)
        for actual in ranks[-tp:]:  # earlier stages sample nothing
            check_answers(actual, expected)


def check_answers(actual: Answer, expected: Answer) -> None:
    assert [one.tokens for one in actual.outcomes] == [one.tokens for one in expected.outcomes]
    for ours, theirs in zip(actual.outcomes, expected.outcomes, strict=True):
        for a, b in zip(ours.logprobs, theirs.logprobs, strict=True):
            assert a is not None
            assert b is not None
            assert a.top_logprobs == pytest.approx(b.top_logprobs, abs=2e-4)


def test_two_tensor_shards_sample_with_adapters_as_one(tmp_path: Path) -> None:
    check_ranks([("qwen3.5", "V1")], tp=2, pp=1, folder=tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("version", ["V1", "V2"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2), (4, 1)])
def test_ranks_of_every_model_sample_with_adapters_as_one(tmp_path: Path, version: str, tp: int, pp: int) -> None:
    """With four shards, two hold each KV head."""
    names = [name for name in MODELS if pp == 1 or name not in ("gemma4", "llama")]
    check_ranks([(name, version) for name in names], tp, pp, tmp_path)
