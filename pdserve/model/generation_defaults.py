"""Sampling parameters that a checkpoint recommends for requests that do not give their own: generation_config.json.

The field names are those of transformers' GenerationConfig.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec

from pdserve.model.config_fields import ConfigFields
from pdserve.ranges import Range, ranges_of
from pdserve.sampling_params import SamplingParams

_FILE = "generation_config.json"


class GenerationDefaults(msgspec.Struct, frozen=True, omit_defaults=True):
    """Without a file, these are the values without effect, and the API's own limits of output tokens apply."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0 and -1: off
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    max_new_tokens: int | None = None
    max_length: int | None = None  # tokens of prompt and output

    def max_tokens(self, prompt_len: int) -> int | None:
        """Return the recommended limit of output tokens, at least 1; None: there is none."""
        if self.max_new_tokens is not None or self.max_length is None:
            return self.max_new_tokens
        return max(1, self.max_length - prompt_len)

    def __str__(self) -> str:
        """Name the values that have an effect."""
        given = msgspec.structs.asdict(self).items()
        unset = GenerationDefaults()
        return ", ".join(f"{name} {value:g}" for name, value in given if value != getattr(unset, name)) or "none"


#: Sampling parameters for which a model may have a default.
RECOMMENDED = tuple(name for name in GenerationDefaults.__struct_fields__ if name in SamplingParams.__struct_fields__)
_LEAST = 1e-6  # replaces 0 where 0 is excluded
_TOKENS = Range(1, 2**31 - 1)
_WHOLE = ("top_k", "max_new_tokens", "max_length")


def load_generation_defaults(model_dir: Path) -> GenerationDefaults:
    """Read the file, if there is one. Raises CheckpointError for a value that no request may have."""
    path = model_dir / _FILE
    if not os.path.exists(path):
        return GenerationDefaults()
    fields = ConfigFields(path)
    values: dict[str, Any] = {}
    for name in GenerationDefaults.__struct_fields__:
        value = fields.get(name)
        if value is None:
            continue
        allowed = ranges_of(SamplingParams).get(name, _TOKENS)
        fields.check_number(name, value, _LEAST if allowed.above else allowed.low, allowed.high)
        if name in _WHOLE and value != int(value):
            raise fields.error(f"has {name} = {value:g}; it must be a whole number")
        values[name] = int(value) if name in _WHOLE else float(value)
    return GenerationDefaults(**values)
