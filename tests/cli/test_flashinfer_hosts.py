"""A node starts without a compiler: Triton's attention where FlashInfer's kernels are not compiled on a host yet."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from cli.doctor.checks import check_attention
from cli.doctor.findings import Level
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config import resolve
from pdserve.config.attention_backends import FlashInferKernel, Platform, flashinfer_kernels
from pdserve.config.kernels import flashinfer_hosts
from pdserve.config.kernels.flashinfer_hosts import (
    cache_folder,
    compiler_problem,
    missing_kernels,
    record_compiled,
    with_compiled_kernels,
    without_flashinfer,
)
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolution import kernels as choices
from pdserve.kv.layout import FP8_E4M3
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.latent import LatentConfig
from pdserve.model.model_config import ModelConfig, load_model_config

HOPPER = (9, 0)
ADA = (8, 9)
H200 = DeviceInfo(kind="cuda", index=0, name="NVIDIA H200", memory=141 << 30, capability=HOPPER)
WITH_ALL = Platform(device="cuda", has_triton=True, has_flashinfer=True)
KERNEL = FlashInferKernel("bfloat16", 128, 128, windowed=False)
WINDOWED = FlashInferKernel("bfloat16", 128, 128, windowed=True)

Environ = dict[str, str]
Kernels = tuple[FlashInferKernel, ...]


@pytest.fixture
def environ(tmp_path: Path) -> Environ:
    """A host with all compilers and an empty cache."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("nvcc", "ninja", "c++"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    return {"PATH": str(programs), "FLASHINFER_WORKSPACE_BASE": str(tmp_path / "cache")}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    path = tmp_path / "kernel.so"
    path.touch()
    return path


# ---------------------------------------------------------------- kernels of a model


def test_a_kernel_has_flashinfers_name_of_its_library() -> None:
    """The names in the cache of FlashInfer 0.6.13, where each is a folder."""
    common = "batch_prefill_with_kv_cache_dtype_q_bf16_dtype_kv_bf16_dtype_o_bf16_dtype_idx_i32_"
    rest = "posenc_0_use_swa_False_use_logits_cap_False_f16qk_False"
    assert KERNEL.library(HOPPER) == f"{common}head_dim_qk_128_head_dim_vo_128_{rest}_sm90"
    assert KERNEL.library(ADA) == f"{common}head_dim_qk_128_head_dim_vo_128_{rest}"
    assert "dtype_q_f16_" in FlashInferKernel("float16", 64, 64, windowed=False).library(ADA)
    assert "use_swa_True" in WINDOWED.library(HOPPER)


def model_with(*specs: AttentionSpec, latent: LatentConfig | None = None) -> ModelConfig:
    model = load_model_config(EMBEDDED_MODEL, "auto")
    return msgspec.structs.replace(model, head_dim=128, attention=specs, latent=latent)


PLAIN = AttentionSpec(scale=1.0)
WINDOW = AttentionSpec(scale=1.0, window=100)
SINKS = AttentionSpec(scale=1.0, has_sinks=True)
LATENT = LatentConfig(
    q_lora_rank=0, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128, rope_interleave=True
)


@pytest.mark.parametrize(
    ("model", "kv_is_fp8", "kernels"),
    [
        (model_with(PLAIN, PLAIN), False, (KERNEL,)),
        (model_with(PLAIN, WINDOW, msgspec.structs.replace(WINDOW, window=200)), False, (KERNEL, WINDOWED)),
        (model_with(PLAIN, WINDOW), True, (KERNEL,)),
        (model_with(SINKS, SINKS), False, ()),
        (model_with(PLAIN, latent=LATENT), False, (FlashInferKernel("bfloat16", 192, 128, windowed=False),)),
    ],
    ids=["plain", "windows", "windows and FP8", "sinks", "latents"],
)
def test_kernels_that_a_model_needs(model: ModelConfig, kv_is_fp8: bool, kernels: tuple[FlashInferKernel, ...]) -> None:
    assert flashinfer_kernels(model, "bfloat16", kv_is_fp8) == kernels


# ---------------------------------------------------------------- records of compiled kernels


