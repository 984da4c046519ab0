"""Checkpoints with 4-bit weights: the numbers that their tools meant, in layers that keep them, on V2 as on V1."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from checkpoints import make_checkpoint, node_config, reference_greedy, reference_model
from fast_set import sampled
from published_checkpoints import FORMS
from quantized_checkpoints import FORMATS, FOUR_BITS, quantize
from ranks import Case, answers_of_ranks
from safetensors.torch import load_file, save_file
from stepper import Stepper
from torch import Tensor
from weight_patches import write_patch

import runner
from pdserve.config.parallel import ParallelConfig, weight_bytes
from pdserve.config.resolution.quantized_layers import keep_layers
from pdserve.config.resolve import stored_weights
from pdserve.errors import CheckpointError
from pdserve.model.model_config import ModelConfig, load_model_config
from pdserve.model.quantization.at_load import AT_LOAD
from pdserve.model.quantization.kept_weights import is_linear
from pdserve.model.rope import RopeConfig
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange
from runner.kernels.four_bits.stack import FourBitForm
from runner.kernels.four_bits.weights import FourBitExperts
from runner.kernels.reference import silu_and_mul
from runner.loading.weights import OpenWeights, fill_shard, open_weights
from runner.models.layers.weight_shard import ShardRange, WeightGroup, WeightShard
from runner.models.quantization import ExpertsShard, GatedActivation
from runner.models.quantization.four_bit_experts import FourBitExpertsMethod
from runner.models.quantization.four_bits import FourBitLinearMethod
from runner.models.quantization.four_bits_at_load import LastWeight, four_bits_at_load
from runner.placement import TensorPlacement

CPU = torch.device("cpu")
PLAIN = TensorPlacement(CPU, torch.float32, torch.float32)
PROMPT = list(range(5, 40))
INPUTS = 192
PREFIX = "model.layers.0.mlp"


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def model_of(directory: Path, name: str) -> ModelConfig:
    """Return a config of which only the quantization counts, with the forms of the stored weights."""
    options = {**FORMATS, **FOUR_BITS}[name].config
    rope = RopeConfig(theta=1e4)
    model = ModelConfig(
        *("X", 1, 1, 1, 1, 1, 1, 1, 1e-6, rope, 1, "float32"),
        weight_format=options["quant_method"],
        quantization=options,
    )
    kept = keep_layers(model, ParallelConfig((1,)), stored_weights(model, directory))
    return msgspec.structs.replace(model, layer_forms=kept.forms)


def store(directory: Path, name: str, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Write the quantized weights, and return what their tool takes them for."""
    directory.mkdir(exist_ok=True)
    stored: dict[str, Tensor] = {}
    expected = {}
    for module, weight in weights.items():
        tensors, expected[module] = FOUR_BITS[name].quantize(f"{PREFIX}.{module}", weight)
        stored |= {key: tensor.contiguous() for key, tensor in tensors.items()}
    save_file(stored, directory / "model.safetensors")
    return expected


def filler(directory: Path, weights: OpenWeights, prefix: str) -> Callable[[Mapping[str, WeightShard]], None]:
    def fill(shards: Mapping[str, WeightShard]) -> None:
        for name, shard in shards.items():
            source = weights[f"{prefix}.{name}"]
            assert tuple(source.get_shape()) == shard.full_shape, name
            fill_shard(directory, name, shard, source, 1 << 20)

    return fill


class Layer:
    """A linear layer of projections, filled from a checkpoint as a rank does it."""

    def __init__(self, directory: Path, name: str, inputs: ShardRange, outputs: Mapping[str, ShardRange]) -> None:
        model = model_of(directory, name)
        (form,) = {model.layer_forms[f"0.{module}"] for module in outputs}
        self.form = form
        self.linear = FourBitLinearMethod(inputs.size, sum(part.size for part in outputs.values()), False, PLAIN, form)

        def shards() -> Any:
            first = 0
            for module, part in outputs.items():
                for key, shard in self.linear.weight_shards(first, part, inputs):
                    yield f"{module}.{key}", shard
                first += part.size

        self.group = WeightGroup(shards, self.linear.process_weights_after_loading)
        with open_weights(directory, model, CPU, torch.float32) as weights:
            for _ in range(2):  # the second time, weights are unpacked and loaded again
                self.group.refill(filler(directory, weights, PREFIX))
        self.group.refill(lambda shards: None)  # all keep their values

    @property
    def dequantized(self) -> Tensor:
        """The weight as the checkpoint's tool orders its inputs."""
        rows = []
        for part in self.linear._parts.values():
            weight = part.weight.dequantized(torch.float32)
            rows.append(weight if part.order is None else weight[:, part.order.argsort()])
        return torch.cat(rows)


