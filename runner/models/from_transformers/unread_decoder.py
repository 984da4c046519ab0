"""What loading a model of the library would refuse, found out before a weight is read."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pdserve.config.node_config import DeviceInfo
from pdserve.config.parallel import ParallelConfig
from pdserve.errors import ConfigError
from pdserve.model.model_config import ModelConfig
from runner.distributed.parallel_state import ParallelState
from runner.models.from_transformers.attention_calls import PAGED
from runner.models.from_transformers.decoder import TransformersDecoder
from runner.models.from_transformers.loading import LIBRARY_ERRORS, build_model
from runner.models.from_transformers.tensor_shards import find_cuts
from runner.models.from_transformers.without_values import WithoutValues
from runner.placement import TensorPlacement

_log = logging.getLogger(__name__)


def check_before_reading(
    config: ModelConfig,
    model_dir: Path,
    weights: Mapping[str, Any] | None,
    dtype: torch.dtype,
    parallel: ParallelConfig,
) -> None:
    """Raise CheckpointError or ConfigError as ``TransformersDecoder.load`` would on any rank of ``parallel``.

    ``weights`` are the checkpoint's slices by name, of which none is read; None: the weights will be random. A model
    that cannot run on the device meta passes: only its weights can tell.
    """
    whole = ParallelConfig((config.num_layers,)).position(0)
    on_cpu = TensorPlacement(torch.device("cpu"), dtype, dtype)
    UnreadDecoder(config, ParallelState(whole, DeviceInfo("cpu", 0, "CPU", 0), ""), on_cpu).check(
        model_dir, weights, parallel
    )


class UnreadDecoder(TransformersDecoder):
    """The whole model with weights on the device meta, where nothing has memory."""

    def check(self, model_dir: Path, weights: Mapping[str, Any] | None, parallel: ParallelConfig) -> None:
        with self._refusals():
            without_memory = replace(self._placement, device=torch.device("meta"))
            self._model = build_model(model_dir, without_memory, PAGED, self._part(), weights)
            self._check_state()
            self._find_body()
            if parallel.tp > 1:
                find_cuts(self._model, parallel.tp, self.config.num_kv_heads)
            if parallel.pp > 1:
                self._layers_of_stages(parallel.pp)[0].register_forward_hook(_check_hidden)
            if self._model._can_set_experts_implementation():
                self._model.set_experts_implementation("eager")  # faster ones take no weights of the device meta
            try:
                with WithoutValues():
                    self._trace()
            except LIBRARY_ERRORS as exc:
                if "meta" not in str(exc):
                    raise
                _log.debug("%s cannot run without values: %s", self.config.architecture, exc)


def _check_hidden(layer: nn.Module, args: Any, output: Any) -> None:
    """Raise ConfigError unless stages can exchange what a layer returns."""
    hidden = output if isinstance(output, Tensor) else output[0]
    if hidden.ndim != 3:
        raise ConfigError(
            f"its layers pass on hidden states of {hidden.ndim} dimensions, stages exchange those of 3, "
            "[1, tokens, hidden size]; use --pp 1"
        )
