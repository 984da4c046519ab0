"""Triton is tried, not looked up: what a host cannot run keeps V2 away from the whole node."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.attention_backends import Platform
from pdserve.config.device import detect_devices
from pdserve.config.kernels.triton_hosts import forget_success, try_triton, without_triton
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.errors import ConfigError

NO_GPU = DeviceInfo(kind="cuda", index=63, name="a GPU that is not there", memory=80 << 30)
GPU_PLATFORM = Platform(device="cuda", has_triton=True, has_flashinfer=True)
PROBLEMS = {"rank 1 on beta": "a tiny Triton kernel does not run: no C compiler"}


@pytest.fixture(autouse=True)
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    try_triton.cache_clear()
    yield
    try_triton.cache_clear()


def config_of(environ: dict[str, str], platform: Platform | None = GPU_PLATFORM) -> NodeConfig:
    options = NodeOptions(model=str(EMBEDDED_MODEL), dtype="bfloat16", load_format="dummy")
    return resolve(options, NO_GPU, environ, platform)


def test_a_success_is_remembered_on_this_host_until_it_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    def try_again() -> str:
        try_triton.cache_clear()
        return try_triton(cpu, interpreted=True)

    cpu = detect_devices("cpu", 1)[0]
    assert try_again() == ""
    monkeypatch.setattr(sys, "executable", "/bin/false")  # from now on, every trial fails
    assert try_again() == "", "success is remembered from one process to the next"
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(socket, "gethostname", lambda: "a host with the same home directory")
        assert "does not run" in try_again()
    assert try_again() == ""
    forget_success()
    assert "does not run" in try_again()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_kernels_in_tritons_cache_do_not_hide_a_broken_compiler(tmp_path: Path) -> None:
    import triton

    def probe(**environ: str) -> int:
        command = [sys.executable, "-P", "-m", "runner.kernels.probe", "cuda:0"]
        return subprocess.run(command, env=os.environ | environ, timeout=patience(120)).returncode

    cache = tmp_path / "triton"
    broken = tmp_path / "ptxas"
    broken.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exec {triton.knobs.nvidia.ptxas.path} --version\nexit 1\n')
    broken.chmod(0o755)
    assert probe(TRITON_CACHE_DIR=str(cache)) == 0
    assert [entry for entry in cache.iterdir() if entry.name.startswith("pdserve-probe-")] == []
    assert probe(TRITON_CACHE_DIR=str(cache), TRITON_PTXAS_PATH=str(broken)) == 1


@pytest.mark.slow
def test_an_installed_triton_whose_kernels_fail_is_not_used() -> None:
    config = config_of({}, platform=None)
    assert (config.decision.runner, config.attention_backend) == ("V1", "torch")
    (reason,) = config.decision.reasons
    assert reason.startswith("Triton kernels: a tiny Triton kernel does not run: ")
    with pytest.raises(ConfigError, match="V2 cannot run this: Triton kernels: a tiny Triton kernel does not run"):
        config_of({VARIABLE: "1"}, platform=None)


def test_a_rank_without_triton_keeps_v2_away_from_the_whole_node() -> None:
    config = config_of({})
    assert without_triton(config, {}) == config
    assert config.decision.runner == "V2"
    changed = without_triton(config, PROBLEMS)
    assert (changed.decision.runner, changed.attention_backend, changed.cuda_graphs) == ("V1", "torch", False)
    assert changed.decision.reasons == (
        "Triton kernels: rank 1 on beta: a tiny Triton kernel does not run: no C compiler",
    )


def test_a_forced_v2_names_the_rank_and_host_that_cannot_run_it() -> None:
    with pytest.raises(ConfigError, match=rf"{VARIABLE}=1, but V2 cannot run .* rank 1 on beta: .* no C compiler"):
        without_triton(config_of({VARIABLE: "1"}), PROBLEMS)


def test_a_forced_v1_only_changes_its_attention_backend() -> None:
    config = config_of({VARIABLE: "0"})
    changed = without_triton(config, PROBLEMS)
    assert (config.attention_backend, changed.attention_backend) == ("flashinfer", "torch")
    assert changed.decision == config.decision
