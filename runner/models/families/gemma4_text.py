"""Gemma 4: layers of two kinds with norms on both sides, shared KV, embeddings per layer, experts beside the MLP."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pdserve.model.model_config import ModelConfig
from pdserve.pausing import Pausing
from runner.attention import AttentionBackend
from runner.distributed.parallel_state import ParallelState
from runner.models.adapters.slots import AdapterSlots
from runner.models.decoder import Decoder
from runner.models.layers.gemma4 import Gemma4Layer, PerLayerEmbedding
from runner.models.layers.rotary import RotaryEmbedding
from runner.models.layers.weight_shard import WeightShards
from runner.placement import TensorPlacement


class Gemma4ForCausalLM(Decoder):
    layers: list[Any]  # Gemma4Layer
    embeds_whole = True

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        placement: TensorPlacement,
        adapters: AdapterSlots | None = None,
    ) -> None:
        gemma4 = config.gemma4
        assert gemma4 is not None
        self._groups = config.kv_cache_groups
        super().__init__(config, parallel, placement, adapters)
        self._logit_cap = gemma4.logit_cap
        self._padding = gemma4.padding
        self._scale = torch.tensor(config.hidden_size**0.5, dtype=placement.dtype, device=placement.device)
        sizes = {spec.window is None: config.heads_of(layer).head_dim for layer, spec in enumerate(config.attention)}
        self._rotary = {  # by whether layers have full attention
            is_full: RotaryEmbedding(
                gemma4.full_rope if is_full else config.rope, size, config.max_position_embeddings, placement.device
            )
            for is_full, size in sizes.items()
        }
        position = self.context.position
        has_inputs = gemma4.size_per_layer and position.is_first
        self._per_layer = PerLayerEmbedding(self.context, gemma4.size_per_layer) if has_inputs else None
        # Checkpoints may have keys and values of layers that read those of others.
        self.unused_tensors = tuple(
            f"model.layers.{layer}.self_attn.{name}"
            for layer in range(config.num_layers)
            if not config.has_kv(layer)
            for name in ("k_proj.", "v_proj.", "k_norm.", "v_norm.")
        )

    def make_layer(self, layer: int) -> Any:
        return Gemma4Layer(self.context, self.first_layer + layer, self._groups)

    def input_shards(self) -> WeightShards:
        if self._per_layer is not None:
            yield from self._per_layer.weight_shards()

    def process_inputs_after_loading(self) -> None:
        if self._per_layer is not None:
            self._per_layer.process_weights_after_loading()

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Pausing[Tensor]:
        """Compute the layers of this rank; pause between two of them. See Model."""
        rotary = {is_full: embedding(positions, None) for is_full, embedding in self._rotary.items()}
        hidden = inputs
        if self.embedding is not None:
            hidden = self.images.embed(self._parallel.all_reduce(self.embedding(inputs)) * self._scale)
        embedded = None
        if self._per_layer is not None:
            embedded = self._per_layer(self.images.text_ids(inputs, self._padding), hidden)
        *others, last = self.layers
        for number, layer in enumerate(others):
            hidden = layer(hidden, rotary[layer.is_full], backend, None if embedded is None else embedded[number])
            yield
        of_last = rotary[last.is_full]
        if output_tokens is not None and not len(output_tokens):
            last.attention.store(last.input_norm(hidden), of_last, backend)
            return hidden[:0]
        hidden = last(hidden, of_last, backend, None if embedded is None else embedded[-1], output_tokens)
        return hidden if self.norm is None else self.norm(hidden)

    def logits(self, hidden: Tensor) -> Tensor:
        return self._capped(super().logits(hidden))

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        super().write_logits(hidden, out)
        self._capped(out)

    def _capped(self, logits: Tensor) -> Tensor:
        """Cap logits in place."""
        if self._logit_cap is not None:
            logits.div_(self._logit_cap).tanh_().mul_(self._logit_cap)
        return logits