CASES = sampled(list(FOUR_BITS), [INPUTS, 320], every=5)


@pytest.mark.parametrize(("name", "inputs"), CASES)
def test_merged_projections_have_the_numbers_of_their_tool(name: str, inputs: int, tmp_path: Path) -> None:
    """Tensor shards may cut words and blocks of outputs."""
    weights = {"gate_proj": random(136, inputs), "up_proj": random(72, inputs, seed=1) * 3}
    expected = store(tmp_path, name, weights)
    outputs = {"gate_proj": ShardRange(13, 58, 136), "up_proj": ShardRange(36, 36, 72)}
    layer = Layer(tmp_path, name, ShardRange.full(inputs), outputs)
    parts = [expected[module][part.start : part.start + part.size] for module, part in outputs.items()]
    assert torch.equal(layer.dequantized, torch.cat(parts))
    x = random(3, inputs, seed=2)
    torch.testing.assert_close(layer.linear.apply(x), x @ torch.cat(parts).t(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("name", sampled([name for name in FOUR_BITS if "order" not in name], every=4))
def test_shards_of_inputs_sum_to_the_whole(name: str, tmp_path: Path) -> None:
    expected = store(tmp_path, name, {"down_proj": random(40, INPUTS)})["down_proj"]
    x = random(3, INPUTS, seed=2)
    result = torch.zeros(3, 40)
    for first, size in ((0, 128), (128, 64)):
        layer = Layer(tmp_path, name, ShardRange(first, size, INPUTS), {"down_proj": ShardRange.full(40)})
        assert torch.equal(layer.dequantized, expected[:, first : first + size])
        result += layer.linear.apply(x[:, first : first + size])
    torch.testing.assert_close(result, x @ expected.t(), rtol=1e-5, atol=1e-4)


def test_projections_with_different_orders_of_inputs_have_products_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = {"gate_proj": random(40, INPUTS), "up_proj": random(40, INPUTS, seed=1)}
    expected = store(tmp_path / "one", "gptq order", weights)
    monkeypatch.setattr(torch, "randperm", lambda size, generator: torch.arange(size).flip(0))
    other = store(tmp_path / "other", "gptq order", weights)
    monkeypatch.undo()
    up = load_file(tmp_path / "other" / "model.safetensors")
    tensors = load_file(tmp_path / "one" / "model.safetensors")
    tensors |= {name: tensor for name, tensor in up.items() if "up_proj" in name}
    save_file(tensors, tmp_path / "one" / "model.safetensors")
    whole = ShardRange.full(40)
    layer = Layer(tmp_path / "one", "gptq order", ShardRange.full(INPUTS), {"gate_proj": whole, "up_proj": whole})
    x = random(3, INPUTS, seed=2)
    both = torch.cat((expected["gate_proj"], other["up_proj"]))
    torch.testing.assert_close(layer.linear.apply(x), x @ both.t(), rtol=1e-5, atol=1e-4)


def test_rows_in_another_order_keep_their_scales(tmp_path: Path) -> None:
    expected = store(tmp_path, "nvfp4", {"up_proj": random(40, INPUTS)})["up_proj"]
    model = model_of(tmp_path, "nvfp4")
    rows = torch.arange(40).view(4, 10).t().flatten()
    linear = FourBitLinearMethod(INPUTS, 40, False, PLAIN, model.layer_forms["0.up_proj"])
    full = ShardRange.full(INPUTS)
    group = WeightGroup(lambda: linear.weight_shards(0, ShardRange.full(40), full, rows), lambda: None)
    with open_weights(tmp_path, model, CPU, torch.float32) as weights:
        group.refill(filler(tmp_path, weights, f"{PREFIX}.up_proj"))
    linear.process_weights_after_loading()
    assert torch.equal(linear.weights[0].dequantized(torch.float32), expected[rows])


@pytest.mark.parametrize("name", sampled(["nvfp4", "awq 32", "gptq 64", "w4a16 zeros 32", "w4a16 0"], every=2))
def test_shards_of_experts_sum_to_the_whole(name: str, tmp_path: Path) -> None:
    """Tensor shards slice experts along groups; expert shards have whole experts."""
    hidden = 64
    inner = 128
    num_experts = 4
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    weights = {
        f"experts.{expert}.{module}": random(*size, seed=10 * expert + index)
        for expert in range(num_experts)
        for index, (module, size) in enumerate(sizes.items())
    }
    expected = store(tmp_path, name, weights)
    model = model_of(tmp_path, name)
    from runner.kernels.experts.expert_reference import choose_experts

    x = random(5, hidden, seed=3)
    routing = choose_experts(
        random(5, num_experts), None, top_k=2, sigmoid=False, renormalize=True, groups=(1, 1), scale=1.0
    )
    reference = torch.zeros(5, hidden)
    for token in range(5):
        for expert, weight in zip(routing.experts[token].tolist(), routing.weights[token], strict=True):
            gate, up, down = (expected[f"experts.{expert}.{module}"] for module in sizes)
            reference[token] += weight * (down @ (torch.nn.functional.silu(gate @ x[token]) * (up @ x[token])))

    def output(local: range, part: ShardRange) -> Tensor:
        shard = ExpertsShard(local, num_experts, hidden, part)
        experts = FourBitExpertsMethod(shard, GatedActivation(silu_and_mul), PLAIN, model.layer_forms["0.experts"])
        group = WeightGroup(experts.weight_shards, experts.process_weights_after_loading)
        with open_weights(tmp_path, model, CPU, torch.float32) as weights:
            for _ in range(2):
                group.refill(filler(tmp_path, weights, f"{PREFIX}.experts"))
        return experts.apply(x, routing)

    full = ShardRange.full(inner)
    scale = float(reference.abs().max())
    for shards in (
        [(range(4), full)],
        [(range(4), ShardRange(start, 64, inner)) for start in (0, 64)],
        [(range(3), full), (range(3, 4), full)],
    ):
        result = sum(output(*shard) for shard in shards)
        torch.testing.assert_close(result, reference, rtol=1e-4, atol=1e-5 * scale)


# ------------------------------------------------------------ whole models

SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128}


def quantized_model(tmp_path: Path, family: str, name: str, **sizes: Any) -> tuple[Path, Path]:
    own: dict[str, Any] = {}
    if family == "qwen3_next":
        own["layer_types"] = ["linear_attention", "full_attention"]
    if family.startswith("lfm2"):
        own["layer_types"] = ["conv", "full_attention"]
    if family in ("qwen3_moe", "deepseek_v3", "glm4_moe", "lfm2_moe"):
        own["moe_intermediate_size"] = 64
    if family == "deepseek_v3":
        own["q_lora_rank"] = 64
    plain = make_checkpoint(tmp_path / "plain", family, **{**SIZES, **own, **sizes})
    return plain, quantize(plain, tmp_path / "quantized", name)


def logprobs_of(directory: Path, version: str, **options: Any) -> tuple[list[int], Tensor]:
    config = node_config(directory, runner=version, num_blocks=16, **options)
    assert config.model.keeps_quantized == (version == "V2")
    built = runner.build(config, lambda stage, fraction: None)
    vocab = config.model.vocab_size
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=vocab)
    (result,) = Stepper(built).generate([PROMPT], 3, sampling)
    logprobs = torch.empty(3, vocab)
    for row, sample in zip(logprobs, result.samples, strict=True):
        assert sample.logprobs is not None
        row[list(sample.logprobs.top_ids)] = torch.tensor(sample.logprobs.top_logprobs)
    built.close()
    return result.output, logprobs


