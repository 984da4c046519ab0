"""The fields that must be equal on both sides of a handoff; pdserve/config/compatibility.py compares them."""

from __future__ import annotations

import hashlib

import msgspec

from pdserve.config.node_options import NodeOptions
from pdserve.config.resolution.kv_dtype import describe_scales
from pdserve.kv.layout import KVLayout, KVScales
from pdserve.model.model_config import ModelConfig
from pdserve.model.pooling import GENERATE, PoolingConfig

#: Fields of a model that earlier releases do not have: where they are empty, both releases have one hash.
_LATER_FIELDS = ("attends", "conv_bias", "gemma4", "kv_heads", "kv_sources", "mamba2")


def compat_fields_of(
    options: NodeOptions,
    model: ModelConfig,
    pooling: PoolingConfig | None,
    layout: KVLayout,
    dtype: str,
    kv_scales: tuple[KVScales, ...],
) -> dict[str, str]:
    """Return the fields; ``config_with_weights.py`` adds the weights.

    A simulated node has no KV to read, so ``weights`` keeps it from being paired with a real one.
    """
    state = model.state_spec(dtype)
    return {
        "architecture": model.architecture,
        "model_impl": model.impl,
        "config": _config_hash(model),
        "weights": "simulated" if options.simulated else "dummy" if not options.reads_weights else "checkpoint",
        **model.kv_cache_spec(layout.dtype).compat_fields,
        **({} if state is None else state.compat_fields),
        "kv_scales": describe_scales(kv_scales),
        "num_layers": str(model.num_layers),
        "kv_groups": str(layout.groups),
        "block_size": str(layout.block_size),
        "kv_checksum": options.kv_checksum or "on",
        "kv_connector": options.connector,
        "task": GENERATE if pooling is None else pooling.task,
    }


def _config_hash(model: ModelConfig) -> str:
    """Return a hash of the model's configuration."""
    fields = msgspec.structs.asdict(model)
    for name in _LATER_FIELDS:
        if not fields[name]:
            del fields[name]
    return hashlib.sha256(msgspec.json.encode(fields, order="sorted")).hexdigest()[:16]
