"""Whether another checkpoint can take the place of a running node's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdserve.checkpoint.kv_scales import read_kv_scales
from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.node_config import NodeConfig
from pdserve.errors import CheckpointError, shown
from pdserve.kv.layout import UNSCALED
from pdserve.model.image_processor import read_image_processor
from pdserve.model.model_config import MAY_DIFFER, load_model_config
from pdserve.model.pooling import EMBED
from pdserve.model.quantization.at_load import is_at_load
from pdserve.model.quantization.weight_formats import UNQUANTIZED


def check_kv_scales(config: NodeConfig, model_dir: Path) -> None:
    """Raise CheckpointError unless another checkpoint has the scales of an FP8 KV cache as this node."""
    if not config.kv_scales:
        return
    scales = read_kv_scales(read_headers(model_dir), config.model.kv_layers)
    if (scales or (UNSCALED,) * len(config.model.kv_layers)) != config.kv_scales:
        raise CheckpointError(f"{model_dir} has other scales of the FP8 KV cache; start the node again with it")


def check_same_model(config: NodeConfig, model_dir: Path) -> None:
    """Raise CheckpointError with the first field in which another checkpoint's configuration differs."""
    embeds = config.pooling is not None and config.pooling.task == EMBED
    mine = config.model
    other = load_model_config(model_dir, mine.impl, embeds=embeds)
    if is_at_load(mine.weight_format) and other.weight_format == UNQUANTIZED:
        other = msgspec.structs.replace(other, weight_format=mine.weight_format, quantization=mine.quantization)
    other = other.with_draft_layers(mine.num_draft_layers, mine.draft_head)
    for name, ours, theirs in _differences(mine, other):
        raise CheckpointError(
            f"{model_dir} has {name} {shown(theirs)}, this node has {shown(ours)}; only weights of the same model can "
            "be reloaded. Start the node again with this checkpoint"
        )

    _check_image_processor(config, model_dir)


def _check_image_processor(config: NodeConfig, model_dir: Path) -> None:
    """Raise CheckpointError for another image processor. A checkpoint without one keeps the node's."""
    if config.image_input is None or config.model.vision is None:
        return
    processor = read_image_processor(model_dir, config.model.vision)
    if processor is not None and processor.fingerprint != config.image_input.fingerprint:
        raise CheckpointError(
            f"{model_dir} has another image processor than this node; start the node again with this checkpoint"
        )


def _differences(mine: msgspec.Struct, other: msgspec.Struct, prefix: str = "") -> Iterator[tuple[str, Any, Any]]:
    """Yield the name of each differing field with both values; fields of nested structs follow a dot."""
    for field in type(mine).__struct_fields__:
        ours = getattr(mine, field)
        theirs = getattr(other, field)
        if field in MAY_DIFFER or ours == theirs:
            continue
        if isinstance(ours, msgspec.Struct) and type(ours) is type(theirs):
            yield from _differences(ours, theirs, f"{prefix}{field}.")
        else:
            yield f"{prefix}{field}", ours, theirs
