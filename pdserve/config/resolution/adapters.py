"""Adapters that a node has room for."""

from __future__ import annotations

from pdserve.adapters.adapter import AdapterLimits
from pdserve.adapters.base_layers import adapters_problem
from pdserve.config.node_options import MOST_LORAS, NodeOptions
from pdserve.config.resolution.resolved import Resolved
from pdserve.errors import ConfigError
from pdserve.model.model_config import ModelConfig
from pdserve.model.pooling import PoolingConfig


def choose_adapters(
    options: NodeOptions, model: ModelConfig, pooling: PoolingConfig | None
) -> Resolved[AdapterLimits | None]:
    """Return the limits of a node with ``--lora`` or ``--max-loras``; None without. Raises ConfigError."""
    given = len(options.lora)
    if not given and options.max_loras is None:
        return Resolved(None)
    names = [text.partition("=")[0] for text in options.lora]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"--lora gives the name {twice!r} twice; choose another name for one of them")
    if problem := adapters_problem(model):
        raise ConfigError(f"--lora: {problem}")
    if pooling is not None:
        raise ConfigError(f"--lora: task {pooling.task} takes no adapters; serve the merged weights")
    if options.load_format == "dummy" and given:
        raise ConfigError("--lora goes with trained weights; leave out --load-format dummy")
    slots = min(given, MOST_LORAS) if options.max_loras is None else options.max_loras
    in_memory = max(2 * slots, given) if options.max_cpu_loras is None else options.max_cpu_loras
    if in_memory < max(slots, given):
        raise ConfigError(
            f"max_cpu_loras {in_memory} is less than the {max(slots, given)} of --max-loras or --lora; raise it"
        )
    limits = AdapterLimits(slots, options.max_lora_rank, in_memory)
    reason = f"rank up to {limits.max_lora_rank}, {in_memory} in host memory"
    return Resolved(limits, reason, shown=f"{slots} at once")
