"""The weights of a Decoder: their names in a checkpoint, and how they are filled.

Decoder ── embedding, norm, head ──► one group      each group: unpack, fill from the checkpoint, process
        └─ a layer ────────────────► one group
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

from pdserve.model.text_part import TRANSPOSED_EXPERTS
from runner.loading.fused_experts import split_experts
from runner.loading.model_weights import ModelWeights, Progress
from runner.loading.stored_weights import StoredWeights
from runner.loading.weights import OpenWeights, check_weights, fill_random, fill_shard
from runner.models.adapters.adapted_linear import ADAPTER_SUFFIX
from runner.models.decoder import Decoder
from runner.models.layers.vocabulary import VocabParallelEmbedding
from runner.models.layers.weight_shard import (
    AdapterPlace,
    WeightGroup,
    WeightShard,
    WeightShards,
    prefixed,
)

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_EXPERT = re.compile(r"\.experts\.(\d+)\.")
_EMBEDDING = "model.embed_tokens.weight"
_NORM = "model.norm.weight"
_HEAD = "lm_head."
_TABLES = _EMBEDDING, _NORM, f"{_HEAD}weight"  # and parts of quantized ones
_C_LIBRARY = ctypes.CDLL(None)


class DecoderWeights(ModelWeights):
    by_name = True

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        config = decoder.config
        position = decoder.context.position
        moe = config.moe
        self._other_experts = set(range(moe.num_experts)).difference(position.local_experts(moe)) if moe else set()
        self._other_layers = set(range(config.num_layers + config.num_nextn_layers)).difference(position.layers)

    # ------------------------------------------------------------ names

    def shards(self) -> WeightShards:
        return (shard for group in self.groups() for shard in group.shards())

    def groups(self) -> Iterator[WeightGroup]:
        yield self._group("", self._vocabulary_shards, self._process_head)
        for index, layer in enumerate(self._decoder.layers, self._decoder.first_layer):
            yield self._group(f"model.layers.{index}.", layer.weight_shards, layer.process_weights_after_loading)
        if (predictor := self._decoder.predictor) is not None:
            prefix = self._decoder.config.predictor
            yield self._group(prefix, predictor.weight_shards, predictor.process_weights_after_loading)

    def adapter_places(self) -> dict[str, AdapterPlace]:
        """Return where adapters change this rank's layers, by the names of these in the checkpoint."""
        places = {}
        for index, layer in enumerate(self._decoder.layers, self._decoder.first_layer):
            for name, shard in prefixed(f"model.layers.{index}.", layer.weight_shards()):
                if isinstance(shard, AdapterPlace):
                    places[self._decoder.checkpoint_name(name).removesuffix(ADAPTER_SUFFIX)] = shard
        return places

    def find(self, model_dir: Path, weights: Mapping[str, Any]) -> tuple[Mapping[str, Any], list[str]]:
        """Return the weights with a name per expert, and the names that the model asks for.

        Raises CheckpointError unless all are there, and no others.
        """
        shards = dict(self.shards())
        transposed = self._decoder.config.multimodal in TRANSPOSED_EXPERTS
        tensors = split_experts(weights, shards, self._decoder.checkpoint_name, transposed)
        return tensors, check_weights(model_dir, tensors, shards, self._ignored(tensors))

    def _ignored(self, stored: Iterable[str]) -> set[str]:
        """Return the stored tensors that other ranks load and check, or no rank: such as a tied head."""
        mine = {name for name, _ in self.shards()}
        tables = tuple(self._decoder.checkpoint_name(name) for name in _TABLES)
        return {name for name in stored if name not in mine and (name.startswith(tables) or self._is_elsewhere(name))}

    def _is_elsewhere(self, name: str) -> bool:
        if name.startswith(self._decoder.unused_tensors):
            return True
        layer = _LAYER.match(name)
        expert = _EXPERT.search(name)
        if expert is not None and int(expert[1]) in self._other_experts:
            return True
        return layer is not None and int(layer[1]) in self._other_layers

    def _group(self, prefix: str, shards: Callable[[], WeightShards], process: Callable[[], None]) -> WeightGroup:
        def named() -> WeightShards:
            return (
                (self._decoder.checkpoint_name(name), shard)
                for name, shard in prefixed(prefix, shards())
                if not isinstance(shard, AdapterPlace)
            )

        return WeightGroup(named, process)

    def _vocabulary_shards(self) -> WeightShards:
        decoder = self._decoder
        if decoder.embedding is not None:
            yield _EMBEDDING, decoder.embedding.weight_shard()
        yield from prefixed("model.", decoder.input_shards())
        if decoder.norm is not None:
            yield _NORM, decoder.norm.weight_shard()
        if decoder.head is not None and not decoder.config.tie_word_embeddings:
            yield from prefixed(_HEAD, decoder.head.weight_shards())
        elif decoder.head is not None and decoder.embedding is None:
            yield from ((_EMBEDDING, shard) for _, shard in decoder.head.weight_shards())
        copy = self._copied_embedding
        if copy is not None and not decoder.config.tie_word_embeddings:
            yield _EMBEDDING, copy.weight_shard()

    @property
    def _copied_embedding(self) -> VocabParallelEmbedding | None:
        """The copy of the embedding that what makes drafts has for itself."""
        drafts = self._decoder.predictor or self._decoder.draft_head
        return None if drafts is None else drafts.own_embedding

    def _process_head(self) -> None:
        decoder = self._decoder
        decoder.process_inputs_after_loading()
        if decoder.norm is not None:
            decoder.norm.process_weights_after_loading()
        if decoder.head is None:
            return
        if decoder.config.tie_word_embeddings and decoder.embedding is not None:
            decoder.head.tie(decoder.embedding)
        elif decoder.config.tie_word_embeddings and self._copied_embedding is not None:
            decoder.head.copy_to(self._copied_embedding)
        decoder.head.process_weights_after_loading()

    # ------------------------------------------------------------ values

    def check(self, model_dir: Path, weights: OpenWeights) -> None:
        self.find(model_dir, weights)

    def load(self, model_dir: Path, weights: OpenWeights, progress: Progress | None, at_once: int) -> StoredWeights:
        tensors, _ = self.find(model_dir, weights)
        total = sum(shard.memory.numel() for _, shard in self.shards())
        done = 0

        @torch.inference_mode()  # for each thread
        def fill_one(name: str, shard: WeightShard) -> int:
            fill_shard(model_dir, name, shard, tensors[name], at_once)
            return shard.memory.numel()

        def fill(shards: Mapping[str, WeightShard]) -> None:
            nonlocal done
            for size in in_threads(fill_one, shards.keys(), shards.values()):
                done += size
                if progress is not None:
                    progress(done / total)

        device = self._decoder.context.placement.device
        with ThreadPoolExecutor(weights.threads, "fill", partial(_use_device, device)) as pool:
            in_threads = pool.map if weights.threads > 1 else map
            for group in self.groups():
                group.refill(fill)
                return_free_memory()
        return StoredWeights(weights.tensors, tensors)

    def load_random(self, model_dir: Path) -> None:
        for group in self.groups():
            group.refill(partial(fill_random, seed=0))


def _use_device(device: torch.device) -> None:
    """Make it this thread's device, so that pinned memory and libraries open no context on another GPU."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def return_free_memory() -> None:
    """Return freed host memory to the system, which the C library keeps for later; without glibc, do nothing."""
    if hasattr(_C_LIBRARY, "malloc_trim"):
        _C_LIBRARY.malloc_trim(0)
