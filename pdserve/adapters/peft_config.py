"""``adapter_config.json`` of PEFT: a field that changes the mathematics is implemented, or refused by name.

https://huggingface.co/docs/peft/package_reference/lora#peft.LoraConfig (the fields are those of PEFT 0.21)
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdserve.checkpoint.files import read_object
from pdserve.errors import CheckpointError, cut, shown

CONFIG_FILE = "adapter_config.json"
_MAX_CONFIG = 4 << 20  # bytes
_MAX_PATTERNS = 4096  # keys of rank_pattern and alpha_pattern
_MAX_PATTERN = 512  # characters of such a key
_MAX_RANK = 1 << 16
_MAX_ALPHA = 1e6
_NESTED_REPEAT = re.compile(r"\)[*+{]")  # a repeated group may match in exponential time
_REPEATS = 3  # repetitions in a pattern: each multiplies the time of a match by the length of a name

#: Fields without effect on what a trained adapter computes.
_IGNORED = frozenset(
    {
        "auto_mapping",
        "base_model_name_or_path",
        "corda_config",  # with eva_config, loftq_config and lora_ga_config: options of init_lora_weights
        "ensure_weight_tying",
        "eva_config",
        "inference_mode",
        "loftq_config",
        "lora_dropout",
        "lora_ga_config",
        "megatron_core",
        "peft_version",
        "qalora_group_size",
        "revision",
        "runtime_config",
        "task_type",
        "velora_config",  # compresses activations of the backward pass
    }
)
_IMPLEMENTED = frozenset(
    {
        "alpha_pattern",
        "bias",
        "exclude_modules",
        "init_lora_weights",
        "layers_pattern",
        "layers_to_transform",
        "lora_alpha",
        "peft_type",
        "r",
        "rank_pattern",
        "target_modules",
        "use_rslora",
    }
)
#: Initializations that leave the base's weights as they are.
_PLAIN_INITS = (True, False, None, "gaussian", "eva", "orthogonal")
_RETRAIN = "train the adapter without it, or merge it into the base and serve the result"


class PeftConfig(msgspec.Struct, frozen=True):
    """Ranks and scalings of a configuration, by default and by module."""

    rank: int
    alpha: float
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}  # by a regular expression of the end of a module's name; the first match counts
    alpha_pattern: dict[str, float] = {}
    target_modules: tuple[str, ...] = ()  # ends of module names; empty: not listed
    layers: tuple[int, ...] = ()  # layers_to_transform; empty: all

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, which is named as in the adapter's model."""
        return self.rank_pattern.get(_first_match(self.rank_pattern, module), self.rank)

    def scaling_of(self, module: str) -> float:
        rank = self.rank_of(module)
        alpha = self.alpha_pattern.get(_first_match(self.alpha_pattern, module), self.alpha)
        return alpha / math.sqrt(rank) if self.use_rslora else alpha / rank

    def targets(self, module: str) -> bool:
        """Whether PEFT would put an adapter on a module, as far as lists of names and layers say."""
        listed = self.target_modules
        if listed and not any(module == name or module.endswith(f".{name}") for name in listed):
            return False
        layer = re.search(r"\.layers\.(\d+)\.", f".{module}")
        return not self.layers or (layer is not None and int(layer[1]) in self.layers)


def read_peft_config(directory: Path) -> PeftConfig:
    """Read and check ``adapter_config.json``. Raises CheckpointError."""
    path = directory / CONFIG_FILE
    values = read_object(path, _MAX_CONFIG)
    kind = values.get("peft_type")
    if kind != "LORA":
        raise _error(path, "peft_type", kind, 'only "LORA" is served; choose a LoRA adapter')
    _refuse_others(path, values)
    return PeftConfig(
        rank=_rank(path, "r", values.get("r", 8)),
        alpha=_alpha(path, "lora_alpha", values.get("lora_alpha", 8)),
        use_rslora=_flag(path, "use_rslora", values.get("use_rslora", False)),
        rank_pattern={
            key: _rank(path, f"rank_pattern of {key}", v) for key, v in _pattern(path, values, "rank_pattern")
        },
        alpha_pattern={
            key: _alpha(path, f"alpha_pattern of {key}", v) for key, v in _pattern(path, values, "alpha_pattern")
        },
        target_modules=_names(path, "target_modules", values.get("target_modules")),
        layers=_layers(path, values),
    )


