"""Models of the library as a node checks them before it reads weights."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.parallel import ParallelConfig
from runner.distributed.parallel_state import ParallelState
from runner.models.from_transformers.unread_decoder import UnreadDecoder
from runner.placement import TensorPlacement

MOST_POSITIONS = 8192


def checked_parameters(config: NodeConfig) -> int:
    """Return the parameters of a model without weights, a tied head once. Raises ConfigError if a node refuses it.

    Masks are looked at up to ``MOST_POSITIONS`` positions: a node with a longer --max-model-len looks further.
    """
    positions = min(config.max_model_len, MOST_POSITIONS)
    model = msgspec.structs.replace(config.model, max_position_embeddings=positions)
    dtype = getattr(torch, config.dtype)
    whole = ParallelConfig((model.num_layers,)).position(0)
    parallel = ParallelState(whole, DeviceInfo("cpu", 0, "CPU", 0), "")
    decoder = UnreadDecoder(model, parallel, TensorPlacement(torch.device("cpu"), dtype, dtype))
    decoder.check(Path(config.model_dir), None, config.parallel)
    return sum(parameter.numel() for parameter in decoder._model.parameters())
