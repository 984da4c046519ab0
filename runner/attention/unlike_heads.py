"""Attention of a model whose layers have unlike KV heads: a back end for each kind of heads."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from torch import Tensor

from pdserve.model.model_config import ModelConfig
from runner.attention import AttentionBackend
from runner.batch import AttentionBatch, HeadNorms, RotaryCosSin
from runner.kv_cache import KVCache


class UnlikeHeadsAttention(AttentionBackend):
    """Passes the calls of each layer to the back end of its kind of heads."""

    def __init__(
        self, config: ModelConfig, cache: KVCache, build: Callable[[ModelConfig, KVCache], AttentionBackend]
    ) -> None:
        """``build`` returns the back end of one kind, given the model and the cache of its layers alone."""
        self._parts: list[AttentionBackend] = []
        self._places: dict[int, tuple[AttentionBackend, int]] = {}  # the back end of a layer, and the layer in it
        for layers, part in cache.head_parts():
            attention = tuple(config.attention[layer] for layer in layers)
            heads = part.layout
            as_seen = msgspec.structs.replace(
                config, num_kv_heads=heads.num_kv_heads, head_dim=heads.head_dim, attention=attention, kv_heads=()
            )
            backend = build(as_seen, part)
            self._parts.append(backend)
            self._places |= {layer: (backend, number) for number, layer in enumerate(layers)}

    def replans(self, graph: int) -> bool:
        return any(part.replans(graph) for part in self._parts)

    def _plan(self, batch: AttentionBatch, graph: int) -> None:
        for part in self._parts:
            part.plan(batch, graph)

    def prepare_and_store(self, layer: int, qkv: Tensor, rotary: RotaryCosSin, norms: HeadNorms | None) -> Tensor:
        part, number = self._places[layer]
        return part.prepare_and_store(number, qkv, rotary, norms)

    def store(self, layer: int, k: Tensor, v: Tensor) -> None:
        part, number = self._places[layer]
        part.store(number, k, v)

    def attend(self, layer: int, q: Tensor, sinks: Tensor | None = None) -> Tensor:
        part, number = self._places[layer]
        return part.attend(number, q, sinks)
