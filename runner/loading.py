"""From a configuration to a model with its weights: what both runners begin with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch

from pdserve.config import NodeConfig
from runner.linear import Placement, compute_dtype, held_dtype
from runner.memory import check_room
from runner.models.decoder import Decoder
from runner.weights import fill_random, load_weights


class LoadedModel:
    """The decoder of one rank, and where it lives."""

    def __init__(self, config: NodeConfig, progress: Callable[[str, float], None]) -> None:
        """Raises CapacityError before, CheckpointError while reading the weights."""
        device = config.device.kind if config.device.kind == "cpu" else f"cuda:{config.device.index}"
        dtype: torch.dtype = getattr(torch, config.dtype)
        self.device = torch.device(device)
        self.place = Placement(
            self.device, dtype, compute_dtype(self.device, dtype), use_triton=config.attention_backend != "torch"
        )
        self._config = config
        if self.device.type == "cpu":
            torch.set_num_threads(config.threads)
        else:
            torch.cuda.set_device(self.device)
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
        return Decoder(self._config.model, self.place, use_triton=self._config.attention_backend != "torch")

    @torch.inference_mode()
    def _fill(self, model_dir: str, progress: Callable[[float], None]) -> None:
        tensors = dict(self.decoder.named_tensors())
        if self._config.load_format == "dummy":
            fill_random(tensors, seed=0)
        else:
            load_weights(Path(model_dir), tensors, self._config.model.tie_word_embeddings, progress)
        self.decoder.seal()
