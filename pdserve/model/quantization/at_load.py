"""Formats that unquantized weights take when they are loaded (``--quantization``)."""

from __future__ import annotations

from typing import NamedTuple

from pdserve.model.quantization.layer_form import LayerForm
from pdserve.model.quantization.weight_formats import FP8_AT_LOAD, INT4_AT_LOAD, NVFP4_AT_LOAD


class AtLoad(NamedTuple):
    weight_format: str
    form: LayerForm


#: By the values of ``--quantization``. int4 is symmetric: the zero is 8, as of llm-compressor's W4A16.
AT_LOAD = {
    "fp8": AtLoad(FP8_AT_LOAD, LayerForm("fp8")),
    "nvfp4": AtLoad(NVFP4_AT_LOAD, LayerForm("e2m1", group=16, scale_dtype="F8_E4M3", has_output_scales=True)),
    "int4": AtLoad(INT4_AT_LOAD, LayerForm("int4", group=128, scale_dtype="BF16")),
}

_LAYERS = "linear layers and experts are quantized when loaded, with a scale per"
#: What ``pdserve explain`` says of them.
AT_LOAD_NOTES = {
    FP8_AT_LOAD: f"FP8: {_LAYERS} output",
    NVFP4_AT_LOAD: f"NVFP4: {_LAYERS} 16 inputs",
    INT4_AT_LOAD: f"4-bit integers: {_LAYERS} 128 inputs",
}


def at_load_form(weight_format: str) -> LayerForm | None:
    """Return the form of weights that are quantized when they are loaded; None for a checkpoint's own format."""
    return next((entry.form for entry in AT_LOAD.values() if entry.weight_format == weight_format), None)


def is_at_load(weight_format: str) -> bool:
    return at_load_form(weight_format) is not None