MODELS = [
    ("qwen3", "nvfp4"),
    ("qwen3_moe", "compressed nvfp4"),
    ("qwen3", "gptq order"),
    ("mixtral", "awq 32"),
    ("qwen2", "compressed mxfp4"),
    ("llama", "w4a16 zeros 32"),
    ("qwen3_moe", "gptq 32"),
    ("qwen3_next", "nvfp4"),
    ("lfm2", "nvfp4"),
    ("lfm2_moe", "awq 32"),
    ("deepseek_v3", "w4a16 32"),
    ("glm4_moe", "awq 32"),
    ("deepseek_v3", "gptq order"),
]


@pytest.mark.parametrize(
    ("family", "name"), [*MODELS[:2], *(pytest.param(*case, marks=pytest.mark.slow) for case in MODELS[2:])]
)
def test_v2_has_the_tokens_of_the_dequantized_model_and_the_logprobs_of_v1(
    family: str, name: str, tmp_path: Path
) -> None:
    plain, quantized = quantized_model(tmp_path, family, name)
    tokens, logprobs = logprobs_of(quantized, "V1")
    assert tokens == reference_greedy(reference_model(plain), PROMPT, 3)
    kept_tokens, kept = logprobs_of(quantized, "V2")
    assert kept_tokens == tokens
    torch.testing.assert_close(kept, logprobs, rtol=0, atol=1e-4)


