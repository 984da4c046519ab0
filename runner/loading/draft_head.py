"""The weights of a head that makes drafts, from a checkpoint of its own."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import torch

from pdserve.errors import CheckpointError
from pdserve.model.eagle3 import UNUSED_TENSORS, plain_name
from pdserve.model.model_config import ModelConfig
from pdserve.model.quantization.weight_formats import UNQUANTIZED
from runner.loading.weights import OpenWeights, check_weights, fill_random, fill_shard, open_weights
from runner.models.decoder import Decoder
from runner.models.layers.eagle3 import Eagle3Head
from runner.models.layers.weight_shard import WeightGroup, WeightShard

_AT_ONCE = 1 << 25  # values that are read and converted at a time


def check_draft_head(decoder: Decoder, directory: Path) -> int:
    """Return the number of the head's tensors; 0 on a rank without a head. Raises CheckpointError as loading would."""
    head = decoder.draft_head
    if head is None:
        return 0
    with _opened(directory, decoder.config, torch.device("cpu"), torch.float32) as stored:
        return len(_named(directory, head, stored))


@torch.inference_mode()
def load_draft_head(decoder: Decoder, directory: Path | None) -> None:
    """Fill the head of a rank that has one; with random numbers without a directory. Raises CheckpointError."""
    head = decoder.draft_head
    if head is None:
        return
    group = WeightGroup(head.weight_shards, head.process_weights_after_loading)
    if directory is None:
        group.refill(partial(fill_random, seed=0))
        head.token_map.zero_()
        return
    placement = decoder.context.placement
    with _opened(directory, decoder.config, placement.device, placement.stored) as stored:
        head_weights = _named(directory, head, stored)

        def fill(shards: Mapping[str, WeightShard]) -> None:
            for name, shard in shards.items():
                fill_shard(directory, name, shard, head_weights[name], _AT_ONCE)

        group.refill(fill)
    tokens = head.token_map + torch.arange(len(head.token_map), device=placement.device)
    low, high = (int(bound) for bound in tokens.aminmax())
    if low < 0 or high >= decoder.config.vocab_size:
        raise CheckpointError(
            f"{directory}: tensor d2t names tokens {low} … {high}, the model has {decoder.config.vocab_size}; choose a "
            "head that was trained for it"
        )


def _opened(
    directory: Path, target: ModelConfig, device: torch.device, dtype: torch.dtype
) -> AbstractContextManager[OpenWeights]:
    plain = msgspec.structs.replace(target, multimodal="", weight_format=UNQUANTIZED, quantization={})
    return open_weights(directory, plain, device, dtype)


def _named(directory: Path, head: Eagle3Head, stored: OpenWeights) -> dict[str, Any]:
    """Return the weights by the names that the head asks for. Raises CheckpointError unless all are there."""
    weights = {plain_name(name): weight for name, weight in stored.items()}
    names = check_weights(directory, weights, dict(head.weight_shards()), UNUSED_TENSORS)
    return {name: weights[name] for name in names}
