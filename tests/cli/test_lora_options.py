"""Flags of adapters, and the limits that follow from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import make_checkpoint

from pdserve.adapters.adapter import AdapterLimits
from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions, adapter_source
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError

CPU = DeviceInfo(kind="simulated", index=0, name="simulated", memory=1 << 34)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("base") / "model", "qwen3", num_hidden_layers=1)


def limits(model: Path, **options: Any) -> AdapterLimits | None:
    return resolve(NodeOptions(model=str(model), engine="simulated", **options), CPU, {}).adapters


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, None),
        ({"lora": ("a=/x",)}, AdapterLimits(1, 16, 2)),
        ({"lora": ("a=/x", "b=/y"), "max_lora_rank": 64}, AdapterLimits(2, 64, 4)),
        ({"lora": ("a=/x", "b=/y", "c=/z"), "max_loras": 1}, AdapterLimits(1, 16, 3)),
        ({"max_loras": 4}, AdapterLimits(4, 16, 8)),
        ({"max_loras": 4, "max_cpu_loras": 5}, AdapterLimits(4, 16, 5)),
    ],
)
def test_limits_follow_from_the_adapters_that_are_given(
    model: Path, options: dict[str, Any], expected: AdapterLimits | None
) -> None:
    assert limits(model, **options) == expected


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"lora": ("a=/x", "a=/y")}, "'a' twice"),
        ({"max_loras": 4, "max_cpu_loras": 3}, "max_cpu_loras 3 is less than the 4"),
        ({"max_loras": 65}, "at most 64"),
        ({"max_loras": 1, "max_lora_rank": 513}, "at most 512"),
    ],
)
def test_options_that_do_not_go_together_are_named(model: Path, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        limits(model, **options)


def test_adapters_are_written_as_pdserve_and_as_vllm_write_them() -> None:
    assert adapter_source("a=/x/y=z") == "a=/x/y=z"
    assert adapter_source('{"name": "a", "path": "/x", "base_model_name": "m"}') == "a=/x"
    for text in ("a", "=x", "a=", '{"name": "a"}', "{"):
        with pytest.raises(ConfigError, match="write NAME=DIR"):
            adapter_source(text)