def _refuse_others(path: Path, values: Mapping[str, Any]) -> None:
    """Raise CheckpointError for the first field that is set and not implemented."""
    if values.get("bias", "none") != "none":
        raise _error(path, "bias", values["bias"], f'only "none" is served; {_RETRAIN}')
    init = values.get("init_lora_weights", True)
    if not any(init is plain or (isinstance(init, str) and init == plain) for plain in _PLAIN_INITS):
        raise _error(
            path,
            "init_lora_weights",
            init,
            "such an adapter belongs to changed weights of the base; save it with "
            "path_initial_model_for_weight_conversion, which converts it to a plain one",
        )
    for name, value in values.items():
        if name in _IGNORED or name in _IMPLEMENTED or not value or value == "none":
            continue
        raise _error(path, name, value, f"this field is not served; {_RETRAIN}")


def _pattern(path: Path, values: Mapping[str, Any], name: str) -> Sequence[tuple[str, Any]]:
    pattern = values.get(name) or {}
    if not isinstance(pattern, dict) or len(pattern) > _MAX_PATTERNS:
        raise _error(path, name, pattern, f"it must be an object of at most {_MAX_PATTERNS} names; correct it")
    for key in pattern:
        repeats = sum(key.count(character) for character in "*+{")
        if len(key) > _MAX_PATTERN or repeats > _REPEATS or _NESTED_REPEAT.search(key):
            limit = f"{_MAX_PATTERN} characters, {_REPEATS} repetitions and no repeated group"
            raise _error(path, name, key, f"the limit of a regular expression is {limit}; list the names")
        try:
            re.compile(key)
        except (re.error, OverflowError, RecursionError) as exc:
            raise _error(path, name, key, f"this is no regular expression ({exc}); correct it") from exc
    return list(pattern.items())


def _first_match(pattern: Iterable[str], module: str) -> str:
    """Return the first key that matches the end of a module's name, as PEFT's get_pattern_key does; "" if none does."""
    return next((key for key in pattern if re.match(rf"(.*\.)?({key})$", module)), "")


def _layers(path: Path, values: Mapping[str, Any]) -> tuple[int, ...]:
    layers = values.get("layers_to_transform")
    if layers is None or values.get("layers_pattern") not in (None, [], "layers", ["layers"]):
        return ()  # other patterns name other lists of layers
    layers = [layers] if isinstance(layers, int) else layers
    if not isinstance(layers, list) or not all(isinstance(layer, int) for layer in layers):
        raise _error(path, "layers_to_transform", layers, "it must be numbers of layers; correct it")
    return tuple(layers)


def _names(path: Path, field: str, value: Any) -> tuple[str, ...]:
    """Return a list of names; a regular expression is not compared with the tensors, which say the same."""
    if value is None or isinstance(value, str):
        return ()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _error(path, field, value, "it must be a list of names or one regular expression; correct it")
    return tuple(value)


def _rank(path: Path, field: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= _MAX_RANK:
        raise _error(path, field, value, f"a rank is an integer from 1 to {_MAX_RANK}; correct it")
    return value


def _alpha(path: Path, field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= _MAX_ALPHA:
        raise _error(path, field, value, f"an alpha is a number of at most {_MAX_ALPHA:g}; correct it")
    return float(value)


def _flag(path: Path, field: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise _error(path, field, value, "it must be true or false; correct it")
    return bool(value)


def _error(path: Path, field: str, value: object, remedy: str) -> CheckpointError:
    return CheckpointError(f"{path} has {cut(field)} = {shown(value)}; {remedy}")