KERNELS = [
    ("qwen3", "nvfp4"),
    ("qwen3_moe", "compressed nvfp4"),
    ("qwen3", "gptq zeros order"),
    ("qwen3_moe", "awq 32"),
    ("qwen3", "w4a16 0"),
    ("qwen3", "compressed mxfp4"),
]


@pytest.mark.parametrize(
    ("family", "name"), [*KERNELS[:1], *(pytest.param(*case, marks=pytest.mark.slow) for case in KERNELS[1:])]
)
def test_kernels_have_the_logprobs_of_the_dequantized_model(family: str, name: str, tmp_path: Path) -> None:
    _, quantized = quantized_model(tmp_path, family, name, num_hidden_layers=1)
    tokens, logprobs = logprobs_of(quantized, "V1")
    kept_tokens, kept = logprobs_of(quantized, "V2", attention_backend="triton")
    assert kept_tokens == tokens
    torch.testing.assert_close(kept, logprobs, rtol=0, atol=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize(("family", "name"), [*KERNELS, ("qwen3", "mixed"), ("qwen3_moe", "gptq 64")])
def test_logprobs_on_gpus_err_by_the_rounding_of_activations(family: str, name: str, tmp_path: Path) -> None:
    """Loaded twice: the second time, weights are unpacked on the GPU."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
    is_mixed = name == "mixed"
    _, quantized = mixed(tmp_path, **sizes) if is_mixed else quantized_model(tmp_path, family, name, **sizes)
    _, exact = logprobs_of(quantized, "V1", device="cuda")
    config = node_config(
        quantized, runner="V2", num_blocks=16, device="cuda", dtype="bfloat16", attention_backend="triton"
    )
    built = runner.build(config, lambda stage, fraction: None)
    stepper = Stepper(built)
    vocab = config.model.vocab_size
    for _ in range(2):
        (result,) = stepper.generate([PROMPT], 1, SamplingParams(max_tokens=1, temperature=0.0, logprobs=vocab))
        first = result.samples[0].logprobs
        assert first is not None
        logprobs = torch.empty(vocab)
        logprobs[list(first.top_ids)] = torch.tensor(first.top_logprobs)
        assert (logprobs - exact[0]).norm() < 0.1 * (exact[0] - exact[0].mean()).norm()
        built.change_weights(WeightChange(str(quantized)))
    built.close()


@pytest.mark.parametrize("kind", ["int4", "e2m1"])
def test_experts_that_are_packed_together_are_those_packed_alone(kind: Any) -> None:
    """Scales of 0 hide codes other than 0, which are unpacked all the same."""
    is_e2m1 = kind == "e2m1"
    dtype = torch.float8_e4m3fn if is_e2m1 else torch.bfloat16
    form = FourBitForm(kind, 16 if is_e2m1 else 64, has_zeros=not is_e2m1, scale_dtype=dtype)
    alone, together = (FourBitExperts(3, 40, 192, form, CPU) for _ in range(2))
    generator = torch.Generator().manual_seed(4)
    codes = torch.randint(256, (120, 96), generator=generator, dtype=torch.uint8)
    groups = 192 // form.group
    zeros = None if is_e2m1 else torch.randint(16, (120, groups), generator=generator, dtype=torch.uint8)
    scales = random(120, groups, seed=5).abs()
    scales[::3, 1] = 0
    scales = scales.to(dtype)
    factors = random(120, seed=6) if is_e2m1 else None
    together._pack(0, 3, codes, scales, zeros, factors)
    for expert in range(3):
        rows = slice(40 * expert, 40 * expert + 40)
        part = None if zeros is None else zeros[rows]
        alone.pack(expert, codes[rows], scales[rows], part, None if factors is None else factors[rows])
        unpacked = together.unpack(expert)
        assert torch.equal(unpacked.codes, codes[rows])
        assert torch.equal(unpacked.scales.float(), scales[rows].float())
        assert part is None or (unpacked.zeros is not None and torch.equal(unpacked.zeros, part))
    assert torch.equal(alone.words, together.words)
    assert torch.equal(alone.output_scales, together.output_scales)


def mixed(tmp_path: Path, family: str = "qwen3", **sizes: Any) -> tuple[Path, Path]:
    """ModelOpt's mixed precision: attention in FP8, MLPs and head in NVFP4, the last layer plain."""
    plain = make_checkpoint(tmp_path / "plain", family, **{**SIZES, **sizes})
    quantized = quantize(plain, tmp_path / "quantized", "nvfp4")
    file = quantized / "model.safetensors"
    rounded = load_file(plain / "model.safetensors")
    stored: dict[str, Tensor] = {}
    layers: dict[str, dict[str, Any]] = {}
    for key, tensor in rounded.items():
        module = key.removesuffix(".weight")
        if module == "lm_head" or ("layers.0." in key and module.endswith("_proj")):
            name, algorithm = ("modelopt fp8", "FP8") if "self_attn" in key else ("nvfp4", "W4A16_NVFP4")
            layers[module] = {"quant_algo": algorithm, **({"group_size": 16} if algorithm != "FP8" else {})}
            parts, rounded[key] = {**FORMATS, **FOUR_BITS}[name].quantize(module, tensor)
            stored |= parts
        else:
            stored[key] = tensor
    save_file(stored, file, {"format": "pt"})
    save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    del config["quantization_config"]
    (quantized / "config.json").write_text(json.dumps(config))
    options = {"quant_algo": "MIXED_PRECISION", "kv_cache_quant_algo": "FP8", "quantized_layers": layers}
    beside = {"producer": {"name": "modelopt", "version": "0.46.0"}, "quantization": options}
    (quantized / "hf_quant_config.json").write_text(json.dumps(beside))
    return plain, quantized


def test_each_layer_of_a_mixed_checkpoint_keeps_its_form(tmp_path: Path) -> None:
    plain, quantized = mixed(tmp_path)
    expected = reference_greedy(reference_model(plain), PROMPT, 3)
    tokens, logprobs = logprobs_of(quantized, "V1")
    assert tokens == expected
    kept_tokens, kept = logprobs_of(quantized, "V2")
    assert kept_tokens == expected
    torch.testing.assert_close(kept, logprobs, rtol=0, atol=1e-4)
    forms = node_config(quantized, runner="V2").model.layer_forms
    attention = {f"0.{name}_proj" for name in "qkvo"}
    four_bits = {"-1.lm_head", *(f"0.{name}_proj" for name in ("gate", "up", "down"))}
    kinds = {key: form.kind for key, form in forms.items()}
    assert kinds == dict.fromkeys(attention, "fp8") | dict.fromkeys(four_bits, "e2m1")
    model = load_model_config(quantized)
    kept_layers = keep_layers(model, ParallelConfig((2,)), stored_weights(model, quantized))
    assert not list(kept_layers.notes("bfloat16", model.weight_format))
    dummy = node_config(quantized, runner="V2", load_format="dummy").model.layer_forms
    assert dummy == forms


@pytest.mark.slow
@pytest.mark.parametrize("form", ["Qwen3.6 in NVFP4", "Qwen3.6 with experts in NVFP4"])
def test_published_mixed_checkpoints_are_kept(form: str, tmp_path: Path) -> None:
    """test_published_checkpoints.py compares V1's tokens with the library's."""
    directory = FORMS[form](tmp_path).checkpoint
    tokens, logprobs = logprobs_of(directory, "V1")
    kept_tokens, kept = logprobs_of(directory, "V2")
    assert kept_tokens == tokens
    torch.testing.assert_close(kept, logprobs, rtol=0, atol=1e-4)
    model = load_model_config(directory)
    layers = keep_layers(model, ParallelConfig((3,)), stored_weights(model, directory))
    assert not layers.dequantized
    experts = {f"{layer}.experts": "e2m1" for layer in range(3)} if model.moe else {}
    mlp = {f"{layer}.{name}_proj": "e2m1" for layer in range(3) for name in ("gate", "up", "down")}
    delta = {f"{layer}.{name}": "fp8" for layer in range(2) for name in ("in_proj_qkv", "in_proj_z", "out_proj")}
    attention = {f"2.{name}_proj": "fp8" for name in "qkvo"}
    head = {"-1.lm_head": "e2m1"}
    assert {key: kept.kind for key, kept in layers.forms.items()} == experts | mlp | delta | attention | head


def test_a_mixed_checkpoint_names_what_it_dequantizes(tmp_path: Path) -> None:
    plain, quantized = quantized_model(tmp_path, "qwen3", "gptq zeros")
    tensors = load_file(quantized / "model.safetensors")
    name = "model.layers.1.mlp.up_proj"
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(name)}
    tensors[f"{name}.weight"] = load_file(plain / "model.safetensors")[f"{name}.weight"]
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    model = load_model_config(quantized)
    weights = stored_weights(model, quantized)
    kept = keep_layers(model, ParallelConfig((2,)), weights)
    (note,) = kept.notes("bfloat16", model.weight_format)
    assert note.startswith("dequantized when loaded: gate_proj (1 weights): 0.00 GiB stored take 0.00 GiB of memory in")
    assert note.endswith("up_proj beside them is stored unquantized")
    assert not {"1.gate_proj", "1.up_proj"} & kept.forms.keys()
    tokens, _ = logprobs_of(quantized, "V2")
    assert tokens == reference_greedy(reference_model(plain), PROMPT, 3)


