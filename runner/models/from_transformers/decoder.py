"""A causal model of transformers as the runner calls it: everything but attention is the library's."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from pdserve.config.attention_spec import AttentionSpec
from pdserve.config.model_config import ModelConfig
from pdserve.config.parallel import NO_DEFERRED_MLPS, DeferredMLPs
from pdserve.errors import ConfigError, shown
from runner.attention import AttentionBackend
from runner.models.from_transformers.attention_calls import (
    PAGED,
    TRACED,
    AttentionCalls,
    PagedCalls,
    TracedCalls,
    register,
    run_with,
)
from runner.models.from_transformers.loading import LIBRARY_ERRORS, NO_INTERFACE, build_model
from runner.placement import TensorPlacement


class TransformersDecoder:
    """A whole model: token ids to hidden states, hidden states to logits. Same calls as ``Decoder``, on one rank."""

    depends_on_length = False

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        self.config = config
        self.attention: tuple[AttentionSpec, ...] = ()  # of each layer, once loaded
        self._placement = placement

    def load(self, model_dir: Path, weights: Mapping[str, Any] | None) -> None:
        """Read the weights, slices of safetensors by name, and find out what each layer's attention needs.

        Without ``weights`` draw random ones.

        Raises CheckpointError for a broken checkpoint, ConfigError for a model that cannot be served exactly.
        """
        register()
        self._model = build_model(model_dir, self._placement, PAGED, weights)
        self._body = _body_of(self._model)
        if "position_ids" not in inspect.signature(self._body.forward).parameters:
            raise self._refusal("its layers take no positions, so sequences cannot share a step")
        try:
            self.attention = self._trace()
        except ConfigError as exc:
            raise self._refusal(str(exc)) from exc
        except LIBRARY_ERRORS as exc:
            known = "" if self._model._supports_attention_backend else NO_INTERFACE + "; "
            raise self._refusal(f"{known}its layers fail on two tokens: {shown(str(exc))}") from exc

    @torch.inference_mode()
    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
        deferred: DeferredMLPs = NO_DEFERRED_MLPS,
    ) -> Tensor:
        """Return hidden states [tokens, hidden_size] of token ids [tokens], of ``output_tokens`` if given."""
        hidden = self._run_body(inputs, positions, PagedCalls(backend, self.config.head_dim))
        return hidden if output_tokens is None else hidden.index_select(0, output_tokens)

    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab_size] from hidden states [rows, hidden_size].

        The model's own forward runs with a body that returns ``hidden``, so scales and caps of logits apply.
        """
        given = self._output_class(last_hidden_state=hidden[None])
        self._body.forward = lambda *args, **kwargs: given
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._body.forward
        return logits

    @torch.inference_mode()
    def eager_logits(self, prompt: Sequence[int]) -> Tensor:
        """Return logits [tokens, vocab_size] float32 of a prompt by the library's own eager attention."""
        self._model.set_attn_implementation("eager")
        try:
            ids = torch.tensor([prompt], device=self._placement.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._model.set_attn_implementation(PAGED)
        return logits.float()

    @torch.inference_mode()
    def _trace(self) -> tuple[AttentionSpec, ...]:
        """Run two tokens, and return what each layer asks for. Raises ConfigError for anything unknown."""
        config, calls = self.config, TracedCalls(self.config.max_position_embeddings)
        tokens = torch.arange(2, device=self._placement.device)
        self._model.set_attn_implementation(TRACED)
        try:
            self._run_body(tokens, tokens, calls)
        finally:
            self._model.set_attn_implementation(PAGED)
        if sorted(calls.specs) != list(range(config.num_layers)) or calls.num_calls != config.num_layers:
            raise ConfigError(
                f"attention ran {calls.num_calls} times, in layers {sorted(calls.specs)} of {config.num_layers}; "
                "a model is served only if each layer attends once"
            )
        expected = config.num_heads, config.num_kv_heads, config.head_dim
        for layer, sizes in calls.sizes.items():
            if sizes != expected:
                raise ConfigError(
                    f"layer {layer} has {sizes} query heads, KV heads and head size where config.json says "
                    f"{expected}; layers that differ from it are not supported"
                )
        self._check_windows(calls)
        return tuple(calls.specs[layer] for layer in range(config.num_layers))

    def _check_windows(self, calls: TracedCalls) -> None:
        """Raise ConfigError if the library's cache forgets tokens to which a layer's mask attends."""
        positions = self.config.max_position_embeddings
        for layer, cached in enumerate(DynamicCache(config=self._model.config).layers):
            kept = getattr(cached, "sliding_window", None) or positions
            if layer in calls.specs and kept < min(calls.specs[layer].window or positions, positions):
                raise ConfigError(
                    f"layer {layer} attends to more tokens than the {kept} that transformers' cache keeps, so what "
                    "the model was trained with is not known"
                )

    def _run_body(self, ids: Tensor, positions: Tensor, calls: AttentionCalls) -> Tensor:
        output = run_with(
            calls,
            lambda: self._body(input_ids=ids[None].long(), position_ids=positions[None].long(), use_cache=False),
        )
        self._output_class = type(output)
        hidden: Tensor = output.last_hidden_state[0]
        return hidden

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.config.architecture} cannot run through transformers here: {reason}")


def _body_of(model: Any) -> Any:
    """Return the part of a model that turns token ids into hidden states. Raises ConfigError."""
    for part in (model.get_decoder(), model.base_model, getattr(model, "model", None)):
        if part is not model and isinstance(part, PreTrainedModel):
            return part
    raise ConfigError(f"{type(model).__name__} has no part that returns hidden states")
