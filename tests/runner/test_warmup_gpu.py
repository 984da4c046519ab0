"""On a GPU no request waits for a compiler: building the runner compiles everything.

With pytest and transformers as the only development tools:

    PYTHONPATH=.:tests/support python -m pytest -c /dev/null --noconftest tests/runner/test_warmup_gpu.py
"""

from __future__ import annotations

import gc
import importlib.util
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
import triton
from checkpoints import make_checkpoint, node_config
from stepper import GREEDY, Stepper

import runner
from pdserve.records import DigestOrder, StepPlan
from pdserve.sampling_params import SamplingParams
from runner.v1.runner import RunnerV1
from runner.v2.runner import RunnerV2

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(900),
]

needs_flashinfer = pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no flashinfer")

VOCABULARY = 5000  # more than one part for the sampling kernels
MAX_SEQS = 24
MAX_TOKENS = 2048  # tokens per step

#: Heads that FlashInfer supports, rows that the single-token product supports, layers with and without a window.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("qwen3", {"use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}),
    "plain": ("llama", {"tie_word_embeddings": True}),
    "recurrent": (
        "qwen3_5_text",
        {
            "layer_types": ["linear_attention", "full_attention"],
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
        },
    ),
}


@dataclass
class Compiled:
    """Kernels and processes of compilers while being watched; loading from a cache on disk counts."""

    kernels: list[str] = field(default_factory=list)  # Triton kernels
    processes: list[str] = field(default_factory=list)  # compiler commands; FlashInfer runs one also to load a kernel


_watching: list[Compiled] = []


def _on_audit_event(event: str, args: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        for compiled in _watching:
            compiled.processes.append(str(args[:2]))


sys.addaudithook(_on_audit_event)


@contextmanager
def watched() -> Iterator[Compiled]:
    compiled = Compiled()

    def on_compile(**facts: Any) -> None:
        compiled.kernels.append(facts["repr"])

    _watching.append(compiled)
    triton.knobs.runtime.jit_post_compile_hook = on_compile
    try:
        yield compiled
    finally:
        triton.knobs.runtime.jit_post_compile_hook = None
        _watching.remove(compiled)


def forget_compiled() -> None:
    """Drop the compiled kernels of this process; kernels on disk stay."""
    for kernel in gc.get_objects():
        if type(kernel) is triton.runtime.JITFunction:
            kernel.device_caches.clear()
    if importlib.util.find_spec("flashinfer") is not None:
        from flashinfer.prefill import get_batch_prefill_module

        get_batch_prefill_module.cache_clear()


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    sizes: dict[str, Any] = {"hidden_size": 512, "intermediate_size": 768, "num_hidden_layers": 2, "head_dim": 128}
    return {
        name: make_checkpoint(
            tmp_path_factory.mktemp(name), family, dtype="bfloat16", vocab_size=VOCABULARY, **sizes, **overrides
        )
        for name, (family, overrides) in MODELS.items()
    }


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(3, VOCABULARY), k=length)


def sampled(**fields: Any) -> SamplingParams:
    return SamplingParams(**{"max_tokens": 1, "temperature": 0.8, "seed": 5, **fields})


EVERYTHING = sampled(
    min_tokens=2,
    top_k=50,
    top_p=0.9,
    min_p=0.01,
    repetition_penalty=1.1,
    presence_penalty=0.2,
    frequency_penalty=0.2,
    logit_bias={7: 2.0, 9: -1.0},
    stop_token_ids=(11, 12),
    logprobs=20,
)
KINDS = [
    GREEDY,
    sampled(),
    sampled(top_k=5),
    sampled(top_p=0.5),
    sampled(min_p=0.1),
    sampled(presence_penalty=0.5),
    sampled(logit_bias={1: 1.0}),
    sampled(min_tokens=1),
    sampled(logprobs=0),
    msgspec.structs.replace(GREEDY, logprobs=5),
    EVERYTHING,
]


def short(stepper: Stepper) -> None:
    stepper.generate([prompt_of(5)], 4)


def a_single_token(stepper: Stepper) -> None:
    stepper.generate([prompt_of(1)], 3)


def long_in_chunks(stepper: Stepper) -> None:
    stepper.generate([prompt_of(2900)], 3, chunk=700)