def test_a_recorded_kernel_is_compiled_for_its_gpu(environ: Environ, library: Path) -> None:
    assert missing_kernels((KERNEL, WINDOWED), HOPPER, environ) == (KERNEL, WINDOWED)
    record_compiled(KERNEL, HOPPER, library, environ)
    assert missing_kernels((KERNEL, WINDOWED), HOPPER, environ) == (WINDOWED,)
    assert missing_kernels((KERNEL,), (9, 1), environ) == (KERNEL,), "another architecture"


@pytest.mark.parametrize("change", ["flashinfer", "torch", "nvcc", "variable", "environment", "installed anew"])
def test_a_kernel_is_missing_once_flashinfer_would_compile_it_anew(
    change: str, environ: Environ, library: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    package = tmp_path / "flashinfer" / "__init__.py"
    package.parent.mkdir()
    package.touch()
    record_compiled(KERNEL, HOPPER, library, environ)
    assert missing_kernels((KERNEL,), HOPPER, environ) == ()
    if change in ("flashinfer", "torch"):
        versions = {"flashinfer": "flashinfer-python", "torch": "torch"}
        monkeypatch.setattr(flashinfer_hosts, "version", lambda name: "9.9" if name == versions[change] else "1")
    elif change == "nvcc":
        environ["CUDA_HOME"] = "/opt/cuda-99"
    elif change == "variable":
        environ["FLASHINFER_EXTRA_CUDAFLAGS"] = "-lineinfo"
    elif change == "environment":
        monkeypatch.setattr(sys, "prefix", "/another/venv")
    else:
        os.utime(package, (1, 1))
    assert missing_kernels((KERNEL,), HOPPER, environ) == (KERNEL,)


def test_a_record_needs_its_library(environ: Environ, library: Path) -> None:
    record_compiled(KERNEL, HOPPER, library, environ)
    library.unlink()
    assert missing_kernels((KERNEL,), HOPPER, environ) == (KERNEL,)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"identity": {}, "library": "/bin/sh"}'])
def test_a_damaged_record_counts_as_none(environ: Environ, library: Path, content: bytes) -> None:
    record_compiled(KERNEL, HOPPER, library, environ)
    (record,) = cache_folder(environ).glob("*.json")
    assert json.loads(record.read_bytes())["library"] == str(library)
    record.write_bytes(content)
    assert missing_kernels((KERNEL,), HOPPER, environ) == (KERNEL,)
    record_compiled(KERNEL, HOPPER, library, environ)
    assert missing_kernels((KERNEL,), HOPPER, environ) == ()


def test_kernels_of_the_package_with_compiled_ones_are_not_missing(
    environ: Environ, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = KERNEL.library(HOPPER)
    package = tmp_path / "packages" / "flashinfer_jit_cache"
    (package / "jit_cache" / name).mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "jit_cache" / name / f"{name}.so").touch()
    monkeypatch.syspath_prepend(package.parent)
    assert missing_kernels((KERNEL, WINDOWED), HOPPER, environ) == (WINDOWED,)


# ---------------------------------------------------------------- compilers


def test_a_host_with_all_programs_can_compile(environ: Environ) -> None:
    assert compiler_problem(environ) == ""


