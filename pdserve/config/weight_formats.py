"""The weight formats that nodes can load, and the memory each takes. The layers are in runner/models/quantization."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from pdserve.config.config_fields import REMEDY, ConfigFields
from pdserve.errors import shown
from pdserve.kv import DTYPE_BYTES

UNQUANTIZED = "unquantized"
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")


class WeightFormat(msgspec.Struct, frozen=True):
    linear_method: str  # "module.Class" below runner.models.quantization
    bytes_per_weight: Callable[[str], float]  # of linear layers with their scales, in a model served in a dtype


#: By the quant_method of a checkpoint's quantization_config.
WEIGHT_FORMATS: dict[str, WeightFormat] = {
    UNQUANTIZED: WeightFormat("unquantized.UnquantizedLinearMethod", lambda dtype: DTYPE_BYTES[dtype]),
}


def read_weight_format(fields: ConfigFields) -> str:
    """Return the format that ``quantization_config`` names. Raises CheckpointError for an unknown one."""
    quantization = fields.get("quantization_config")
    if not quantization:
        return UNQUANTIZED
    name = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
    if not isinstance(quantization, dict) or not isinstance(name, str) or name not in WEIGHT_FORMATS:
        formats = [*SUPPORTED_DTYPES, *(known for known in WEIGHT_FORMATS if known != UNQUANTIZED)]
        raise fields.error(
            f"describes a quantized checkpoint ({shown(name)}); supported are {', '.join(formats)} weights. "
            "Choose a checkpoint in one of these formats"
        )
    try:
        msgspec.msgpack.encode(quantization)  # as it travels to the ranks
    except OverflowError as exc:
        raise fields.error(f"has a number beyond 64 bits in quantization_config. {REMEDY}") from exc
    return name
