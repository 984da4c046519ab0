"""Check that a node could load its checkpoint, without reading weights: for ``pdserve explain`` and ``doctor``.

``pdserve/config/tensor_check.py`` runs this module as a program.
"""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec
import torch

from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.parallel import ParallelConfig
from pdserve.config.tensor_check import CheckedTensors
from pdserve.errors import PdserveError
from pdserve.model.model_config import TRANSFORMERS
from runner.distributed.parallel_state import ParallelState
from runner.loading.decoder_weights import DecoderWeights
from runner.loading.draft_head import check_draft_head
from runner.loading.weights import OpenWeights, open_weights
from runner.models.registry import decoder_class
from runner.placement import TensorPlacement


def check_tensors(config: NodeConfig) -> int:
    """Return the number of tensors, each of which has its place in the model; 0 if weights are random.

    Raises CheckpointError or ConfigError as the node would before it reads them.
    """
    if config.random_weights:
        _check(config, None)
        return 0
    with open_weights(Path(config.model_dir), config.model, torch.device("cpu"), _dtype(config)) as stored:
        return _check(config, stored)


def _check(config: NodeConfig, stored: OpenWeights | None) -> int:
    # Masks are looked at up to the longest sequence, as by the node.
    model = msgspec.structs.replace(config.model, max_position_embeddings=config.max_model_len)
    path = Path(config.model_dir)
    dtype = _dtype(config)
    if model.impl == TRANSFORMERS:
        from runner.models.from_transformers.unread_decoder import (
            check_before_reading,  # imported on demand: it takes seconds
        )

        check_before_reading(model, path, stored, dtype, config.parallel)
        return len(stored or ())
    if stored is None:
        return 0
    whole = ParallelState(ParallelConfig((model.num_layers,)).position(0), DeviceInfo("cpu", 0, "CPU", 0), "")
    meta = TensorPlacement(torch.device("meta"), dtype, dtype)
    decoder = decoder_class(model.architecture)(model, whole, meta)
    _, names = DecoderWeights(decoder).find(path, stored)
    return len(names) + check_draft_head(decoder, Path(config.draft_dir))


def _dtype(config: NodeConfig) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, config.dtype)
    return dtype


def main() -> int:
    """Read a NodeConfig from standard input, and write a ``CheckedTensors`` to standard output."""
    config = msgspec.msgpack.decode(sys.stdin.buffer.read(), type=NodeConfig)
    try:
        result = CheckedTensors(number=check_tensors(config))
    except PdserveError as exc:
        result = CheckedTensors(problem=str(exc))
    sys.stdout.buffer.write(msgspec.json.encode(result))
    return 0


if __name__ == "__main__":
    sys.exit(main())
