"""A weight format is one linear method and one entry: a toy format of int8 rows with a scale each."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint, node_config, reference_greedy, reference_model
from safetensors.torch import load_file, save_file
from stepper import Stepper
from torch import Tensor

import runner
from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import choose_parallel_config, num_parameters, weight_bytes
from pdserve.config.resolve import resolve
from pdserve.model.model_config import load_model_config
from pdserve.model.quantization.weight_formats import WEIGHT_FORMATS, WeightFormat
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards
from runner.models.quantization import LinearMethod
from runner.placement import TensorPlacement

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


class Int8RowsLinearMethod(LinearMethod):
    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        placement: TensorPlacement,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        assert options is not None
        assert not bias
        assert options["bits"] == 8
        self.bias = None
        self.weight = torch.empty(out_features, in_features, dtype=torch.int8, device=placement.device)
        self.scale = torch.empty(out_features, 1, dtype=torch.float32, device=placement.device)

    def weight_shards(
        self, first_output: int, outputs: ShardRange, inputs: ShardRange, rows: Tensor | None = None
    ) -> WeightShards:
        mine = slice(first_output, first_output + outputs.size)
        dim, start = (0, outputs.start) if inputs.size == inputs.full_size else (1, inputs.start)
        yield "weight", WeightShard(self.weight[mine], (outputs.full_size, inputs.full_size), dim, start, rows=rows)
        yield "weight_scale", WeightShard(self.scale[mine], (outputs.full_size, 1), 0, outputs.start, rows=rows)

    def process_weights_after_loading(self) -> None:
        self.dequantized = self.weight.float() * self.scale

    def restore_weights(self) -> None:
        """Nothing: the weight stays."""

    def apply(self, x: Tensor) -> Tensor:
        return x @ self.dequantized.t()


@pytest.fixture
def int8_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("runner.models.quantization.int8_rows")
    module.Int8RowsLinearMethod = Int8RowsLinearMethod  # type: ignore[attr-defined]
    monkeypatch.setitem(__import__("sys").modules, module.__name__, module)
    entry = WeightFormat("int8_rows.Int8RowsLinearMethod", lambda dtype: 1.0)
    monkeypatch.setitem(WEIGHT_FORMATS, "int8_rows", entry)


def quantize(directory: Path) -> Path:
    """Write the int8 checkpoint of one in float32, which is rounded to the same numbers; return its directory."""
    quantized = directory.with_name("int8")
    quantized.mkdir()
    rounded = {}
    int8 = {}
    for name, tensor in load_file(directory / "model.safetensors").items():
        rounded[name] = int8[name] = tensor
        if name.split(".")[-2] in LINEARS:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            int8[name] = (tensor / scale).round().to(torch.int8)
            int8[f"{name}_scale"] = scale
            rounded[name] = int8[name].float() * scale
    save_file(rounded, directory / "model.safetensors", {"format": "pt"})
    save_file(int8, quantized / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "int8_rows", "bits": 8}
    (quantized / "config.json").write_text(json.dumps(config))
    return quantized


@pytest.mark.usefixtures("int8_rows")
def test_a_registered_format_is_loaded_and_computed(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3")
    quantized = quantize(directory)
    prompt = list(range(5, 40))
    model_runner = runner.build(node_config(quantized), lambda stage, fraction: None)
    (result,) = Stepper(model_runner).generate([prompt], 6)
    assert result.output == reference_greedy(reference_model(directory), prompt, 6)


@pytest.mark.usefixtures("int8_rows")
def test_the_format_decides_the_bytes_of_weights_and_the_runner(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "qwen3")
    plain = load_model_config(directory)
    quantized = load_model_config(quantize(directory))
    position = choose_parallel_config(plain, pp=1, tp=1).position(0)
    tables = 2 * plain.vocab_size * plain.hidden_size
    assert weight_bytes(plain, position, "float32") == 4 * num_parameters(plain, position)
    assert weight_bytes(quantized, position, "float32") == num_parameters(plain, position) + 3 * tables
    options = NodeOptions(model=str(directory.with_name("int8")), device="cpu", kv_cache_memory=1 << 22)
    config = resolve(options, DeviceInfo(kind="cpu", index=0, name="cpu", memory=1 << 34), {})
    assert config.decision.runner == "V1"
    assert any("quantization" in reason for reason in config.decision.reasons)