def test_missing_compilers_are_named(environ: Environ, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    assert compiler_problem(environ | {"CUDA_HOME": "/nowhere"}) == "no nvcc"
    assert compiler_problem(environ | {"CXX": "/nowhere/g++"}) == "no C++ compiler"
    assert compiler_problem({"PATH": "/nowhere", "CUDA_PATH": "/nowhere"}) == "no nvcc, ninja, C++ compiler"


def test_ninja_is_found_beside_python(environ: Environ, monkeypatch: pytest.MonkeyPatch) -> None:
    """A virtual environment that is not activated has it there."""
    folder = Path(environ["PATH"])
    other = folder.with_name("venv")
    other.mkdir()
    (folder / "ninja").rename(other / "ninja")
    monkeypatch.setattr(sys, "executable", str(other / "python"))
    assert compiler_problem(environ) == ""


# ---------------------------------------------------------------- the backend of a start


def config_of(**options: Any) -> NodeConfig:
    asked = NodeOptions(**{"model": str(EMBEDDED_MODEL), "dtype": "bfloat16", "load_format": "dummy", **options})
    return resolve.resolve(asked, H200, {}, WITH_ALL)


CHOSEN = config_of()


@pytest.mark.parametrize(
    ("missing", "problem", "backend", "compiles", "words"),
    [
        ((), "", "flashinfer", (), "the fastest on a GPU"),
        ((KERNEL,), "", "triton", (KERNEL,), "not compiled here yet.*from the next start on"),
        ((KERNEL,), "no nvcc", "triton", (), "cannot be: no nvcc; install flashinfer-jit-cache"),
    ],
    ids=["compiled", "first start", "no compiler"],
)
def test_backend_of_a_start(
    missing: tuple[FlashInferKernel, ...],
    problem: str,
    backend: str,
    compiles: tuple[FlashInferKernel, ...],
    words: str,
) -> None:
    config = with_compiled_kernels(CHOSEN, missing, problem)
    assert (config.attention_backend, config.uncompiled_kernels) == (backend, compiles)
    (reason,) = (choice for choice in config.choices if choice.startswith("attention_backend="))
    assert reason.startswith(f"attention_backend={backend}: ")
    assert re.search(words, reason)
    assert len(config.choices) == len(CHOSEN.choices)


def test_a_first_start_has_the_runner_and_the_kv_of_later_ones() -> None:
    """So a prefill node at its first start hands off to a decode node with FlashInfer, and stored KV stays valid."""
    first = with_compiled_kernels(CHOSEN, (KERNEL,), "")
    assert first.compat_fields == CHOSEN.compat_fields
    assert first.kv_version == CHOSEN.kv_version
    assert first.kv_layout == CHOSEN.kv_layout
    assert (first.decision, first.cuda_graphs) == (CHOSEN.decision, CHOSEN.cuda_graphs)


@pytest.fixture
def here(environ: Environ, monkeypatch: pytest.MonkeyPatch) -> Environ:
    """The environment of a host whose Triton kernels run and whose packages are all installed."""
    monkeypatch.setattr(choices, "find_platform", lambda device, environ: WITH_ALL)
    monkeypatch.setattr(choices, "try_triton", lambda device, interpreted: "")
    return environ


def resolved(environ: Environ, **options: Any) -> NodeConfig:
    asked = NodeOptions(**{"model": str(EMBEDDED_MODEL), "dtype": "bfloat16", "load_format": "dummy", **options})
    return resolve.resolve(asked, H200, environ)


def test_the_start_behind_the_compiler_uses_flashinfer(here: Environ, library: Path) -> None:
    first = resolved(here)
    assert first.attention_backend == "triton"
    for kernel in first.uncompiled_kernels:
        record_compiled(kernel, HOPPER, library, here)
    second = resolved(here)
    assert (second.attention_backend, second.uncompiled_kernels) == ("flashinfer", ())
    assert second.compat_fields == first.compat_fields


@pytest.mark.parametrize("backend", ["flashinfer", "triton"])
def test_a_named_backend_is_used_at_the_first_start(here: Environ, backend: str) -> None:
    config = resolved(here, attention_backend=backend)
    assert (config.attention_backend, config.uncompiled_kernels) == (backend, ())


def test_doctor_says_what_a_first_start_lacks(here: Environ, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    finding = check_attention(resolved(here))
    assert (finding.level, finding.remedy.startswith("a node compiles it")) == (Level.NOTE, True)
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    finding = check_attention(resolved(dict(os.environ)))
    assert finding.text.endswith("cannot be: no nvcc")
    assert check_attention(CHOSEN).text == "flashinfer"


def test_an_fp8_cache_needs_no_windowed_kernels(here: Environ, library: Path) -> None:
    config = resolved(here, kv_cache_dtype=FP8_E4M3)
    assert all(not kernel.windowed for kernel in config.uncompiled_kernels)


def test_a_host_without_the_kernels_keeps_flashinfer_from_all_ranks() -> None:
    assert without_flashinfer(CHOSEN, []) == CHOSEN
    config = without_flashinfer(CHOSEN, ["beta"])
    assert config == msgspec.structs.replace(CHOSEN, attention_backend="triton")
    named = config_of(attention_backend="flashinfer")
    assert without_flashinfer(named, ["beta"]) == named, "its ranks wait for the compiler"
    torch = msgspec.structs.replace(CHOSEN, attention_backend="torch")
    assert without_flashinfer(torch, ["beta"]) == torch
