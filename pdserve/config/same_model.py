"""Whether another checkpoint can take the place of a running node's."""

from __future__ import annotations

from pathlib import Path

from pdserve.checkpoint.kv_scales import read_kv_scales
from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.node_config import NodeConfig
from pdserve.errors import CheckpointError, shown
from pdserve.kv import UNSCALED
from pdserve.model.model_config import MAY_DIFFER, ModelConfig, load_model_config
from pdserve.model.pooling import EMBED


def check_kv_scales(config: NodeConfig, model_dir: Path) -> None:
    """Raise CheckpointError unless another checkpoint has the scales of an FP8 KV cache as this node."""
    if not config.kv_scales:
        return
    found = read_kv_scales(read_headers(model_dir), config.model.kv_layers)
    if (found or (UNSCALED,) * len(config.model.kv_layers)) != config.kv_scales:
        raise CheckpointError(f"{model_dir} has other scales of the FP8 KV cache; start the node again with it")


def check_same_model(config: NodeConfig, model_dir: Path) -> None:
    """Raise CheckpointError with the first field in which another checkpoint's configuration differs."""
    embeds = config.pooling is not None and config.pooling.task == EMBED
    mine, other = config.model, load_model_config(model_dir, config.model.impl, embeds=embeds)
    for field in ModelConfig.__struct_fields__:
        if field not in MAY_DIFFER and getattr(mine, field) != getattr(other, field):
            raise CheckpointError(
                f"{model_dir} has {field} {shown(getattr(other, field))}, this node has {shown(getattr(mine, field))}; "
                "only weights of the same model can be reloaded. Start the node again with this checkpoint"
            )
