"""FP8 weights that V2 keeps in memory: exact where they are dequantized for each use, close where Hopper multiplies."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, node_config, reference_greedy, reference_model
from fast_set import sampled
from quantized_checkpoints import FORMATS, fp8_blocks, quantize
from safetensors.torch import load_file, save_file
from stepper import Stepper
from torch import Tensor

import runner
from pdserve.config.parallel import choose_parallel_config
from pdserve.config.resolution.quantized_layers import KeptLayers, keep_layers, kept_problem
from pdserve.config.resolve import stored_weights
from pdserve.model.model_config import load_model_config
from pdserve.model.quantization.kept_weights import is_linear
from pdserve.protocols import ModelRunner
from pdserve.sampling_params import SamplingParams
from runner.kernels import activation
from runner.kernels.experts.expert_reference import choose_experts
from runner.kernels.products import fp8_products
from runner.kernels.products.fp8_few_tokens import FewTokens
from runner.kernels.reference import silu_and_mul
from runner.models.layers.weight_shard import ShardRange, WeightGroup, WeightShard
from runner.models.quantization import ExpertsShard, GatedActivation, fp8
from runner.models.quantization.fp8 import E4M3, Fp8LinearMethod
from runner.models.quantization.fp8_at_load import QuantizedRows, ScalesOfRows
from runner.models.quantization.fp8_experts import Fp8Experts
from runner.placement import TensorPlacement

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 192, "intermediate_size": 320}
PROMPT = list(range(5, 40))

kept_formats = pytest.mark.parametrize(
    "name",
    [
        "fp8 blocks",
        "compressed fp8 rows",
        *(
            pytest.param(name, marks=pytest.mark.slow)
            for name in ("fp8 tensor", "compressed fp8 blocks", "modelopt fp8")
        ),
    ],
)


def random(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed))


def random_tokens(length: int, vocab_size: int) -> list[int]:
    return torch.randint(vocab_size, (length,), generator=torch.Generator().manual_seed(length)).tolist()


def decoder_of(model_runner: ModelRunner) -> Any:
    return model_runner._model.decoder  # type: ignore[attr-defined]


@kept_formats
def test_tokens_on_v2_are_those_of_the_dequantized_model(name: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3", **SIZES)
    quantized = quantize(plain, tmp_path / "quantized", name)
    config = node_config(quantized, runner="V2", attention_backend="triton", device=DEVICE.type, num_blocks=8)
    model_runner = runner.build(config, lambda stage, fraction: None)
    assert decoder_of(model_runner).layers[0].attention._qkv._linear.weight.dtype == E4M3
    (result,) = Stepper(model_runner).generate([PROMPT], 4)
    assert result.output == reference_greedy(reference_model(plain), PROMPT, 4)


@pytest.mark.parametrize("family", ["qwen3", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_weights_quantized_at_load_have_the_tokens_of_their_dequantized_numbers(family: str, tmp_path: Path) -> None:
    """The numbers of a weight that was quantized and dequantized before do not change any more."""
    plain = make_checkpoint(tmp_path / "plain", family, **SIZES)
    for path in plain.glob("*.safetensors"):
        tensors = load_file(path)
        for name in filter(is_linear, tensors):
            scales = tensors[name].float().abs().amax(1, keepdim=True) / 448
            tensors[name] = (tensors[name].float() / scales).to(E4M3).float() * scales
        save_file(tensors, path)
    flags: dict[str, Any] = {"attention_backend": "triton", "device": DEVICE.type, "num_blocks": 8}
    config = node_config(plain, runner="V2", quantization="fp8", **flags)
    model_runner = runner.build(config, lambda stage, fraction: None)
    assert decoder_of(model_runner).layers[0].attention._qkv._linear.weight.dtype == E4M3
    (result,) = Stepper(model_runner).generate([PROMPT], 4)
    assert result.output == reference_greedy(reference_model(plain), PROMPT, 4)


@pytest.mark.parametrize("index", [..., slice(3, 9), (slice(0, 7), slice(5, 20))])
def test_parts_of_weights_quantized_at_load_have_the_scales_of_whole_rows(index: Any) -> None:
    weight = random(12, 40, seed=8).bfloat16()
    weight[4] = 0
    source: Any = SourceOf(weight)
    scales = weight.float().abs().amax(1, keepdim=True) / 448
    rows = index[0] if isinstance(index, tuple) else index
    torch.testing.assert_close(ScalesOfRows(source)[rows], scales[rows].clamp(min=1e-12), rtol=0, atol=0)
    values = QuantizedRows(source)[index]
    assert values.dtype == E4M3
    error = (values.float() * ScalesOfRows(source)[rows] - weight.float()[index]).abs()
    assert (error <= weight.float()[index].abs() / 16 + scales[rows] * 2**-10).all(), "half a step of three bits"


class SourceOf:
    """A tensor with the interface of a slice."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def get_shape(self) -> list[int]:
        return list(self._tensor.shape)

    def __getitem__(self, index: Any) -> Tensor:
        return self._tensor[index]


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_tokens_of_fp8_experts_are_those_of_the_dequantized_model(backend: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3_moe", num_hidden_layers=1, hidden_size=192)
    quantized = quantize(plain, tmp_path / "quantized", "fp8 blocks")
    config = node_config(quantized, runner="V2", attention_backend=backend, device=DEVICE.type, num_blocks=8)
    model_runner = runner.build(config, lambda stage, fraction: None)
    assert decoder_of(model_runner).layers[0].mlp.block._experts._down.weight.dtype == E4M3
    (result,) = Stepper(model_runner).generate([PROMPT], 3)
    assert result.output == reference_greedy(reference_model(plain), PROMPT, 3)


@pytest.mark.parametrize("use_triton", [False, True])
def test_shards_of_fp8_experts_sum_to_the_whole(use_triton: bool) -> None:
    """Tensor shards slice experts along scale blocks; expert shards have whole experts."""
    num_experts = 4
    hidden = 40
    inner = 64
    quantizer = fp8_blocks(32, "weight_scale")
    stored: dict[str, Tensor] = {}
    for index in range(num_experts):
        for name, size in (
            ("gate_proj", (inner, hidden)),
            ("up_proj", (inner, hidden)),
            ("down_proj", (hidden, inner)),
        ):
            tensors, _ = quantizer("m", random(*size, seed=len(stored)))
            stored |= in_rows(tensors, f"{index}.{name}", 32)
    options = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    placement = TensorPlacement(DEVICE, torch.float32, torch.float32, use_triton=use_triton)
    x = random(5, hidden).to(DEVICE)
    routing = choose_experts(
        random(5, num_experts).to(DEVICE), None, top_k=2, sigmoid=False, renormalize=True, groups=(1, 1), scale=1.0
    )

    def filled(local: range, part: ShardRange) -> Fp8Experts:
        experts = Fp8Experts(
            ExpertsShard(local, num_experts, hidden, part), GatedActivation(silu_and_mul), placement, options
        )
        group = WeightGroup(experts.weight_shards, experts.process_weights_after_loading)

        def fill_all(shards: Mapping[str, WeightShard]) -> None:
            for name, shard in shards.items():
                assert stored[name].shape == shard.full_shape
                shard.memory.copy_(stored[name][shard.index])

        group.refill(fill_all)
        group.refill(fill_all)  # a reload
        return experts

    def output(local: range, part: ShardRange) -> Tensor:
        return filled(local, part).apply(x, routing)

    full = ShardRange.full(inner)
    whole = output(range(num_experts), full)
    slices = [output(range(num_experts), ShardRange(start, 32, inner)) for start in (0, 32)]
    torch.testing.assert_close(sum(slices), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
    parts = [output(local, full) for local in (range(3), range(3, 4))]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


def load(
    config: dict[str, Any], stored: dict[str, Tensor], weights: list[Tensor], part: slice, placement: TensorPlacement
) -> Fp8LinearMethod:
    """Merge projections with the same stored tensors' names, each with the ``part`` of its outputs."""
    sizes = [len(range(*part.indices(weight.shape[0]))) for weight in weights]
    linear = Fp8LinearMethod(weights[0].shape[1], sum(sizes), False, placement, config)
    fill(linear, stored, weights, part)
    return linear


def fill(linear: Fp8LinearMethod, stored: dict[str, Tensor], weights: list[Tensor], part: slice) -> None:
    first = 0
    linear.restore_weights()
    for index, weight in enumerate(weights):
        rows = range(*part.indices(weight.shape[0]))
        outputs = ShardRange(rows.start, len(rows), weight.shape[0])
        for key, shard in linear.weight_shards(first, outputs, ShardRange.full(weight.shape[1])):
            source = stored[f"{index}.{key}"]
            assert source.shape == shard.full_shape
            shard.memory.copy_(source[shard.index])
        first += len(rows)
    linear.process_weights_after_loading()


def in_rows(stored: dict[str, Tensor], index: int | str, block: int) -> dict[str, Tensor]:
    """Return stored tensors as they are filled: with a row of scales for each output."""
    weight = next(tensor for key, tensor in stored.items() if key.endswith(".weight"))
    scales = next(tensor for key, tensor in stored.items() if "_scale" in key and "input" not in key).float()
    scales = scales.reshape(-1, scales.shape[-1] if scales.dim() else 1)
    rows = scales.repeat_interleave(block if len(scales) < len(weight) else 1, 0)
    return {f"{index}.weight": weight, f"{index}.weight_scale": rows[: len(weight)].expand(len(weight), -1)}


@pytest.mark.parametrize(("name", "block"), [("fp8 blocks", 128), ("compressed fp8 rows", 1), ("fp8 tensor", 1)])
@pytest.mark.parametrize("part", [slice(0, 100), slice(100, 256), slice(128, 256)])
def test_merged_shards_may_cut_blocks_of_outputs(name: str, block: int, part: slice) -> None:
    config, quantizer = FORMATS[name]
    weights = [random(256, 200, seed=1), random(300, 200, seed=2)]
    stored: dict[str, Tensor] = {}
    expected = []
    for index, weight in enumerate(weights):
        tensors, dequantized = quantizer("m", weight)
        stored |= in_rows(tensors, index, block)
        expected.append(dequantized[part])
    placement = TensorPlacement(torch.device("cpu"), torch.float32, torch.float32)
    linear = load(config, stored, weights, part, placement)
    x = random(3, 200, seed=3)
    torch.testing.assert_close(linear.apply(x), x @ torch.cat(expected).t(), rtol=0, atol=1e-5)
    assert len(linear.scales) == sum(map(len, expected)) // math.gcd(block, *map(len, expected), part.start)
    assert list(linear.weight_shards(0, ShardRange.full(len(linear.weight)), ShardRange.full(200)))  # only looked at
    torch.testing.assert_close(linear.apply(x), x @ torch.cat(expected).t(), rtol=0, atol=1e-5)
    fill(linear, stored, weights, part)  # a reload
    assert torch.equal(linear.dequantized(torch.float32), torch.cat(expected))


def quantized_weight(rows: int, columns: int, block: int) -> tuple[Tensor, Tensor]:
    """Return E4M3 values and scales [rows / block, columns / block] of a random weight; block 1: per row."""
    scales = torch.rand(-(-rows // block), columns // block if block > 1 else 1).add_(0.5).mul_(1e-3)
    return random(rows, columns, seed=4).mul_(100).clamp_(-448, 448).to(E4M3).to(DEVICE), scales.to(DEVICE)


def dequantized(values: Tensor, scales: Tensor) -> Tensor:
    """Return float32 of values and scales, which may be per row and group."""
    rows, columns = (-(-size // count) for size, count in zip(values.shape, scales.shape, strict=True))
    block = rows if len(scales) < len(values) else 1
    spread = scales.repeat_interleave(128 if block > 1 else 1, 0).repeat_interleave(columns, 1)
    return values.float() * spread[: len(values), : values.shape[1]]


@pytest.mark.parametrize(("size", "group"), [(256, 256), (384, 128), (4224, 4224)])
def test_quantized_activations_err_by_half_a_step(size: int, group: int) -> None:
    x = random(3, size).to(DEVICE, torch.bfloat16)
    x[1] = 0
    values, scales = fp8_products.quantize(x, group)
    assert values.dtype == E4M3
    error = (dequantized(values, scales) - x.float()).abs()
    step = torch.maximum(x.float().abs() / 8, scales.repeat_interleave(group, 1) * 2**-9)  # 3 bits after the first
    assert (error <= step / 2 * 1.01).all()


@pytest.mark.parametrize(("size", "group"), [(384, 128), (200, 200)])
def test_gates_and_ups_are_quantized_like_their_product(size: int, group: int) -> None:
    gate_up = random(5, 2 * size).to(DEVICE, torch.bfloat16)
    quantized = fp8_products.quantize(gate_up, group, gated=True)
    expected = fp8_products.quantize(activation.silu_and_mul(gate_up), group)
    assert torch.equal(quantized.values.view(torch.uint8), expected.values.view(torch.uint8))
    assert torch.equal(quantized.scales, expected.scales)


@pytest.mark.parametrize(
    ("rows", "columns", "block"), [(70, 256, 1), (70, 200, 1), (200, 384, 128), (6, 5000, 1), (130, 4352, 128)]
)
def test_gemv_of_fp8_weights(rows: int, columns: int, block: int) -> None:
    weight, scales = quantized_weight(rows, columns, block)
    x = random(1, columns, seed=5).to(DEVICE)
    product = fp8_products.gemv(x, weight, scales, block, columns if block == 1 else block)
    expected = x.double() @ dequantized(weight, scales).double().t()  # float32 would err more than the kernel does
    torch.testing.assert_close(product.double(), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [2, 20, *(pytest.param(tokens, marks=pytest.mark.slow) for tokens in (50, 130))])
def test_block_products_equal_those_of_the_dequantized_numbers(tokens: int) -> None:
    weight, scales = quantized_weight(200, 256, 128)
    x, x_scales = fp8_products.quantize(random(tokens, 256, seed=6).to(DEVICE), 128)
    product = fp8_products.block_matmul(x, x_scales, weight, scales, 128, 128).float()
    expected = dequantized(x, x_scales) @ dequantized(weight, scales).t()
    torch.testing.assert_close(product, expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


# Rows: four, two and one program per tile, for the interpreter.
@pytest.mark.parametrize(("tokens", "rows", "block"), sampled((1, 20), (40, 70, 600), (1, 128), every=2))
def test_products_of_few_tokens_equal_those_of_the_dequantized_numbers(tokens: int, rows: int, block: int) -> None:
    columns = 896
    weight, scales = quantized_weight(rows, columns, block)
    product = FewTokens(weight, scales, block, columns if block == 1 else block)
    for seed in (6, 7):  # the second call finds the counters that the first one left
        x = fp8_products.quantize(random(tokens, columns, seed=seed).to(DEVICE), columns if block == 1 else block)
        expected = dequantized(*x) @ dequantized(weight, scales).t()
        torch.testing.assert_close(product(x).float(), expected, rtol=1e-2, atol=1e-3 * float(expected.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "block"), [("fp8 blocks", 128), ("compressed fp8 rows", 1), ("fp8 tensor", 1)])
@pytest.mark.parametrize("tokens", [1, 2, 17, 64, 300])
def test_products_on_hopper_err_by_the_rounding_of_activations(name: str, block: int, tokens: int) -> None:
    config, quantizer = FORMATS[name]
    weight = random(768, 1024)
    tensors, expected = quantizer("m", weight)
    placement = TensorPlacement(torch.device("cuda"), torch.bfloat16, torch.bfloat16, use_triton=True)
    linear = load(config, in_rows(tensors, 0, block), [weight], slice(None), placement)
    assert linear._products is not None
    x = random(tokens, 1024, seed=7).to("cuda", torch.bfloat16)
    exact = x.float() @ expected.cuda().t()
    error = (linear.apply(x).float() - exact).norm() / exact.norm()
    assert error < (0.005 if tokens == 1 else 0.04)
    addresses = linear.weight.data_ptr(), linear._products.scales.data_ptr()
    fill(linear, in_rows(tensors, 0, block), [weight], slice(None))
    assert addresses == (linear.weight.data_ptr(), linear._products.scales.data_ptr())


@pytest.mark.parametrize(
    ("device", "lengths"),
    [pytest.param("cuda", (1, 20, 200), marks=pytest.mark.gpu), pytest.param("cpu", (1, 20), marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", ["fp8 blocks", pytest.param("compressed fp8 rows", marks=pytest.mark.slow)])
def test_logprobs_of_fp8_products_err_by_the_rounding_of_activations(
    name: str, device: str, lengths: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps of one token, of a few and of many: each has its kind of product, behind norms that quantize."""
    if device == "cpu":  # in the interpreter, whose kernels compute in FP8 as Hopper's do
        monkeypatch.setattr(fp8, "computes_in_fp8", lambda *args: True)
        monkeypatch.setattr("torch.cpu._is_avx512_bf16_supported", lambda: True)  # other products in bfloat16, too
    sizes: dict[str, Any] = {
        "num_hidden_layers": 1 if device == "cpu" else 2,
        "hidden_size": 256,
        "intermediate_size": 384,
    }
    plain = make_checkpoint(tmp_path / "plain", "qwen3", **sizes)
    quantized = quantize(plain, tmp_path / "quantized", name)
    config = node_config(
        quantized, runner="V2", attention_backend="triton", device=device, dtype="bfloat16", num_blocks=64
    )
    model_runner = runner.build(config, lambda stage, fraction: None)
    assert decoder_of(model_runner).layers[0].input_norm._quantized_group(2) == (128 if name == "fp8 blocks" else 256)
    vocab = config.model.vocab_size
    reference = reference_model(plain)
    sampling = SamplingParams(max_tokens=1, temperature=0.0, logprobs=vocab)
    prompts = [random_tokens(length, vocab) for length in lengths]
    for result in Stepper(model_runner).generate(prompts, 2, sampling, stagger=1):
        with torch.inference_mode():
            logits = reference(torch.tensor([result.tokens])).logits[0, result.prompt_len - 1 : -1]
        exact = logits.log_softmax(-1)
        logprobs = torch.empty(2, vocab)
        for row, sample in zip(logprobs, result.samples, strict=True):
            assert sample.logprobs is not None
            row[list(sample.logprobs.top_ids)] = torch.tensor(sample.logprobs.top_logprobs)
        assert (logprobs - exact).norm() < 0.1 * (exact - exact.mean(-1, keepdim=True)).norm()


@pytest.mark.parametrize(
    ("version", "family"),
    [
        ("V1", "qwen3_next"),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in (("V1", "qwen3_5_text"), ("V2", "qwen3_next"))),
        pytest.param("V2", "qwen3_5_text", marks=pytest.mark.slow),
    ],
)
def test_rows_in_another_order_keep_their_scales(version: str, family: str, tmp_path: Path) -> None:
    """Gates and queries, rotated parts of heads of two blocks, and inputs of gated delta nets head by head."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 256, "num_attention_heads": 2}
    layers: dict[str, Any] = {"num_hidden_layers": 2, "layer_types": ["linear_attention", "full_attention"]}
    heads: dict[str, Any] = {"linear_key_head_dim": 64, "linear_value_head_dim": 64, "num_key_value_heads": 1}
    plain = make_checkpoint(tmp_path / "plain", family, **sizes, **layers, **heads)
    quantized = quantize(plain, tmp_path / "quantized", "fp8 blocks")
    backend = {"V1": "torch", "V2": "triton"}[version]
    config = node_config(quantized, runner=version, attention_backend=backend)
    assert config.model.keeps_quantized == (version == "V2")
    prompts = [random_tokens(20, 128)]
    reference = reference_model(plain)
    results = Stepper(runner.build(config, lambda stage, fraction: None)).generate(prompts, 3)
    assert [result.output for result in results] == [reference_greedy(reference, prompt, 3) for prompt in prompts]


_WIDTHS: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 256, "moe_intermediate_size": 128}
LATENT_SIZES = {**_WIDTHS, "q_lora_rank": 128, "kv_lora_rank": 128, "qk_nope_head_dim": 48, "v_head_dim": 32}
LATENT_SIZES["num_hidden_layers"] = 2


@pytest.mark.parametrize(
    ("version", "q_lora_rank"), [("V1", 128), ("V2", 128), pytest.param("V2", None, marks=pytest.mark.slow)]
)
def test_projections_from_latents_are_dequantized(version: str, q_lora_rank: int | None, tmp_path: Path) -> None:
    """Rotated parts of heads are loaded in another order; keys and values are factors of batched products."""
    plain = make_checkpoint(tmp_path / "plain", "deepseek_v3", **LATENT_SIZES | {"q_lora_rank": q_lora_rank})
    quantized = quantize(plain, tmp_path / "quantized", "fp8 blocks")
    backend = {"V1": "torch", "V2": "triton"}[version]
    config = node_config(quantized, runner=version, attention_backend=backend, num_blocks=8)
    assert config.model.keeps_quantized == (version == "V2")
    model_runner = runner.build(config, lambda stage, fraction: None)
    attention = decoder_of(model_runner).layers[1].attention
    assert (attention._inputs._linear.weight.dtype == E4M3) == (version == "V2")
    assert attention._keys_and_values.dtype == torch.float32
    prompts = [random_tokens(20, 128)]
    reference = reference_model(plain)
    results = Stepper(model_runner).generate(prompts, 3)
    assert [result.output for result in results] == [reference_greedy(reference, prompt, 3) for prompt in prompts]


def kept_of(directory: Path, **sizes: Any) -> KeptLayers:
    model = load_model_config(directory)
    parallel = choose_parallel_config(model, **{"pp": 1, "tp": 1, **sizes})
    kept = keep_layers(model, parallel, stored_weights(model, directory))
    assert kept_problem(model, parallel, kept) == ""
    return kept


def reasons(kept: KeptLayers) -> dict[str, str]:
    return {part: item.reason for item in kept.dequantized for part in item.parts}


def test_rotated_rows_of_two_scale_blocks_are_dequantized(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "deepseek_v3", **LATENT_SIZES | {"qk_nope_head_dim": 120})
    kept = kept_of(quantize(plain, tmp_path / "quantized", "fp8 blocks"))
    problem = "V2 reorders the 16 rotated outputs of q_b_proj from 120 on, which lie in two scale blocks of 128"
    assert reasons(kept) == {"kv_b_proj": "V2 keeps linear layers and experts", "q_b_proj": problem}
    assert "0.q_b_proj" not in kept.forms
    assert "0.o_proj" in kept.forms


def test_tensor_shards_that_cut_scale_blocks_are_dequantized(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3", **SIZES)
    quantized = quantize(plain, tmp_path / "quantized", "fp8 blocks")
    assert not reasons(kept_of(quantized, pp=2))
    assert reasons(kept_of(quantized, tp=2)) == {
        "o_proj": "tp 2 gives o_proj 64 inputs per shard, which cuts its scale blocks of 128; tp 1 keeps it",
        "down_proj": "tp 2 gives down_proj 160 inputs per shard, which cuts its scale blocks of 128; tp 1 keeps it",
    }


def test_experts_that_cannot_be_kept_are_dequantized_by_name(tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 256, "head_dim": 128, "moe_intermediate_size": 192}
    quantized = quantize(
        make_checkpoint(tmp_path / "plain", "qwen3_moe", **sizes), tmp_path / "quantized", "fp8 blocks"
    )
    assert not reasons(kept_of(quantized))
    assert not reasons(kept_of(quantized, tp=2, ep=2))
    problem = "tp 2 gives the experts' down_proj 96 inputs per shard, which cuts its scale blocks of 128; tp 1 keeps it"
    assert reasons(kept_of(quantized, tp=2)) == {"experts": problem}
    tensors = load_file(quantized / "model.safetensors")
    first = [name for name in tensors if name.startswith("model.layers.0.mlp.experts.")]
    tensors = {name: tensor for name, tensor in tensors.items() if name not in first}
    fused = "model.layers.0.mlp.experts"
    tensors |= {
        f"{fused}.gate_up_proj": torch.zeros(8, 384, 256).to(E4M3),
        f"{fused}.down_proj": torch.zeros(8, 256, 192),
    }
    tensors[f"{fused}.gate_up_proj_scale_inv"] = torch.ones(8, 3, 2)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    problem = "down_proj beside them is stored unquantized"
    assert reasons(kept_of(quantized)) == {"experts": problem}
    tensors[f"{fused}.down_proj"] = tensors[f"{fused}.down_proj"].to(E4M3)
    tensors[f"{fused}.down_proj_scale_inv"] = torch.ones(8, 2, 2)
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    assert reasons(kept_of(quantized)) == {
        "experts": "V2 keeps experts that are stored one by one; one tensor has all of a layer"
    }


def test_a_layer_with_a_projection_left_out_is_dequantized(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "qwen3", **SIZES)
    quantized = quantize(plain, tmp_path / "quantized", "fp8 blocks")
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = load_file(quantized / "model.safetensors")
    tensors[name] = load_file(plain / "model.safetensors")[name]
    del tensors[f"{name}_scale_inv"]
    save_file(tensors, quantized / "model.safetensors", {"format": "pt"})
    kept = kept_of(quantized)
    assert reasons(kept) == {"gate_proj": "up_proj beside them is stored unquantized"}
    assert "0.gate_proj" in kept.forms
    assert not {"1.gate_proj", "1.up_proj"} & kept.forms.keys()
    config = node_config(quantized, runner="V2", attention_backend="triton", device=DEVICE.type, num_blocks=8)
    model_runner = runner.build(config, lambda stage, fraction: None)
    assert decoder_of(model_runner).layers[1].mlp.block._gate_up._linear.weight.dtype == torch.float32
    assert decoder_of(model_runner).layers[1].mlp.block._down._linear.weight.dtype == E4M3
    (result,) = Stepper(model_runner).generate([PROMPT], 2)
    assert result.output == reference_greedy(reference_model(plain), PROMPT, 2)
