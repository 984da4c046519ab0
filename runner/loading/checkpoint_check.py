"""Check that a node could load its checkpoint, without reading weights: for ``pdserve doctor``."""

from __future__ import annotations

from pathlib import Path

import torch

from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.parallel import ParallelConfig
from pdserve.model.model_config import TRANSFORMERS
from runner.distributed.parallel_state import ParallelState
from runner.loading.decoder_weights import DecoderWeights
from runner.loading.draft_head import check_draft_head
from runner.loading.weights import open_weights
from runner.models.registry import decoder_class
from runner.placement import TensorPlacement


def check_tensors(config: NodeConfig) -> int | None:
    """Return the number of tensors, each of which has its place in the model; None for a model of transformers.

    Raises CheckpointError as the node would. The library checks its models only when it loads them.
    """
    if config.model.impl == TRANSFORMERS:
        return None
    whole = ParallelState(ParallelConfig((config.model.num_layers,)).position(0), DeviceInfo("cpu", 0, "CPU", 0), "")
    dtype: torch.dtype = getattr(torch, config.dtype)
    meta = TensorPlacement(torch.device("meta"), dtype, dtype)
    decoder = decoder_class(config.model.architecture)(config.model, whole, meta)
    path = Path(config.model_dir)
    with open_weights(path, config.model, torch.device("cpu"), dtype) as stored:
        _, names = DecoderWeights(decoder).find(path, stored)
    return len(names) + check_draft_head(decoder, Path(config.draft_dir))