@pytest.mark.parametrize("name", ["nvfp4", "awq 32", "w4a16 64"])
def test_planned_bytes_are_those_in_memory(name: str, tmp_path: Path) -> None:
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "head_dim": 64}
    _, quantized = quantized_model(tmp_path, "qwen3", name, **sizes)
    config = node_config(quantized, runner="V2")
    built = runner.build(config, lambda stage, fraction: None)
    in_memory = sum(weight.stack.bytes_read for layer in every_linear(built) for weight in layer.weights)
    tables = 2 * 4 * config.model.vocab_size * config.model.hidden_size
    planned = weight_bytes(config.model, config.position, "float32") - tables
    assert planned == pytest.approx(in_memory, rel=0.05)
    built.close()


def every_linear(built: Any) -> list[FourBitLinearMethod]:
    layers = built._model.decoder.layers
    products = [
        product
        for layer in layers
        for product in (layer.attention._qkv, layer.attention._out, layer.mlp.block._gate_up, layer.mlp.block._down)
    ]
    return [product._linear for product in products]


@pytest.mark.parametrize("method", ["gptq", "auto-round", "compressed-tensors"])
def test_modules_may_have_other_bits_and_groups(method: str, tmp_path: Path) -> None:
    """Their shapes tell them apart; V2 keeps those of 4 bits."""
    name = {"gptq": "gptq 32", "auto-round": "auto-round 32", "compressed-tensors": "w4a16 64"}[method]
    plain, quantized = quantized_model(tmp_path, "qwen3", name)
    packed = method == "compressed-tensors"
    other = FORMATS["compressed w8a16" if packed else "gptq 8 bits"]
    tensors = load_file(quantized / "model.safetensors")
    rounded = load_file(plain / "model.safetensors")
    module = "model.layers.1.mlp.down_proj"
    tensors = {key: tensor for key, tensor in tensors.items() if not key.startswith(module)}
    parts, rounded[f"{module}.weight"] = other.quantize(module, rounded[f"{module}.weight"])
    save_file(tensors | parts, quantized / "model.safetensors", {"format": "pt"})
    save_file(rounded, plain / "model.safetensors", {"format": "pt"})
    config = json.loads((quantized / "config.json").read_text())
    options = config["quantization_config"]
    if packed:
        options["config_groups"]["group_1"] = {
            **other.config["config_groups"]["group_0"],
            "targets": ["re:.*down_proj"],
        }
    elif method == "gptq":
        options["dynamic"] = {"+:.*down_proj": {"bits": 8, "group_size": 16}, "-:.*lm_head": {}}
    else:
        options["extra_config"] = {module: {"bits": 8, "group_size": 16}, "lm_head": {"bits": 16}}
    (quantized / "config.json").write_text(json.dumps(config))
    expected = reference_greedy(reference_model(plain), PROMPT, 3)
    for version in ("V1", "V2"):
        tokens, _ = logprobs_of(quantized, version)
        assert tokens == expected
    forms = node_config(quantized, runner="V2").model.layer_forms
    assert "0.down_proj" in forms
    assert "1.down_proj" not in forms


