"""On a GPU, adapters in Triton kernels and CUDA graphs compute what plain torch computes.

PYTHONPATH=.:tests/support python -m pytest -c /dev/null --noconftest tests/runner/test_lora_gpu.py
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from checkpoints import make_checkpoint, node_config
from lora_adapters import load, make_adapter, merge, with_adapters
from stepper import Running, Stepper

import runner
from pdserve.adapters.adapter import NO_ADAPTER_SLOT, AdapterLimits, AdapterSlot
from pdserve.config.device import detect_devices
from pdserve.sampling_params import SamplingParams
from runner.models.adapters.slots import AdapterSlots, LowRankPart
from runner.placement import TensorPlacement

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(900),
]

SCORED = SamplingParams(max_tokens=1, temperature=0.0, logprobs=1)
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "head_dim": 128, "num_hidden_layers": 2}
OUTPUTS = (1024, 256, 192)


def slots_of(use_triton: bool, dtype: torch.dtype, in_features: int) -> AdapterSlots:
    """Return slots of one layer with random adapters of unlike ranks; members are missing."""
    placement = TensorPlacement(torch.device("cuda"), dtype, dtype, use_triton=use_triton)
    slots = AdapterSlots(AdapterLimits(4, 64, 4), placement, max_tokens=4096)
    slots.add(in_features, OUTPUTS)
    slots.allocate()
    generator = torch.Generator().manual_seed(1)
    for slot, ranks in enumerate(((64, 8, 3), (16, 0, 16), (0, 33, 0), (0, 0, 0))):
        parts = []
        for member, (rank, size) in enumerate(zip(ranks, OUTPUTS, strict=True)):
            if rank:
                a = torch.randn(rank, in_features, generator=generator) / in_features**0.5
                b = torch.randn(rank, size, generator=generator)
                parts.append(LowRankPart(0, member, a.to(dtype), b.to(dtype)))
        slots.write(slot, parts)
    return slots


@pytest.mark.parametrize("tokens", [1, 5, 64, 700, 4096])
@pytest.mark.parametrize("in_features", [4096, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kernels_add_the_deltas_of_plain_torch(tokens: int, in_features: int, dtype: torch.dtype) -> None:
    x = torch.randn(tokens, in_features, device="cuda").to(dtype)
    base = torch.randn(tokens, sum(OUTPUTS), device="cuda").to(dtype)
    of_tokens = np.random.default_rng(2).integers(-1, 4, tokens).astype(np.int32)
    of_tokens[0] = 0
    results = []
    for use_triton in (True, False):
        slots = slots_of(use_triton, dtype, in_features)
        slots.tokens.put(of_tokens, of_tokens)
        y = base.clone()
        slots.layers[0].add_delta(x, y)
        results.append(y)
    untouched = torch.from_numpy(of_tokens < 0).cuda()
    assert torch.equal(results[0][untouched], base[untouched])
    tolerance = 1e-3 if dtype == torch.float32 else 0.1  # values have a standard deviation of up to 8
    torch.testing.assert_close(results[0], results[1], rtol=2e-2, atol=tolerance)


def generate(checkpoint: Path, adapters: list[Path], dtype: str, graphs: bool, quantization: str) -> list[Running]:
    config = node_config(
        checkpoint,
        runner="V2",
        attention_backend="triton",
        device="cuda",
        dtype=dtype,
        quantization=quantization,
        num_blocks=512,
        max_num_seqs=16,
    )
    config = msgspec.structs.replace(config, cuda_graphs=graphs, device=detect_devices("cuda", 1)[0])
    model_runner = runner.build(with_adapters(config) if adapters else config, lambda stage, fraction: None)
    stepper = Stepper(model_runner)
    for slot, path in enumerate(adapters):
        adapter = load(path, checkpoint)
        model_runner.load_adapter(adapter)
        stepper.filling.append(AdapterSlot(slot, adapter.digest))
    prompts = [tuple(range(3, 3 + length)) for length in (9, 40, 3, 100)]
    slots = (0, 1, 2, NO_ADAPTER_SLOT) if adapters else ()
    answers = stepper.generate(prompts, 6, SCORED, stagger=1, adapter_slots=slots)
    model_runner.close()
    return answers


def logprobs_of(answers: list[Running]) -> list[list[float]]:
    return [[sample.logprobs.logprob for sample in one.samples if sample.logprobs is not None] for one in answers]


@pytest.mark.parametrize(("dtype", "quantization"), [("float32", "auto"), ("bfloat16", "auto"), ("bfloat16", "fp8")])
def test_graphs_with_adapters_sample_as_steps_without_graphs(tmp_path: Path, dtype: str, quantization: str) -> None:
    checkpoint = make_checkpoint(tmp_path / "base", "llama", **SIZES)
    adapters = [make_adapter(tmp_path / kind, checkpoint, kind) for kind in ("all", "some", "patterns")]
    eager = generate(checkpoint, adapters, dtype, graphs=False, quantization=quantization)
    graphs = generate(checkpoint, adapters, dtype, graphs=True, quantization=quantization)
    tolerance = 1e-3 if dtype == "float32" else 5e-2
    for ours, theirs in zip(logprobs_of(graphs), logprobs_of(eager), strict=True):
        assert ours[0] == pytest.approx(theirs[0], abs=tolerance)
    if dtype != "float32":
        return
    assert [one.output for one in graphs] == [one.output for one in eager]
    for number, path in enumerate([*adapters, None]):
        merged = checkpoint if path is None else merge(checkpoint, path, tmp_path / f"merged-{number}")
        expected = generate(merged, [], dtype, graphs=False, quantization=quantization)[number]
        assert graphs[number].output == expected.output
