"""Build a model of the library transformers. No code of a checkpoint is run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from pdserve.errors import CheckpointError, ConfigError, shown
from runner.models.quantization.dequantize import is_padding_bias
from runner.placement import TensorPlacement

_SEED = 0  # of random weights
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}

NO_INTERFACE = "its layers do not call a given attention function"

# What the library raises for checkpoints that it cannot read.
LIBRARY_ERRORS = (OSError, ValueError, RuntimeError, TypeError, KeyError, IndexError, AttributeError, AssertionError)


def build_model(model_dir: Path, placement: TensorPlacement, attention: str, weights: Mapping[str, Any] | None) -> Any:
    """Return the causal model of a checkpoint on the device.

    ``weights`` has slices of safetensors, dequantized; without, weights are random and equal in all processes.
    Raises ConfigError for a model that cannot use a given attention function, CheckpointError for a broken checkpoint.
    """
    _logging: Any = transformers.utils.logging
    _logging.disable_progress_bar()
    try:
        config = transformers.AutoConfig.from_pretrained(model_dir, **_LOCAL)
    except LIBRARY_ERRORS as exc:
        raise CheckpointError(f"transformers cannot read {model_dir}/config.json: {shown(str(exc))}") from exc
    model_class = _class_of(config)
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    vars(config).pop("quantization_config", None)  # weights arrive dequantized
    try:
        if weights is None:
            model = _draw(config, placement, attention)
        else:
            model = _read(model_dir, model_class, config, placement, attention, weights)
    except LIBRARY_ERRORS as exc:
        if not model_class._supports_attention_backend:
            raise ConfigError(f"{model_class.__name__} cannot run through transformers here: {NO_INTERFACE}") from exc
        raise CheckpointError(f"transformers cannot load {model_dir}: {shown(str(exc))}") from exc
    return model.to(placement.device).eval().requires_grad_(False)


def _class_of(config: Any) -> Any:
    mapping: Any = transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    if type(config) not in mapping:
        raise ConfigError(f"model type {config.model_type!r} is no causal language model of transformers")
    return mapping[type(config)]


def _read(
    model_dir: Path,
    model_class: Any,
    config: Any,
    placement: TensorPlacement,
    attention: str,
    weights: Mapping[str, Any],
) -> Any:
    model, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=dict(weights),
        dtype=placement.dtype,
        attn_implementation=attention,
        output_loading_info=True,
    )
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        found = [str(name) for name in report.get(kind) or () if not is_padding_bias(str(name), weights)]
        if found:
            names = ", ".join(sorted(found)[:3])
            raise CheckpointError(f"{model_dir} has {kind.replace('_', ' ')}: {names}; config.json is of another model")
    return model


def _draw(config: Any, placement: TensorPlacement, attention: str) -> Any:
    auto: Any = transformers.AutoModelForCausalLM
    # On the device: a CPU takes minutes for 8B random values.
    devices = [] if placement.device.type == "cpu" else [placement.device]
    with torch.random.fork_rng(devices), placement.device:
        torch.manual_seed(_SEED)
        return auto.from_config(config, dtype=placement.dtype, attn_implementation=attention)
