"""From a configuration to a model with its weights: what both runners begin with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pdserve.config.node_config import NodeConfig
from runner.distributed.parallel_state import ParallelState
from runner.loading.memory_check import check_room
from runner.loading.weights import fill_random, load_weights
from runner.models.decoder import Decoder
from runner.models.layers.linear import held_dtype
from runner.placement import TensorPlacement, compute_dtype


class LoadedModel:
    """The decoder of one rank, and where it lives."""

    def __init__(self, config: NodeConfig, world: ParallelState, progress: Callable[[str, float], None]) -> None:
        """Raises CapacityError before, CheckpointError while reading the weights."""
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.device = world.device
        self.place = TensorPlacement(
            self.device, dtype, compute_dtype(self.device, dtype), use_triton=config.attention_backend != "torch"
        )
        self._config, self._world = config, world
        if self.place.use_triton:
            world.use_kernel(config.model.hidden_size)
        if self.device.type == "cpu":
            torch.set_num_threads(config.threads)
        layout = None if config.measure_kv_memory else config.kv_layout
        check_room(config.model, config.place, layout, self.device, held_dtype(self.place))
        self.decoder = self._empty()
        self._fill(config.model_dir, lambda fraction: progress("loading weights", fraction))

    def reload(self, model_dir: str) -> None:
        """Read another checkpoint of the same architecture and shape. No step may be in flight.

        On a GPU the weights keep their addresses, so captured graphs stay right. Raises CheckpointError; the weights
        are then a mixture, and the only remedy is another reload.
        """
        if self.device.type == "cpu":
            self.decoder = self._empty()  # what is sealed cannot be filled again
        self._fill(model_dir, lambda fraction: None)

    @torch.inference_mode()
    def _empty(self) -> Decoder:
        return Decoder(
            self._config.model, self._world, self.place, use_triton=self._config.attention_backend != "torch"
        )

    @torch.inference_mode()
    def _fill(self, model_dir: str, progress: Callable[[float], None]) -> None:
        parts = dict(self.decoder.parts())
        if self._config.load_format == "dummy":
            fill_random(parts, seed=0)
        else:
            load_weights(Path(model_dir), parts, self.decoder.elsewhere(), progress)
        self.decoder.seal()
