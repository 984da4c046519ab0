"""A node's first start on a machine whose FlashInfer is not compiled: it serves at once, and the next start is faster.

    python -m pytest -m gpu -s tests/e2e/test_first_start_gpu.py

FlashInfer's cache is an empty folder. This needs nvcc, NIXL, and no flashinfer-jit-cache. It takes two to five minutes,
most of which FlashInfer compiles. The embedded model answers the held-out questions, in bfloat16.
"""

from __future__ import annotations

import importlib.util
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from fleet import MODEL_NAME, Fleet, NodeProcess

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.kernels.flashinfer_hosts import cache_folder, compiler_problem
from training.held_out import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer") is None, reason="no flashinfer"),
    pytest.mark.skipif(importlib.util.find_spec("flashinfer_jit_cache") is not None, reason="kernels are prebuilt"),
    pytest.mark.skipif(bool(compiler_problem()), reason=compiler_problem() or "compilers are here"),
    pytest.mark.timeout(600),
]

NODE = ("--served-model-name", MODEL_NAME, "--device", "cuda", "--dtype", "bfloat16", "--kv-cache-memory", "1GiB")
START = 100.0  # seconds, with Triton's kernels
COMPILE = 300.0
KERNELS = "batch_prefill"  # in the names of FlashInfer's libraries for chunks of prompts
CONCURRENT = 16  # requests


def answers(fleet: Fleet) -> list[Any]:
    """Return content and tool calls of each answer, without the random ids of calls."""

    def ask(body: dict[str, Any]) -> Any:
        message = fleet.post("/v1/chat/completions", body, timeout=120.0)["choices"][0]["message"]
        return message.get("content"), [call["function"] for call in message.get("tool_calls") or []]

    with ThreadPoolExecutor(CONCURRENT) as pool:
        return list(pool.map(ask, [case.body for case in cases(EMBEDDED_MODEL)]))


def differences(got: list[Any], expected: list[Any]) -> list[tuple[Any, Any]]:
    return [pair for pair in zip(got, expected, strict=True) if pair[0] != pair[1]]


def uses_flashinfer(node: NodeProcess) -> bool:
    (engine,) = (process for process in node.processes("engine") if "engine.process" in process.cmdline())
    return any(KERNELS in mapped.path for mapped in engine.memory_maps())


def records(environ: dict[str, str]) -> list[Path]:
    return list(cache_folder(environ).glob(f"{KERNELS}*.json"))


def test_a_first_start_serves_with_triton_and_the_next_one_with_flashinfer(tmp_path: Path) -> None:
    """Last, a prefill node at its first start hands off to a decode node with FlashInfer."""
    compiled = {"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "compiled")}
    with Fleet(NODE) as fleet:
        started = time.monotonic()
        node = fleet.start_decode(EMBEDDED_MODEL, environ=compiled)
        fleet.start_router(EMBEDDED_MODEL)
        fleet.wait_ready(START)
        print(f"first start: {time.monotonic() - started:.1f} s")
        fleet.wait_until(fleet.serves, START)
        assert records(compiled) == []
        assert not uses_flashinfer(node)
        first = answers(fleet)
        assert "compiled meanwhile" in node.output, node.output
        fleet.wait_until(lambda: bool(records(compiled)), COMPILE)
        print(f"compiled after {time.monotonic() - started:.1f} s")
        assert not uses_flashinfer(node), "from the next start on"
    with Fleet(NODE) as fleet:
        started = time.monotonic()
        node = fleet.start_decode(EMBEDDED_MODEL, environ=compiled)
        fleet.start_router(EMBEDDED_MODEL)
        fleet.wait_ready(START)
        print(f"second start: {time.monotonic() - started:.1f} s")
        fleet.wait_until(fleet.serves, START)
        assert uses_flashinfer(node)
        assert differences(answers(fleet), first) == []
    with Fleet(NODE) as fleet:
        prefill = fleet.start_prefill(EMBEDDED_MODEL, environ={"FLASHINFER_WORKSPACE_BASE": str(tmp_path / "empty")})
        decode = fleet.start_decode(EMBEDDED_MODEL, ("--handoff-min-tokens", "0"), compiled)
        fleet.start_router(EMBEDDED_MODEL)
        fleet.wait_ready(START)
        fleet.wait_until(fleet.serves, START)
        assert (uses_flashinfer(prefill), uses_flashinfer(decode)) == (False, True)
        assert differences(answers(fleet), first) == []
        assert decode.counter("handoffs") == len(first)
        assert decode.counter("handoff_failures") == 0
