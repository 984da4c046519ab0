"""Each rank fills its shard of the model and reads no more."""

from __future__ import annotations

import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.config.parallel import RankPosition, choose_parallel_config, num_parameters
from pdserve.errors import CheckpointError
from pdserve.model.model_config import load_model_config
from runner.loading.decoder_weights import DecoderWeights
from runner.loading.weights import fill_random, fill_shard, open_weights
from runner.models.layers.weight_shard import WeightShard
from runner.models.registry import decoder_class
from runner.placement import TensorPlacement

CPU = TensorPlacement(torch.device("cpu"), torch.float32, torch.float32)


def position_of(directory: Path, pp: int, tp: int, rank: int) -> RankPosition:
    return choose_parallel_config(load_model_config(directory), pp, tp).position(rank)


def weights_at(directory: Path, position: RankPosition) -> DecoderWeights:
    world: Any = SimpleNamespace(position=position, device=CPU.device)  # building a decoder needs no other rank
    model = load_model_config(directory)
    return DecoderWeights(decoder_class(model.architecture)(model, world, CPU))


def loaded_shards(directory: Path, position: RankPosition) -> dict[str, WeightShard]:
    model_weights = weights_at(directory, position)
    shards = dict(model_weights.shards())
    with open_weights(directory, load_model_config(directory), CPU.device, CPU.stored) as stored:
        tensors, names = model_weights.find(directory, stored)
        for name in names:
            fill_shard(directory, name, shards[name], tensors[name], at_once=1 << 30)
    return shards


def random_shards(directory: Path, position: RankPosition) -> dict[str, WeightShard]:
    shards = dict(weights_at(directory, position).shards())
    fill_random(shards, seed=4)
    return shards


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("fill", [loaded_shards, random_shards])
def test_shards_of_all_ranks_make_up_the_model(tmp_path: Path, fill: Any, tied: bool) -> None:
    options: dict[str, Any] = {"attention_bias": True, "tie_word_embeddings": tied, "vocab_size": 130}
    directory = make_checkpoint(tmp_path / "model", "qwen3", **options)
    whole: dict[str, Tensor] = {
        name: shard.memory for name, shard in fill(directory, position_of(directory, 1, 1, 0)).items()
    }
    if fill is loaded_shards:
        stored = load_file(directory / "model.safetensors")
        assert all(torch.equal(whole[name], stored[name]) for name in whole)
    uncovered = {name: torch.ones(tensor.shape) for name, tensor in whole.items()}
    for rank in range(8):
        for name, shard in fill(directory, position_of(directory, 2, 4, rank)).items():
            assert torch.equal(shard.memory, whole[name][shard.index]), (rank, name)
            uncovered[name][shard.index] = 0.0
    assert not any(left.any() for left in uncovered.values())


def test_only_end_stages_have_embedding_norm_and_head(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama", num_hidden_layers=3)
    first, middle, last = (set(loaded_shards(directory, position_of(directory, 3, 1, rank))) for rank in range(3))
    assert first - {"model.embed_tokens.weight"} == {name.replace("layers.1.", "layers.0.") for name in middle}
    assert last - {"model.norm.weight", "lm_head.weight"} == {name.replace("layers.1.", "layers.2.") for name in middle}


def test_every_rank_checks_the_full_shape_of_tensors(tmp_path: Path) -> None:
    directory = make_checkpoint(tmp_path / "model", "llama")
    tensors = load_file(directory / "model.safetensors")
    save_file(tensors | {"model.layers.3.mlp.up_proj.weight": torch.zeros(96, 64)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"model.layers.3.mlp.up_proj.weight has no place in the model"):
        loaded_shards(directory, position_of(directory, 3, 2, 1))
    save_file(tensors | {"model.layers.0.mlp.up_proj.weight": torch.zeros(48, 64)}, directory / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"shape \(48, 64\), config.json asks for \(96, 64\)"):
        loaded_shards(directory, position_of(directory, 3, 2, 1))


def test_reading_a_shard_takes_no_more_memory_than_the_shard_and_a_tensor(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "vocab_size": 8000,
        "hidden_size": 512,
        "intermediate_size": 2048,
        "num_hidden_layers": 2,
    }
    directory = make_checkpoint(tmp_path / "model", "llama", **options)
    position = position_of(directory, 1, 4, 1)
    num_bytes = 4 * num_parameters(load_model_config(directory), position)
    before = peak = _private_memory()
    done = threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.0005):
            peak = max(peak, _private_memory())

    watcher = threading.Thread(target=watch)
    watcher.start()
    shards = loaded_shards(directory, position)
    done.set()
    watcher.join()
    assert sum(shard.memory.nbytes for shard in shards.values()) == pytest.approx(num_bytes, rel=0.01)
    assert max(peak, _private_memory()) - before <= num_bytes + 8000 * 512 * 4


def _private_memory() -> int:
    """Return the bytes of this process outside of file mappings."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("RssAnon:"))
    return int(line.split()[1]) * 1024
