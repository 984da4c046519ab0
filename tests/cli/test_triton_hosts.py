"""Triton is tried, not looked up: what a host cannot run keeps V2 away from the whole node."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.attention_backends import Platform
from pdserve.config.device import detect_devices
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.config.triton_hosts import try_triton, without_triton
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


def test_a_kernel_that_runs_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = detect_devices("cpu", 1)[0]
    assert try_triton(cpu, interpreted=True) == ""
    try_triton.cache_clear()
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert try_triton(cpu, interpreted=True) == "", "success is remembered from one process to the next"


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
    found = without_triton(config, PROBLEMS)
    assert (found.decision.runner, found.attention_backend, found.cuda_graphs) == ("V1", "torch", False)
    assert found.decision.reasons == (
        "Triton kernels: rank 1 on beta: a tiny Triton kernel does not run: no C compiler",
    )


def test_a_forced_v2_names_the_rank_and_host_that_cannot_run_it() -> None:
    with pytest.raises(ConfigError, match=rf"{VARIABLE}=1, but V2 cannot run .* rank 1 on beta: .* no C compiler"):
        without_triton(config_of({VARIABLE: "1"}), PROBLEMS)


def test_a_forced_v1_only_changes_its_attention_backend() -> None:
    config = config_of({VARIABLE: "0"})
    found = without_triton(config, PROBLEMS)
    assert (config.attention_backend, found.attention_backend) == ("flashinfer", "torch")
    assert found.decision == config.decision
