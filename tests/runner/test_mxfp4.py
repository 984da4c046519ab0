"""MXFP4 experts that V2 keeps in memory: the numbers are those of dequantized experts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, node_config, reference_greedy, reference_model
from quantized_checkpoints import mxfp4_experts, quantize
from safetensors.torch import load_file
from stepper import Stepper
from torch import Tensor
from weight_patches import write_patch

import runner
from pdserve.config.parallel import choose_parallel_config
from pdserve.config.resolution.quantized_layers import keep_layers, kept_problem
from pdserve.errors import CheckpointError
from pdserve.model.model_config import load_model_config
from pdserve.model.moe import MoEConfig
from pdserve.weights.change import WeightChange
from runner.batch import Routing
from runner.kernels.experts import expert_reference, mxfp4_words
from runner.kernels.experts.grouped_mxfp4 import compiler_problem, grouped_mxfp4, rows_of_experts
from runner.kernels.reference import clamped_swiglu
from runner.models.layers.weight_shard import ShardRange, WeightGroup, WeightShard
from runner.models.quantization import ExpertsShard
from runner.models.quantization.biased_experts import BiasedExperts
from runner.models.quantization.mxfp4 import Mxfp4Stack
from runner.placement import TensorPlacement

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES: dict[str, Any] = {"num_hidden_layers": 2, "hidden_size": 96, "intermediate_size": 64}
PROMPT = list(range(5, 40))


def random(*size: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*size, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def routing_of(tokens: int, num_experts: int, top_k: int) -> Routing:
    logits = random(tokens, num_experts, seed=5)
    return expert_reference.choose_experts(
        logits, None, top_k=top_k, sigmoid=False, renormalize=True, groups=(1, 1), scale=1.0
    )


def stack_of(
    experts: int, outputs: int, inputs: int, dtype: torch.dtype, gated: bool = False
) -> tuple[Mxfp4Stack, Tensor]:
    """Return a stack of every code and of many scales, and its dequantized weights [experts, outputs, inputs]."""
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(256, (experts, outputs, inputs // 32, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(110, 124, (experts, outputs, inputs // 32), generator=generator, dtype=torch.uint8)
    blocks = blocks.to(DEVICE)
    scales = scales.to(DEVICE)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=DEVICE)
    table = torch.cat((table, -table))
    values = table[torch.stack((blocks & 15, blocks >> 4), -1).flatten(3).int()]
    expected = (values * torch.exp2(scales.float() - 127)[..., None]).flatten(2)
    placement = TensorPlacement(DEVICE, dtype, dtype, use_triton=True)
    stack = Mxfp4Stack((experts, outputs, inputs), placement, gated)
    fill_stack(stack, blocks, scales)
    return stack, expected


def fill_stack(stack: Mxfp4Stack, blocks: Tensor, scales: Tensor) -> None:
    experts, outputs, blocks_of_inputs = scales.shape
    ranges = [ShardRange.full(size) for size in (experts, outputs, blocks_of_inputs * 32)]
    fill(
        WeightGroup(lambda: stack.weight_shards("x", *ranges), stack.process_weights_after_loading),
        {"x_blocks": blocks, "x_scales": scales},
    )


def fill(group: WeightGroup, stored: dict[str, Tensor]) -> None:
    def fill_shards(shards: Mapping[str, WeightShard]) -> None:
        for name, shard in shards.items():
            assert stored[name].shape == shard.full_shape
            shard.memory.copy_(shard.part_of(stored[name]))

    group.refill(fill_shards)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("inputs", [32, 96, 320])
def test_packed_weights_are_those_of_the_checkpoint(inputs: int, gated: bool) -> None:
    stack, expected = stack_of(2, 32 if gated else 5, inputs, torch.float32, gated)
    assert torch.equal(torch.stack([stack.expert(index, torch.float32) for index in range(2)]), expected)
    words = stack.words.clone()
    address = stack.words.data_ptr()
    stack.restore()  # as a patch of a bias does
    stack.process_weights_after_loading()
    assert (stack.words.data_ptr(), torch.equal(stack.words, words)) == (address, True)


def test_scales_that_might_overflow_are_refused() -> None:
    scales = torch.full((1, 4, 1), mxfp4_words.LARGEST_SCALE + 1, dtype=torch.uint8)
    stack = Mxfp4Stack((1, 4, 32), TensorPlacement(DEVICE, torch.float32, torch.float32))
    with pytest.raises(CheckpointError, match=r"an MXFP4 scale of 2\^18; V2 takes scales up to 2\^17"):
        fill_stack(stack, torch.zeros(1, 4, 1, 16, dtype=torch.uint8), scales)


def check_products(
    tokens: int, local: range, sizes: tuple[int, int], dtype: torch.dtype, num_experts: int = 6, top_k: int = 2
) -> None:
    """Compare with float32 products of the dequantized weights; the error's norm is relative."""
    outputs, inputs = sizes
    routing = routing_of(tokens, num_experts, top_k)
    stack, weight = stack_of(len(local), outputs, inputs, dtype)
    x = random(tokens, inputs, dtype=dtype, seed=2)
    bias = random(len(local), outputs, dtype=dtype, seed=3)
    product = grouped_mxfp4(x, stack.words, stack.scales, bias, rows_of_experts(routing.experts, local)).float()
    chosen = routing.experts.flatten().long() - local.start
    mine = (chosen >= 0) & (chosen < len(local))
    for index in range(len(local)):
        rows = (mine & (chosen == index)).nonzero().flatten()
        expected = x[rows // top_k].float() @ weight[index].t() + bias[index].float()
        tolerance = {torch.float32: 1e-5, torch.float16: 1e-3}.get(dtype, 4e-3)
        assert (product[rows] - expected).norm() <= tolerance * expected.norm()


@pytest.mark.parametrize(
    ("local", "tokens"), [(range(3, 6), 40), (range(6), 1), (range(6), 5), (range(6), 0), (range(6), 300)]
)
@pytest.mark.parametrize("sizes", [(72, 96), (40, 320)])
def test_grouped_products_are_those_of_dequantized_weights(tokens: int, local: range, sizes: tuple[int, int]) -> None:
    check_products(tokens, local, sizes, torch.float32)


def check_activations(tokens: int, sizes: tuple[int, int], dtype: torch.dtype, num_experts: int, top_k: int) -> None:
    """Compare the activations of gates and ups with float32 products; the error's norm is relative."""
    outputs, inputs = sizes
    routing = routing_of(tokens, num_experts, top_k)
    stack, weight = stack_of(num_experts, outputs, inputs, dtype, gated=True)
    x = random(tokens, inputs, dtype=dtype, seed=2) / 8
    bias = random(num_experts, outputs, dtype=dtype, seed=3)
    rows = rows_of_experts(routing.experts, range(num_experts))
    activations = stack.activations(x, bias, rows, 1.702, 7.0).float()
    chosen = routing.experts.flatten().long()
    for index in range(num_experts):
        mine = (chosen == index).nonzero().flatten()
        gates_and_ups = x[mine // top_k].float() @ weight[index].t() + bias[index].float()
        expected = clamped_swiglu(gates_and_ups, 1.702, 7.0)
        assert (activations[mine] - expected).norm() <= (1e-5 if dtype == torch.float32 else 4e-3) * expected.norm()


@pytest.mark.parametrize("tokens", [1, 40])
def test_activations_are_those_of_dequantized_weights(tokens: int) -> None:
    check_activations(tokens, (160, 96), torch.float32, 6, 2)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tokens", [1, 9, 256, 700, 2048, 8192])
def test_activations_on_a_gpu(tokens: int) -> None:
    check_activations(tokens, (5760, 2880), torch.bfloat16, 32, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tokens", [32, 128, 512, 1024, 8192])
def test_products_are_the_same_each_time(tokens: int) -> None:
    """Weights that a compiler overwrites too early are wrong at random."""
    stack, _ = stack_of(128, 2880, 2880, torch.bfloat16)
    x = random(tokens, 2880, dtype=torch.bfloat16)
    bias = random(128, 2880, dtype=torch.bfloat16, seed=3)
    rows = rows_of_experts(routing_of(tokens, 128, 4).experts, range(128))
    first = grouped_mxfp4(x, stack.words, stack.scales, bias, rows)
    for _ in range(50):
        assert torch.equal(grouped_mxfp4(x, stack.words, stack.scales, bias, rows), first)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize(
    ("tokens", "dtype"),
    [
        *((tokens, torch.bfloat16) for tokens in (1, 9, 32, 256, 700, 2048, 8192)),
        *((tokens, dtype) for tokens in (1, 2048) for dtype in (torch.float16, torch.float32)),
    ],
    ids=str,
)
def test_grouped_products_on_a_gpu(tokens: int, dtype: torch.dtype) -> None:
    check_products(tokens, range(128), (200, 480), dtype, 128, 4)
    check_products(tokens, range(64, 128), (72, 1440), dtype, 128, 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_weights_are_exact_in_registers() -> None:
    """A product with the unit matrix returns them."""
    stack, weight = stack_of(1, 64, 64, torch.bfloat16)
    x = torch.eye(64, dtype=torch.bfloat16, device=DEVICE)
    bias = torch.zeros(1, 64, dtype=torch.bfloat16, device=DEVICE)
    rows = rows_of_experts(torch.zeros(64, 1, dtype=torch.int32, device=DEVICE), range(1))
    product = grouped_mxfp4(x, stack.words, stack.scales, bias, rows)
    assert torch.equal(product.t(), weight[0].bfloat16())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("tokens", [1, 33])
def test_a_graph_follows_other_routings(tokens: int) -> None:
    stack, _ = stack_of(16, 96, 128, torch.bfloat16)
    x = random(tokens, 128, dtype=torch.bfloat16)
    bias = random(16, 96, dtype=torch.bfloat16, seed=3)
    experts = routing_of(tokens, 16, 4).experts

    def compute() -> Tensor:
        return grouped_mxfp4(x, stack.words, stack.scales, bias, rows_of_experts(experts, range(16)))

    compute()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = compute()
    for shift in (0, 5):
        experts.add_(shift).remainder_(16)
        expected = compute()
        graph.replay()
        assert torch.equal(out, expected)


def test_a_compiler_that_drops_the_product_is_refused() -> None:
    assert compiler_problem((9, 0), "3.6.0") == compiler_problem((10, 0), "3.9.0") == ""
    assert "capability 10.0; install Triton 3.9" in compiler_problem((10, 0), "3.6.0+git1")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # rows of other ranks' experts may hold anything
@pytest.mark.parametrize("use_triton", [False, True])
def test_shards_of_experts_sum_to_the_whole(use_triton: bool) -> None:
    """Tensor shards slice experts along blocks of 32; expert shards have whole experts."""
    num_experts = 4
    hidden = 64
    inner = 96
    stored: dict[str, Tensor] = {
        "gate_up_proj_bias": random(num_experts, 2 * inner, seed=3),
        "down_proj_bias": random(num_experts, hidden, seed=4),
    }
    for name, size in (("gate_up_proj", (hidden, 2 * inner)), ("down_proj", (inner, hidden))):
        stored |= mxfp4_experts(name, random(num_experts, *size, seed=len(name)).cpu() / 8)[0]
    moe = MoEConfig(num_experts=num_experts, top_k=2, intermediate_size=inner, has_bias=True, swiglu_limit=7.0)
    placement = TensorPlacement(DEVICE, torch.float32, torch.float32, use_triton=use_triton)
    x = random(5, hidden)
    routing = routing_of(5, num_experts, 2)

    def output(local: range, part: ShardRange) -> Tensor:
        experts = BiasedExperts(ExpertsShard(local, num_experts, hidden, part), moe, placement, mxfp4=True)
        group = WeightGroup(experts.weight_shards, experts.process_weights_after_loading)
        for _ in range(2):  # the second one is a reload
            fill(group, stored)
        return experts.apply(x, routing)

    full = ShardRange.full(inner)
    whole = output(range(num_experts), full)
    slices = [output(range(num_experts), ShardRange(start, size, inner)) for start, size in ((0, 64), (64, 32))]
    torch.testing.assert_close(sum(slices), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))
    if use_triton and DEVICE.type == "cpu":
        return  # interpreted kernels are slow
    parts = [output(local, full) for local in (range(3), range(3, 4))]
    torch.testing.assert_close(sum(parts), whole, rtol=1e-4, atol=1e-4 * float(whole.abs().max()))


@pytest.mark.parametrize("backend", ["triton", "torch"])
def test_tokens_are_those_of_the_dequantized_model(backend: str, tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "gpt_oss", **SIZES | {"num_hidden_layers": 1})
    quantized = quantize(plain, tmp_path / "quantized", "mxfp4")
    config = node_config(quantized, runner="V2", attention_backend=backend, device=DEVICE.type, num_blocks=8)
    model_runner = runner.build(config, lambda stage, fraction: None)
    decoder: Any = model_runner._model.decoder  # type: ignore[attr-defined]
    assert decoder.layers[0].mlp.block._experts._down.words.dtype == torch.int16
    (result,) = Stepper(model_runner).generate([PROMPT], 3)
    assert result.output == reference_greedy(reference_model(plain), PROMPT, 3)


def test_changed_weights_are_packed_again(tmp_path: Path) -> None:
    """A reload packs other numbers, a patch of a bias the old ones; patches of packed tensors are refused."""
    directories = {}
    for seed in (0, 1):
        plain = make_checkpoint(tmp_path / f"plain-{seed}", "gpt_oss", **SIZES, seed=seed)
        directories[quantize(plain, tmp_path / f"quantized-{seed}", "mxfp4")] = plain
    first, second = directories
    expected = reference_greedy(reference_model(directories[second]), PROMPT, 3)
    built = runner.build(
        node_config(first, runner="V2", device=DEVICE.type, num_blocks=8), lambda stage, fraction: None
    )
    stepper = Stepper(built)
    name = "model.layers.1.mlp.experts.down_proj"
    packed = write_patch(tmp_path / "packed", {f"{name}_blocks.rows.0": torch.zeros(1, 96, 2, 16, dtype=torch.uint8)})
    bias = load_file(second / "model.safetensors")[f"{name}_bias"]
    for change in (
        WeightChange(str(second)),
        WeightChange(patch=str(write_patch(tmp_path / "bias", {f"{name}_bias.rows.0": bias}))),
    ):
        built.change_weights(change)
        (result,) = stepper.generate([PROMPT], 3)
        assert result.output == expected
    with pytest.raises(CheckpointError, match=f"tensor '{name}_blocks' is quantized; patches change F32"):
        built.change_weights(WeightChange(patch=str(packed)))
    built.close()


def test_experts_that_cannot_be_kept_are_refused_by_name(tmp_path: Path) -> None:
    plain = make_checkpoint(tmp_path / "plain", "gpt_oss", **SIZES)
    model = load_model_config(quantize(plain, tmp_path / "quantized", "mxfp4"))

    def problem(unquantized: tuple[str, ...] = (), **sizes: Any) -> str:
        parallel = choose_parallel_config(model, **{"pp": 1, **sizes})
        return kept_problem(model, parallel, keep_layers(model, parallel), unquantized)

    assert problem(tp=2) == ""
    assert problem(tp=4, ep=4) == ""
    assert problem(tp=4) == "tp 4 gives the experts' down_proj 16 inputs per shard, which cuts its scale blocks of 32"
    name = "model.layers.1.mlp.experts.down_proj"
    assert problem((name,), tp=1) == f"V2 needs all experts in MXFP4, but {name} is stored unquantized"