# ------------------------------------------------------------ changes, shards, quantizing at load


def test_another_checkpoint_takes_the_place_of_4_bit_weights(tmp_path: Path) -> None:
    plain, first = quantized_model(tmp_path / "a", "qwen3", "awq 32")
    other = make_checkpoint(tmp_path / "b" / "plain", "qwen3", **SIZES, seed=3)
    second = quantize(other, tmp_path / "b" / "quantized", "awq 32")
    built = runner.build(node_config(first, runner="V2", num_blocks=16), lambda stage, fraction: None)
    stepper = Stepper(built)
    (result,) = stepper.generate([PROMPT], 3)
    assert result.output == reference_greedy(reference_model(plain), PROMPT, 3)
    built.change_weights(WeightChange(str(second)))
    (result,) = stepper.generate([PROMPT], 3)
    assert result.output == reference_greedy(reference_model(other), PROMPT, 3)
    built.close()


MIXED = "mixed"
SPLIT: list[tuple[str, str, dict[str, Any]]] = [
    ("qwen3", "nvfp4", {"tp": 2}),
    ("qwen3", "gptq zeros", {"tp": 2}),
    ("qwen3_moe", "awq 32", {"tp": 2}),
    ("qwen3_moe", "compressed nvfp4", {"tp": 2, "ep": 2}),
    ("qwen3", "gptq order", {"tp": 2}),
    ("qwen3_next", "nvfp4", {"tp": 2}),
    ("qwen3", "w4a16 64", {"pp": 2}),
    ("qwen3", MIXED, {"pp": 2}),
    ("qwen3", MIXED, {"tp": 2}),
]


