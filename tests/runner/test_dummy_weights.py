"""Random weights for benches: in place, and equal every time."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint, node_config
from torch import Tensor

import runner
from pdserve.errors import CheckpointError
from runner.loading.weights import fill_random
from runner.models.layers.weight_shard import WeightShard


def fill(tensors: dict[str, Tensor], seed: int) -> None:
    fill_random({name: WeightShard.full(tensor) for name, tensor in tensors.items()}, seed)


def tensors(dtype: torch.dtype) -> dict[str, Tensor]:
    shapes = {
        "model.embed_tokens.weight": (500, 64),
        "model.layers.0.input_layernorm.weight": (64,),
        "model.layers.0.self_attn.q_norm.weight": (32,),
        "model.layers.0.self_attn.q_proj.bias": (64,),
        "model.layers.0.mlp.up_proj.weight": (300, 64),
        "model.norm.weight": (64,),
    }
    return {name: torch.full(shape, torch.nan, dtype=dtype) for name, shape in shapes.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_norms_are_one_and_other_weights_are_normal(dtype: torch.dtype) -> None:
    filled = tensors(dtype)
    addresses = {name: tensor.data_ptr() for name, tensor in filled.items()}
    fill(filled, seed=3)
    assert {name: tensor.data_ptr() for name, tensor in filled.items()} == addresses
    for name, tensor in filled.items():
        if "norm" in name:
            assert (tensor == 1).all()
        elif tensor.dim() == 2:
            assert tensor.float().std().item() == pytest.approx(0.02, rel=0.05)
            assert abs(tensor.float().mean().item()) < 1e-3
        else:
            assert tensor.isfinite().all()


def test_equal_seeds_draw_equal_weights() -> None:
    one, same, other = (tensors(torch.float32) for _ in range(3))
    for filled, seed in ((one, 1), (same, 1), (other, 2)):
        fill(filled, seed)
    assert all(torch.equal(one[name], same[name]) for name in one)
    assert not torch.equal(one["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert not torch.equal(one["model.embed_tokens.weight"][:300], one["model.layers.0.mlp.up_proj.weight"])


def test_parts_of_packed_values_are_those_of_the_whole() -> None:
    whole = torch.zeros(4, 6, 2, 16, dtype=torch.uint8)
    part = torch.zeros(4, 3, 2, 16, dtype=torch.uint8)
    fill({"x_blocks": whole}, seed=3)
    fill_random({"x_blocks": WeightShard(part, tuple(whole.shape), 1, 3)}, 3)
    assert torch.equal(part, whole[:, 3:])
    assert whole.unique().numel() > 200


def test_a_runner_with_dummy_weights_needs_config_json_alone(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3")
    for file in checkpoint.iterdir():
        if file.name != "config.json":
            file.unlink()
    runner.build(node_config(checkpoint, load_format="dummy"), lambda stage, fraction: None).close()
    with pytest.raises(CheckpointError, match=r"has no \*.safetensors"):
        runner.build(node_config(checkpoint), lambda stage, fraction: None)
