"""Shapes and rows of ``bench/both_runners.py``."""

from __future__ import annotations

from pathlib import Path

import both_runners
import pytest
from both_runners import BATCHES, COMPILING_AT_ONCE, MEASURED, PROMPTS, RUNNERS, Measured, row_of
from make_checkpoint import make

from pdserve.config.attention_backends import Platform
from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import weight_bytes
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.model.families import FAMILIES

H200 = DeviceInfo(kind="cuda", index=0, name="NVIDIA H200", memory=141 << 30, capability=(9, 0))
WITH_ALL = Platform(device="cuda", has_triton=True, has_flashinfer=True)


@pytest.mark.parametrize("measured", MEASURED, ids=lambda measured: measured.shape)
def test_both_runners_have_the_shape_on_one_card(measured: Measured, tmp_path: Path) -> None:
    for num_layers in (measured.num_layers, measured.few_layers):
        model = tmp_path / str(num_layers)
        make(model, measured.config(num_layers, {}), weights=False)
        for name, variable in RUNNERS.items():
            options = NodeOptions(model=str(model), load_format="dummy", max_model_len=16384, speculate="off")
            config = resolve(options, H200, {VARIABLE: variable}, WITH_ALL)
            assert config.decision.runner == name
            assert config.attention_backend == measured.backend
            assert weight_bytes(config.model, config.position, "bfloat16") < 80 << 30


def test_the_largest_shapes_that_compile_at_once_fit_on_one_card(tmp_path: Path) -> None:
    sizes = []
    for measured in MEASURED:
        make(tmp_path / measured.shape, measured.config(measured.few_layers, {}), weights=False)
        options = NodeOptions(model=str(tmp_path / measured.shape), load_format="dummy", kv_cache_memory=1 << 30)
        config = resolve(options, H200, {VARIABLE: "1"}, WITH_ALL)
        sizes.append(weight_bytes(config.model, config.position, "bfloat16") + config.kv_layout.total_bytes)
    assert sum(sorted(sizes)[-COMPILING_AT_ONCE:]) < 100 << 30


def test_every_architecture_of_v2_without_a_figure_of_v1_is_measured() -> None:
    unmeasured = {name for name, family in FAMILIES.items() if not (family.v2_is_faster or family.v2_figures_of)}
    assert unmeasured <= {measured.architecture for measured in MEASURED}


def test_a_row_marks_the_lower_of_two_unlike_figures() -> None:
    v1 = [5.449, 123.44, 7.2, 6.0, 100.0]
    v2 = [0.8571, 120.04, 7.19, 6.2, 99.5]
    assert len(v1) == len(BATCHES) + len(PROMPTS)
    assert row_of(both_runners.MEASURED[0].label, v1, v2) == (
        "| Qwen3 0.6B, bf16 (`Qwen3ForCausalLM`) | 5.45 / **0.857** | 123.4 / **120.0** | 7.2 / 7.19 | **6** / 6.2 "
        "| 100.0 / 99.5 |"
    )