@pytest.mark.slow
def test_two_ranks_sample_the_tokens_of_one_rank(tmp_path: Path) -> None:
    """All cases in the same processes, because starting Python takes longer than most of them."""
    sampling = SamplingParams(max_tokens=1, temperature=0.0)
    cases: list[Case] = []
    expected = []
    for family, name, sizes in SPLIT:
        directory = tmp_path / f"{len(cases)}"
        odd: dict[str, Any] = {"vocab_size": 131}  # the last shard of a head has a row beyond it
        is_mixed = name == MIXED
        plain, quantized = mixed(directory, **odd) if is_mixed else quantized_model(directory, family, name)
        config = node_config(quantized, runner="V2", num_blocks=16, **sizes)
        assert config.model.keeps_quantized
        cases.append(Case(config=config, prompts=(tuple(PROMPT),), samplings=(sampling,), num_tokens=3))
        expected.append(tuple(reference_greedy(reference_model(plain), PROMPT, 3)))
    for answers, tokens in zip(answers_of_ranks(cases, 2), expected, strict=True):
        assert answers[-1].outcomes[0].tokens == tokens


def test_unquantized_tensors_beside_4_bit_weights_are_patched(tmp_path: Path) -> None:
    plain, quantized = quantized_model(tmp_path, "qwen3", "gptq zeros order")
    built = runner.build(node_config(quantized, runner="V2", num_blocks=16), lambda stage, fraction: None)
    name = "model.layers.1.post_attention_layernorm.weight"
    tensors = load_file(plain / "model.safetensors")
    tensors[name] = random(64, seed=9)
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    built.change_weights(WeightChange(patch=str(write_patch(tmp_path / "patch", {f"{name}.rows.0": tensors[name]}))))
    (result,) = Stepper(built).generate([PROMPT], 3)
    assert result.output == reference_greedy(reference_model(plain), PROMPT, 3)
    codes = "model.layers.1.mlp.up_proj.qweight"
    entry = load_file(quantized / "model.safetensors")[codes]
    with pytest.raises(CheckpointError, match=f"tensor '{codes}' is quantized; patches change F32"):
        built.change_weights(WeightChange(patch=str(write_patch(tmp_path / "codes", {f"{codes}.rows.0": entry}))))
    built.close()


@pytest.mark.slow
@pytest.mark.parametrize(("family", "layer"), [("qwen3_next", 2), ("mimo", 2)])
def test_layers_that_predict_further_tokens_are_kept(family: str, layer: int, tmp_path: Path) -> None:
    _, quantized = quantized_model(tmp_path, family, "nvfp4", predicts=family != "mimo")
    config = node_config(quantized, runner="V2", num_blocks=16, draft_layers=1)
    assert {f"{layer}.q_proj", f"{layer}.o_proj"} <= config.model.layer_forms.keys()
    built = runner.build(config, lambda stage, fraction: None)
    predictor = built._model.decoder.predictor  # type: ignore[attr-defined]
    assert isinstance(predictor._layer.attention._qkv._linear, FourBitLinearMethod)
    built.close()


