"""A checkpoint's ``config.json`` as plain values. Torch-free: router, oracle and CLI read configs, too."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pdserve.config.attention_spec import AttentionSpec
from pdserve.config.config_fields import ConfigFields
from pdserve.config.families import FAMILIES
from pdserve.config.weight_formats import SUPPORTED_DTYPES, UNQUANTIZED, read_weight_format
from pdserve.kv import AnyKVCacheSpec, FullAttentionSpec


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding: ``rope_type`` is default, linear, dynamic, yarn or llama3; ``params`` holds its numbers."""

    theta: float
    rope_type: str = "default"
    params: dict[str, Any] = {}


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder-only transformer of one of the families in ``FAMILIES``."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    dtype: str  # of the checkpoint: float32, bfloat16 or float16
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention: tuple[AttentionSpec, ...] = ()  # per layer
    weight_format: str = UNQUANTIZED  # of the linear layers, in WEIGHT_FORMATS
    quantization: dict[str, Any] = {}  # config.json's quantization_config
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # of generation_config.json, else config.json

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Return each layer's window in tokens; None is full attention."""
        return tuple(spec.window for spec in self.attention)

    def kv_cache_specs(self, dtype: str) -> tuple[AnyKVCacheSpec, ...]:
        """Return what each layer keeps per token. Layers with a sliding window keep all tokens, too."""
        return (FullAttentionSpec(self.num_kv_heads, self.head_dim, dtype),) * self.num_layers


# Rope types with the numbers that each needs beside theta.
_ROPE_PARAMS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),  # a missing factor follows from the two lengths
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}


def load_model_config(model_dir: Path) -> ModelConfig:
    """Read ``config.json`` (the format of transformers 4 or 5) and, for EOS, ``generation_config.json``.

    Raises CheckpointError for anything that is missing, broken or not supported.
    """
    fields = ConfigFields(model_dir / "config.json")
    architecture = _architecture(fields)
    family = FAMILIES[architecture]
    fields.defaults = family.defaults
    weight_format = read_weight_format(fields)
    _check_activation(fields)
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    hidden_size = fields.integer("hidden_size")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
    max_position_embeddings = fields.integer("max_position_embeddings")
    return ModelConfig(
        architecture=architecture,
        vocab_size=fields.integer("vocab_size"),
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6),
        rope=_rope(fields, max_position_embeddings),
        max_position_embeddings=max_position_embeddings,
        dtype=_dtype(fields),
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        attention=tuple(
            AttentionSpec(scale=head_dim**-0.5, window=window) for window in family.windows(fields, num_layers)
        ),
        weight_format=weight_format,
        quantization=fields.get("quantization_config") or {},
        bos_token_id=fields.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(model_dir, fields),
    )


def _architecture(fields: ConfigFields) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in FAMILIES:
        raise fields.error(f"has architecture {name!r}; supported are {', '.join(FAMILIES)}. Choose a model of these")
    return str(name)


def _check_activation(fields: ConfigFields) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"has hidden_act = {activation!r}; supported is 'silu'")


def _dtype(fields: ConfigFields) -> str:
    dtype = fields.get("dtype", fields.get("torch_dtype", "float32"))
    if dtype not in SUPPORTED_DTYPES:
        raise fields.error(
            f"has dtype {dtype!r}; supported are {', '.join(SUPPORTED_DTYPES)}. Convert the checkpoint to one of them"
        )
    return str(dtype)


def _rope(fields: ConfigFields, max_position_embeddings: int) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` with ``rope_scaling`` (4; "type" is older)."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise fields.error(f"has rope_parameters = {given!r}; it must be an object")
    nested = [value for value in given.values() if isinstance(value, dict)]
    if nested:
        if any(value != nested[0] for value in nested):
            raise fields.error("has different rope_parameters per layer type; supported is one set for all layers")
        given = nested[0]
    params = {name: value for name, value in given.items() if value is not None}
    rope_type = params.pop("rope_type", params.get("type", "default"))
    params.pop("type", None)
    if rope_type not in _ROPE_PARAMS:
        raise fields.error(f"has rope type {rope_type!r}; supported are {', '.join(_ROPE_PARAMS)}")
    theta = params.pop("rope_theta", None) or fields.number("rope_theta", 10_000.0)
    partial = params.pop("partial_rotary_factor", fields.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise fields.error(f"has partial_rotary_factor {partial!r}; supported is 1.0")
    if rope_type == "dynamic":
        params["original_max_position_embeddings"] = max_position_embeddings
    elif rope_type in ("yarn", "llama3"):
        params.setdefault("original_max_position_embeddings", max_position_embeddings)
        outer = fields.get("original_max_position_embeddings")
        if outer is not None:
            params["original_max_position_embeddings"] = outer
    if rope_type == "yarn":
        params.setdefault("factor", max_position_embeddings / params["original_max_position_embeddings"])
    for name in _ROPE_PARAMS[rope_type]:
        if name not in params:
            raise fields.error(f"has rope type {rope_type!r} without {name!r}")
    for name, value in [*params.items(), ("rope_theta", theta)]:
        if not isinstance(value, int | float):
            raise fields.error(f"has {name} = {value!r} for rope type {rope_type!r}; it must be a number")
    return RopeConfig(theta=float(theta), rope_type=rope_type, params=params)


def _eos_token_ids(model_dir: Path, fields: ConfigFields) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    value = ConfigFields(path).get("eos_token_id") if path.exists() else None
    if value is None:
        value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise fields.error(f"has eos_token_id = {value!r}; it must be a token id or a list of them")
    return tuple(ids)
