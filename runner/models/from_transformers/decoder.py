"""A causal model of transformers as the runner calls it: everything but attention is the library's."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

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
from runner.models.from_transformers.loading import LIBRARY_ERRORS, build_model
from runner.placement import TensorPlacement


class TransformersDecoder:
    """A whole model: token ids to hidden states, hidden states to logits. Same calls as ``Decoder``, on one rank."""

    depends_on_length = False

    def __init__(self, config: ModelConfig, placement: TensorPlacement) -> None:
        self.config = config
        self.attention: tuple[AttentionSpec, ...] = ()  # of each layer, once loaded
        self._placement = placement

    def load(self, model_dir: Path, *, dummy: bool) -> None:
        """Read the weights, or draw them, and find out what each layer's attention needs.

        Raises CheckpointError for a broken checkpoint, ConfigError for a model that cannot be served exactly.
        """
        register()
        self._model = build_model(model_dir, self._placement, PAGED, dummy=dummy)
        self._body: Any = self._model.get_decoder()
        self._place = _place_of(self._model, self._body)
        if "position_ids" not in inspect.signature(self._body.forward).parameters:
            raise self._refusal("its layers take no positions, so sequences cannot share a step")
        try:
            self.attention = self._trace()
        except ConfigError as exc:
            raise self._refusal(str(exc)) from exc
        except LIBRARY_ERRORS as exc:
            raise self._refusal(f"its layers fail on two tokens: {shown(str(exc))}") from exc

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
        parent, name = self._place
        setattr(parent, name, _GivenOutput(self._output_class(last_hidden_state=hidden[None])))
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            setattr(parent, name, self._body)
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
        return tuple(calls.specs[layer] for layer in range(config.num_layers))

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


class _GivenOutput(nn.Module):
    def __init__(self, output: Any) -> None:
        super().__init__()
        self._output = output

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._output


def _place_of(model: nn.Module, part: nn.Module) -> tuple[nn.Module, str]:
    """Return the module that holds ``part``, and its attribute."""
    for parent in model.modules():
        for name, child in parent.named_children():
            if child is part:
                return parent, name
    raise AssertionError("a model has its body as a part")
