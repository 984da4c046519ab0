"""Decide whether unquantized weights are quantized when they are loaded (``--quantization``)."""

from __future__ import annotations

import msgspec

from pdserve.config.resolution.declared_forms import declared_forms
from pdserve.config.runner_oracle import Decision
from pdserve.errors import ConfigError
from pdserve.model.model_config import ModelConfig
from pdserve.model.quantization.at_load import AT_LOAD, is_at_load
from pdserve.model.quantization.weight_formats import UNQUANTIZED


def quantized_at_load(model: ModelConfig, requested: str) -> ModelConfig:
    """Return the model with the weight format that ``--quantization`` requests; the checkpoint's changes nothing.

    Raises ConfigError for another format than the checkpoint's, except those of ``AT_LOAD`` for unquantized weights.
    """
    if requested in ("auto", model.weight_format):
        return model
    choices = ", ".join(AT_LOAD)
    if requested not in AT_LOAD:
        raise ConfigError(
            f"quantization {requested}: the checkpoint has {model.weight_format} weights; leave the option out. "
            f"{choices} quantize unquantized weights when they are loaded"
        )
    if model.weight_format != UNQUANTIZED:
        forms = declared_forms(model).values()
        if forms and all(form.kind == AT_LOAD[requested].form.kind for form in forms):
            return model
        raise ConfigError(
            f"quantization {requested}: the checkpoint has {model.weight_format} weights; choose an unquantized one"
        )
    name = AT_LOAD[requested].weight_format
    return msgspec.structs.replace(model, weight_format=name, quantization={"quant_method": name})


def check_quantized_at_load(model: ModelConfig, decision: Decision) -> None:
    """Raise ConfigError if a runner without quantized weights is to quantize them."""
    if is_at_load(model.weight_format) and decision.runner == "V1":
        reasons = "; ".join(decision.reasons)
        name = next(name for name, entry in AT_LOAD.items() if entry.weight_format == model.weight_format)
        raise ConfigError(
            f"quantization {name} needs runner V2, which keeps weights quantized; V1 was chosen: {reasons}"
        )