def test_groups_in_another_order_than_the_config_says_are_refused(tmp_path: Path) -> None:
    _, quantized = quantized_model(tmp_path, "qwen3", "gptq order")
    config = json.loads((quantized / "config.json").read_text())
    config["quantization_config"]["desc_act"] = False
    (quantized / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"g_idx has groups of inputs in another order.*choose V1"):
        runner.build(node_config(quantized, runner="V2"), lambda stage, fraction: None)


class SourceOf:
    """A tensor with the interface of a slice."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@pytest.mark.parametrize("kind", ["nvfp4", "int4"])
def test_weights_quantized_at_load_are_the_nearest_values_of_their_scales(kind: str) -> None:
    weight = random(20, 256, seed=5).bfloat16()
    weight[3] = 0
    form = AT_LOAD[kind].form
    slices = four_bits_at_load("w", SourceOf(weight), form, LastWeight())
    codes = slices["w"][...]
    scales = slices["w_group_scale"][...].float()
    codes = torch.stack((codes & 15, codes >> 4), 2).flatten(1).int()
    spread = scales.repeat_interleave(form.group, 1)
    if kind == "nvfp4":
        spread = spread * slices["w_output_scale"][...][:, None]
        table = torch.tensor([*FP4_VALUES, *(-value for value in FP4_VALUES)])
    else:
        table = torch.arange(-8.0, 8.0)
    error = (table[codes] * spread - weight.float()).abs()
    best = (table[:, None, None] * spread - weight.float()).abs().amin(0)
    torch.testing.assert_close(error, best, rtol=1e-5, atol=1e-7)
    assert error.norm() < 0.13 * weight.float().norm()
    assert torch.equal(slices["w"][slice(2, 9)], slices["w"][...][2:9])


@pytest.mark.parametrize(
    ("kind", "family"), [("nvfp4", "qwen3"), pytest.param("int4", "qwen3_moe", marks=pytest.mark.slow)]
)
def test_a_model_quantized_at_load_has_the_logits_of_its_rounded_weights(
    kind: str, family: str, tmp_path: Path
) -> None:
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1,
        "hidden_size": 128,
        "intermediate_size": 128,
        "moe_intermediate_size": 128,
    }
    plain = make_checkpoint(tmp_path / "plain", family, **sizes)
    config = node_config(plain, runner="V2", quantization=kind, num_blocks=16)
    assert {form.kind for form in config.model.layer_forms.values()} == {AT_LOAD[kind].form.kind}
    built = runner.build(config, lambda stage, fraction: None)
    (result,) = Stepper(built).generate([PROMPT], 3)
    built.close()
    tensors = load_file(plain / "model.safetensors")
    for name in filter(is_linear, tensors):
        slices = four_bits_at_load("w", SourceOf(tensors[name]), AT_LOAD[kind].form, LastWeight())
        weight = slices["w"][...]
        codes = torch.stack((weight & 15, weight >> 4), 2).flatten(1).int()
        table = torch.arange(-8.0, 8.0) if kind == "int4" else torch.tensor([*FP4_VALUES, *(-v for v in FP4_VALUES)])
        spread = slices["w_group_scale"][...].float().repeat_interleave(AT_LOAD[kind].form.group, 1)
        tensors[name] = table[codes] * spread
        if kind == "nvfp4":
            tensors[name] = tensors[name] * slices["w_output_scale"][...][:, None]
    save_file(tensors, plain / "model.safetensors", {"format": "pt"})
    assert result.output == reference_greedy(reference_model(plain), PROMPT, 3)


def test_random_weights_have_a_deviation_as_unquantized_ones(tmp_path: Path) -> None:
    _, quantized = quantized_model(tmp_path, "qwen3", "nvfp4")
    built = runner.build(node_config(quantized, runner="V2", load_format="dummy"), lambda stage, fraction: None)
    for linear in every_linear(built):
        assert 0.01 < float(linear.weights[0].dequantized(torch.float32).std()) < 0.04
    built.close()


def test_a_bias_of_the_head_is_refused(tmp_path: Path) -> None:
    _, quantized = mixed(tmp_path)
    tensors = load_file(quantized / "model.safetensors")
    save_file({**tensors, "lm_head.bias": torch.ones(128)}, quantized / "model.safetensors", {"format": "pt"})
    with pytest.raises(CheckpointError, match=r"tensor lm_head.bias has no place in the model"):
        runner.build(node_config(quantized, runner="V2"), lambda stage, fraction: None)
