"""What a checkpoint's ``config.json`` says, as plain values. Torch-free, so that ``pdserve explain`` stays quick."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pdserve.config.attention_spec import AttentionSpec
from pdserve.errors import CheckpointError
from pdserve.kv import AnyKVCacheSpec, FullAttentionSpec


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding: ``rope_type`` is default, linear, dynamic, yarn or llama3; ``params`` holds its numbers."""

    theta: float
    rope_type: str = "default"
    params: dict[str, Any] = {}


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder-only transformer of one of the supported families."""

    architecture: str  # LlamaForCausalLM, MistralForCausalLM or Qwen3ForCausalLM
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
    qk_norm: bool = False
    attention: tuple[AttentionSpec, ...] = ()  # per layer
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # of generation_config.json, else config.json

    @property
    def sliding_windows(self) -> tuple[int | None, ...]:
        """Return each layer's window in tokens; None is full attention."""
        return tuple(spec.window for spec in self.attention)

    def kv_cache_specs(self, dtype: str) -> tuple[AnyKVCacheSpec, ...]:
        """Return what each layer keeps per token. Layers with a sliding window keep all tokens, too."""
        return (FullAttentionSpec(self.num_kv_heads, self.head_dim, dtype),) * self.num_layers


# Architectures with the values transformers assumes where config.json leaves a field out.
_FAMILY_DEFAULTS: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
}
SUPPORTED_ARCHITECTURES = tuple(_FAMILY_DEFAULTS)
SUPPORTED_DTYPES = ("float32", "bfloat16", "float16")

# Rope variants with the numbers each of them needs beside theta.
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
    fields = _Fields(model_dir / "config.json")
    architecture = _architecture(fields)
    fields.defaults = _FAMILY_DEFAULTS[architecture]
    _refuse_unsupported(fields)
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
    is_llama, is_qwen = architecture.startswith("Llama"), architecture.startswith("Qwen")
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
        tie_word_embeddings=bool(fields.get("tie_word_embeddings", False)),
        attention_bias=(is_llama or is_qwen) and bool(fields.get("attention_bias", False)),
        mlp_bias=is_llama and bool(fields.get("mlp_bias", False)),
        qk_norm=is_qwen,
        attention=tuple(
            AttentionSpec(scale=head_dim**-0.5, window=window)
            for window in _sliding_windows(fields, architecture, num_layers)
        ),
        bos_token_id=fields.get("bos_token_id"),
        eos_token_ids=_eos_token_ids(model_dir, fields),
    )


class _Fields:
    """A JSON object on disk, with typed access and errors that name file, field and value."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.defaults: dict[str, Any] = {}
        try:
            values = msgspec.json.decode(path.read_bytes())
        except FileNotFoundError as exc:
            raise CheckpointError(
                f"{path} does not exist; a model directory holds config.json, a tokenizer and *.safetensors"
            ) from exc
        except (OSError, msgspec.DecodeError) as exc:
            raise CheckpointError(f"{path} cannot be read as JSON ({exc}); download the checkpoint again") from exc
        if not isinstance(values, dict):
            raise self.error(f"holds a {type(values).__name__}, not an object; download the checkpoint again")
        self.values: dict[str, Any] = values

    def get(self, name: str, default: Any = None) -> Any:
        """The field, else what its family assumes, else ``default``. A JSON null in the file counts as absent."""
        if name in self.values:
            value = self.values[name]
            return default if value is None else value
        return self.defaults.get(name, default)

    def integer(self, name: str, default: int | None = None) -> int:
        value = self.get(name, default)
        if value is None:
            raise self.error(f"lacks {name!r}, which {'/'.join(SUPPORTED_ARCHITECTURES)} need")
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise self.error(f"has {name} = {value!r}; it must be a positive whole number")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
            raise self.error(f"has {name} = {value!r}; it must be a positive number")
        return float(value)

    def error(self, message: str) -> CheckpointError:
        return CheckpointError(f"{self.path} {message}")


def _architecture(fields: _Fields) -> str:
    names = fields.get("architectures")
    name = names[0] if isinstance(names, list) and names else names
    if name not in _FAMILY_DEFAULTS:
        raise fields.error(
            f"has architecture {name!r}; supported are {', '.join(SUPPORTED_ARCHITECTURES)}. Choose a model of these"
        )
    return str(name)


def _refuse_unsupported(fields: _Fields) -> None:
    quantization = fields.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method") if isinstance(quantization, dict) else quantization
        raise fields.error(
            f"describes a quantized checkpoint ({method!r}); supported are {', '.join(SUPPORTED_DTYPES)} weights. "
            "Choose the unquantized model"
        )
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"has hidden_act = {activation!r}; supported is 'silu'")


def _dtype(fields: _Fields) -> str:
    dtype = fields.get("dtype", fields.get("torch_dtype", "float32"))
    if dtype not in SUPPORTED_DTYPES:
        raise fields.error(
            f"has dtype {dtype!r}; supported are {', '.join(SUPPORTED_DTYPES)}. Convert the checkpoint to one of them"
        )
    return str(dtype)


def _rope(fields: _Fields, max_position_embeddings: int) -> RopeConfig:
    """``rope_parameters`` (transformers 5) or ``rope_theta`` with ``rope_scaling`` (4, where "type" is older yet)."""
    given = fields.get("rope_parameters") or fields.get("rope_scaling") or {}
    if not isinstance(given, dict):
        raise fields.error(f"has rope_parameters = {given!r}; it must be an object")
    nested = [value for value in given.values() if isinstance(value, dict)]
    if nested:
        if any(value != nested[0] for value in nested):
            raise fields.error("has other rope_parameters for each layer type; supported is one set for all layers")
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


def _sliding_windows(fields: _Fields, architecture: str, num_layers: int) -> tuple[int | None, ...]:
    if architecture == "MistralForCausalLM":
        window = fields.integer("sliding_window") if fields.get("sliding_window") is not None else None
        return (window,) * num_layers
    if architecture != "Qwen3ForCausalLM" or not fields.get("use_sliding_window", False):
        return (None,) * num_layers
    window = fields.integer("sliding_window") if fields.get("sliding_window") is not None else None
    first = fields.get("max_window_layers", num_layers)
    layer_types = fields.get("layer_types") or [
        "sliding_attention" if window and layer >= first else "full_attention" for layer in range(num_layers)
    ]
    if len(layer_types) != num_layers:
        raise fields.error(f"has {len(layer_types)} layer_types for {num_layers} layers")
    for layer_type in layer_types:
        if layer_type not in ("full_attention", "sliding_attention"):
            raise fields.error(f"has layer type {layer_type!r}; supported are full_attention and sliding_attention")
    if window is None and "sliding_attention" in layer_types:
        raise fields.error("has sliding_attention layers but no sliding_window")
    return tuple(window if layer_type == "sliding_attention" else None for layer_type in layer_types)


def _eos_token_ids(model_dir: Path, fields: _Fields) -> tuple[int, ...]:
    path = model_dir / "generation_config.json"
    value = _Fields(path).get("eos_token_id") if path.exists() else None
    if value is None:
        value = fields.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(token, int) for token in ids):
        raise fields.error(f"has eos_token_id = {value!r}; it must be a token id or a list of them")
    return tuple(ids)