def longest_in_one_step(stepper: Stepper) -> None:
    stepper.generate([prompt_of(MAX_TOKENS)], 3, chunk=MAX_TOKENS)


def many(stepper: Stepper) -> None:
    stepper.generate([prompt_of(7 + 3 * index) for index in range(MAX_SEQS)], 4)


def prompts_among_others(stepper: Stepper) -> None:
    lengths = [600, 3, 900, 40, 17, 1300, 1, 64]
    stepper.generate([prompt_of(length) for length in lengths], 9, chunk=800, stagger=1)


def every_way_to_sample(stepper: Stepper) -> None:
    for sampling in KINDS:
        for count in (1, 2, 5):
            stepper.generate([prompt_of(20, seed) for seed in range(count)], 3, sampling)
    for seed, sampling in enumerate(KINDS):
        stepper.add(prompt_of(10 + seed), sampling)
    for _ in range(3):
        stepper.step()
    for seq in list(stepper.live):
        stepper.finish(seq)


def choices(stepper: Stepper) -> None:
    for n in (2, 3, 8):
        for sampling in (sampled(n=n), msgspec.structs.replace(EVERYTHING, n=n)):
            prompt = prompt_of(30, n)
            first = stepper.add(prompt, sampling)
            stepper.step(num_samples=n)
            drawn = [sample.token_id for sample in stepper.live[first].others[0]]
            for choice in range(1, n):
                stepper.add([*prompt, drawn[choice]], sampling, prompt_len=len(prompt), choice=choice)
            for _ in range(3):
                stepper.step()
            for seq in list(stepper.live):
                stepper.finish(seq)


def digests(stepper: Stepper) -> None:
    for count in (1, 2, 16):
        order = DigestOrder(tuple(range(count)), count * stepper.runner.kv_layout.block_size - 1)
        stepper.runner.launch(StepPlan(-1, digests=(order, order))).result()


REQUESTS: list[Callable[[Stepper], None]] = [
    short,
    a_single_token,
    long_in_chunks,
    longest_in_one_step,
    many,
    prompts_among_others,
    every_way_to_sample,
    choices,
    digests,
]


def build(checkpoint: Path, version: str, backend: str, graphs: bool, measured: bool) -> RunnerV1 | RunnerV2:
    config = node_config(
        checkpoint,
        runner=version,
        attention_backend=backend,
        device="cuda",
        dtype="bfloat16",
        num_blocks=1024,
        max_model_len=4000,
        max_num_seqs=MAX_SEQS,
        max_batch_tokens=MAX_TOKENS,
        state_slots=2 * MAX_SEQS,
        gpu_memory_utilization=0.1,
    )
    config = msgspec.structs.replace(config, cuda_graphs=graphs, measure_kv_memory=measured)
    model_runner = runner.build(config, lambda stage, fraction: None)
    assert isinstance(model_runner, RunnerV1 | RunnerV2)
    return model_runner


@pytest.mark.parametrize("measured", [False, True], ids=["given-cache", "measured-cache"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    ("version", "backend", "graphs"),
    [
        pytest.param("V2", "triton", True, id="V2-triton-graphs"),
        pytest.param("V2", "triton", False, id="V2-triton"),
        pytest.param("V2", "flashinfer", True, id="V2-flashinfer-graphs", marks=needs_flashinfer),
        pytest.param("V2", "flashinfer", False, id="V2-flashinfer", marks=needs_flashinfer),
        pytest.param("V1", "triton", False, id="V1-triton"),
        pytest.param("V1", "flashinfer", False, id="V1-flashinfer", marks=needs_flashinfer),
    ],
)
def test_no_request_compiles_anything(
    version: str, backend: str, graphs: bool, model: str, measured: bool, checkpoints: dict[str, Path]
) -> None:
    forget_compiled()
    with watched() as at_start:
        model_runner = build(checkpoints[model], version, backend, graphs, measured)
    assert at_start.kernels, "the hooks see no compilation"
    assert not model_runner._cache.tensor.any(), "warm-up left KV behind"
    stepper = Stepper(model_runner)
    compiled_by = {}
    for requests in REQUESTS:
        with watched() as compiled:
            requests(stepper)
        if compiled != Compiled():
            compiled_by[requests.__name__] = compiled
    model_runner.close()
    assert not compiled_by
