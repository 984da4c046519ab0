"""A causal model of transformers as the runner calls it: everything but attention is the library's."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache

from pdserve.errors import CheckpointError, ConfigError, shown
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.model_config import ModelConfig
from pdserve.pausing import Pausing, completed
from runner.attention import AttentionBackend
from runner.distributed.parallel_state import ParallelState
from runner.models.from_transformers.attention_calls import (
    PAGED,
    TRACED,
    AttentionCalls,
    HeadShard,
    PagedCalls,
    TracedCalls,
    register,
    run_with,
)
from runner.models.from_transformers.in_float32 import in_float32
from runner.models.from_transformers.loading import LIBRARY_ERRORS, NO_INTERFACE, build_model
from runner.models.from_transformers.packed_linear import pack_linear_layers
from runner.models.from_transformers.part import ModelPart, body_of, layers_of
from runner.models.from_transformers.reference import unsplit_logits
from runner.models.from_transformers.tensor_shards import TensorShards
from runner.models.model import Model
from runner.placement import TensorPlacement

_WITH_STATE = "LinearAttention"  # cache layers of transformers for linear attention, Mamba and convolutions


class TransformersDecoder(Model):
    """Everything but attention is the library's.

    A later stage runs the library's body on the hidden states that it received: layers of other stages pass them on.
    """

    depends_on_length = False

    def __init__(self, config: ModelConfig, parallel: ParallelState, placement: TensorPlacement) -> None:
        """``config`` describes the whole model."""
        self.config = config
        self.parallel = parallel
        self.attention = ()  # until the weights are loaded
        self._placement = placement
        self._position = parallel.position
        self._model: Any = None
        self._body: Any = None
        self._scores: Any = None  # the head of a sequence classifier
        self._heads = HeadShard.by_layer(config, parallel)
        self._received = self._sent = torch.empty(0)

    def load(self, model_dir: Path, weights: Mapping[str, Any] | None) -> None:
        """Read the weights, slices of safetensors by name, and find out what each layer's attention needs.

        Without ``weights`` draw random ones. Raises CheckpointError for a broken checkpoint, ConfigError for a model
        that cannot be served exactly.
        """
        with self._refusals():
            part = self._part()
            self._model = build_model(model_dir, self._placement, PAGED, part, weights)
            self._check_state()
            if part.shards is None:
                pack_linear_layers(self._model, self._placement)
            self._find_body()
            if self._position.parallel.pp > 1:
                self._connect_stages()
            self.attention = self._trace()

    @contextmanager
    def _refusals(self) -> Iterator[None]:
        """Translate the library's errors, and say of which model a refusal is."""
        register()
        try:
            yield
        except CheckpointError:
            raise
        except ConfigError as exc:
            raise self._refusal(str(exc)) from exc
        except LIBRARY_ERRORS as exc:
            lacks_interface = self._model is not None and not self._model._supports_attention_backend
            cause = NO_INTERFACE + "; " if lacks_interface else ""
            raise self._refusal(f"{cause}its layers fail on two tokens: {shown(str(exc))}") from exc

    def _find_body(self) -> None:
        self._body = body_of(self._model)
        self._scores = getattr(self._model, "score", None)
        if "position_ids" not in inspect.signature(self._body.forward).parameters:
            raise ConfigError("its layers take no positions, so sequences cannot share a step")

    def unload(self) -> None:
        """Free the weights, so that others can be loaded."""
        self._model = self._body = self._scores = None

    @torch.inference_mode()
    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Pausing[Tensor]:
        """Compute all layers without a pause. See Model."""
        calls = PagedCalls(backend, self._heads, self._position.layers.start)
        hidden = self._run_body(inputs, positions, calls)
        return completed(hidden if output_tokens is None else hidden.index_select(0, output_tokens))

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits as Model does.

        The model's own forward runs with a body that returns ``hidden``, so scales and caps of logits apply. A
        classifier returns [rows, labels].
        """
        if self._scores is not None:
            scores: Tensor = self._scores(hidden)
            return scores
        given = self._output_class(last_hidden_state=hidden[None])
        self._body.forward = lambda *args, **kwargs: given
        try:
            ids = torch.zeros(1, len(hidden), dtype=torch.long, device=hidden.device)
            logits: Tensor = self._model(input_ids=ids, use_cache=False).logits[0]
        finally:
            del self._body.forward
        return logits

    def run_products(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        """Do nothing: the shapes of the library's products are not known."""

    @torch.inference_mode()
    def eager_logits(
        self, model_dir: Path, weights: Mapping[str, Any] | None, prompts: Sequence[Sequence[int]]
    ) -> list[Tensor]:
        """Return logits [tokens, vocab_size] of prompts by the library's own forward of the unsplit model, in float32.

        Runs within ``in_float32``. ``weights`` as for ``load``.
        """
        parallel = self._position.parallel
        placement = self._placement
        num_layers = self.config.num_layers
        if parallel.num_ranks > 1:

            def build(part: ModelPart) -> Any:
                return build_model(model_dir, placement, "eager", part, weights).float()

            # Beside this rank's part, there is room for a quarter of it.
            width = torch.float32.itemsize // placement.dtype.itemsize
            at_once = max(1, num_layers // (4 * parallel.num_ranks * width))
            return unsplit_logits(build, num_layers, at_once, prompts, placement.device)
        self._model.set_attn_implementation("eager")
        try:
            ids = [torch.tensor([prompt], device=self._placement.device) for prompt in prompts]
            return [self._eager(of_prompt).float() for of_prompt in ids]
        finally:
            self._model.set_attn_implementation(PAGED)

    def _eager(self, ids: Tensor) -> Tensor:
        """Return logits [tokens, vocab_size] of token ids [1, tokens]; of a classifier [tokens, labels]."""
        whole: Any = self._model if self._scores is None else self._body
        output = whole(input_ids=ids, use_cache=False)
        logits: Tensor = output.logits[0] if self._scores is None else self._scores(output.last_hidden_state[0])
        return logits

    def _part(self) -> ModelPart:
        position = self._position
        fewest = min((heads.num_kv_heads for heads in self.config.kv_heads), default=self.config.num_kv_heads)
        shards = TensorShards(self.parallel, fewest) if position.parallel.tp > 1 else None
        return ModelPart(self.config.num_layers, position.layers, position.is_first, position.is_last, shards)

    def _layers_of_stages(self, pp: int) -> nn.ModuleList:
        """Raises ConfigError for a model that the library cannot split into stages."""
        if not self._body.config.base_model_pp_plan:
            raise ConfigError(f"pp {pp}: it has no pipeline-parallel plan in transformers")
        return layers_of(self._body, self.config.num_layers)[1]

    def _connect_stages(self) -> None:
        """Let the first layer begin with what was received, and keep what the last layer returns."""
        position = self._position
        layers = self._layers_of_stages(position.parallel.pp)
        if not position.is_first:
            layers[position.layers.start].register_forward_pre_hook(self._begin, with_kwargs=True)
        if not position.is_last:
            layers[position.layers.stop - 1].register_forward_hook(self._end)

    def _begin(self, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        if args:
            return (self._received, *args[1:]), kwargs
        return args, kwargs | {"hidden_states": self._received}

    def _end(self, layer: nn.Module, args: Any, output: Any) -> None:
        self._sent = output if isinstance(output, Tensor) else output[0]

    def in_float32(self) -> AbstractContextManager[None]:
        """Let all parts compute in float32, with the weights that they have."""
        return in_float32(self._model, self.config.num_layers)

    def no_hidden(self, tokens: int, dtype: torch.dtype) -> Tensor:
        """Return zeros in the form of a stage's result, [tokens, hidden_size]."""
        return torch.zeros((tokens, self.config.hidden_size), dtype=dtype, device=self._placement.device)

    @torch.inference_mode()
    def _trace(self) -> tuple[AttentionSpec, ...]:
        """Run two tokens, and return what each layer asks for. Raises ConfigError for anything unknown."""
        calls = TracedCalls(self.config.max_position_embeddings)
        tokens = torch.arange(2, device=self._placement.device)
        layers = self._position.layers
        inputs = tokens
        if not self._position.is_first:
            inputs = self.no_hidden(2, self._placement.dtype)
        self._model.set_attn_implementation(TRACED)
        try:
            self._run_body(inputs, tokens, calls)
        finally:
            self._model.set_attn_implementation(PAGED)
        if sorted(calls.specs) != list(layers) or calls.num_calls != len(layers):
            raise ConfigError(
                f"attention ran {calls.num_calls} times, in layers {sorted(calls.specs)} of {len(layers)}; "
                "a model is served only if each layer attends once"
            )
        for layer, (num_heads, num_kv_heads, head_dim) in calls.sizes.items():
            heads = self._heads[layer - layers.start]
            if head_dim != heads.head_dim or not heads.knows(num_heads, num_kv_heads):
                raise ConfigError(
                    f"layer {layer} has {(num_heads, num_kv_heads, head_dim)} query heads, KV heads and head size; "
                    f"config.json says {(*heads.sizes, heads.head_dim)} for a layer of this rank. Choose a model whose "
                    "heads per layer follow from config.json"
                )
        self._check_windows(calls)
        self._check_groups(calls)
        return tuple(calls.specs[layer] for layer in layers)

    def _check_state(self) -> None:
        """Raise ConfigError if the library's cache keeps a state beside keys and values."""
        kinds = {type(cached).__name__ for cached in DynamicCache(config=self._model.config).layers}
        if stateful := sorted(kind for kind in kinds if kind.startswith(_WITH_STATE)):
            raise ConfigError(f"it keeps a state beside the KV cache, as transformers' {', '.join(stateful)} says")

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

    def _check_groups(self, calls: TracedCalls) -> None:
        """Raise ConfigError if a layer attends to more tokens than the KV cache keeps for it."""
        positions = self.config.max_position_embeddings
        for layer, spec in calls.specs.items():
            kept = self.config.windows[layer] if self.config.windows else None
            if kept is not None and (spec.window or positions) > kept:
                raise ConfigError(
                    f"layer {layer} attends to {spec.window or positions} tokens where config.json says {kept}: "
                    "correct layer_types and sliding_window there"
                )

    def _run_body(self, inputs: Tensor, positions: Tensor, calls: AttentionCalls) -> Tensor:
        """Return [tokens, hidden_size]: on the last stage normed, else of this stage's last layer."""
        if self._position.is_first:
            start = {"input_ids": inputs[None].long()}
        else:
            self._received = inputs[None]
            start = {"inputs_embeds": self._received}
        output = run_with(calls, lambda: self._body(**start, position_ids=positions[None].long(), use_cache=False))
        self._output_class = type(output)
        hidden: Tensor = output.last_hidden_state if self._position.is_last else self._sent
        self._received = self._sent = hidden.new_empty(0)  # frees both
        return hidden[0]

    def _refusal(self, reason: str) -> ConfigError:
        return ConfigError(f"{self.config.architecture} cannot run through transformers here: {reason}")
