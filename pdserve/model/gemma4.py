"""Gemma 4's text models as config.json describes them: two kinds of layers, shared KV, embeddings per layer, experts.

Layers with a window and layers with full attention differ in KV heads, rotary embedding and, for some models, in
whether values are the keys. The last layers may read the KV of the last layer of their kind that has its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import msgspec

from pdserve.errors import shown
from pdserve.kv.groups import KVHeads, finest_heads
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.kv_heads import gemma4_layer_types, gemma4_windows, other_overrides, read_kv_heads
from pdserve.model.moe import MoEConfig
from pdserve.model.rope import RopeConfig, read_rope

_ACTIVATION = "gelu_pytorch_tanh"
_ROPES: dict[str, dict[str, Any]] = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
    "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
}


class Gemma4Config(msgspec.Struct, frozen=True, kw_only=True):
    """Properties that only Gemma 4 has. ``ModelConfig.rope`` belongs to layers with a window."""

    full_rope: RopeConfig
    values_are_keys: bool  # in layers with full attention: both are norms of one projection
    size_per_layer: int  # size of each token's embedding in each layer; 0: there is none
    wide_mlp: bool  # MLPs of layers without their own KV have twice the intermediate size
    logit_cap: float | None  # logits become cap * tanh(logits / cap)
    padding: int  # token whose embeddings per layer tokens of images have

    def projects_once(self, spec: AttentionSpec) -> bool:
        """Whether the values of a layer are norms of its projected keys."""
        return self.values_are_keys and spec.window is None


def kv_sources(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Return the layer whose KV each layer reads; empty if each has its own. Raises CheckpointError."""
    shared = fields.integer("num_kv_shared_layers", 0, least=0)
    if not shared:
        return ()
    types = gemma4_layer_types(fields, num_layers)
    own = types[: max(0, num_layers - shared)]
    if set(own) != set(types):
        raise fields.error(
            f"has num_kv_shared_layers {shared} of {num_layers}; a layer of each type must have its own KV. {REMEDY}"
        )
    last = {layer_type: layer for layer, layer_type in enumerate(own)}
    return (*range(len(own)), *(last[layer_type] for layer_type in types[len(own) :]))


def complete(fields: ConfigFields, num_layers: int, num_heads: int, usual: KVHeads) -> dict[str, Any]:
    """Return fields of a ModelConfig that only Gemma 4 has, or has other values for. Raises CheckpointError.

    ``usual``: the KV heads of layers with a window.
    """
    if others := other_overrides(fields):
        raise fields.error(f"has {', '.join(sorted(others))} per layer, which native layers do not read. {REMEDY}")
    of_layer = gemma4_windows(fields, num_layers)
    heads = read_kv_heads(fields, of_layer, usual)
    for kind in set(heads):
        if num_heads % kind.num_kv_heads or kind.head_dim % 2:
            raise fields.error(
                f"has {num_heads} attention heads and {kind}; the first must be a multiple of the second, and "
                f"the size even. {REMEDY}"
            )
    sources = kv_sources(fields, num_layers)
    own = tuple(kind for layer, kind in enumerate(heads) if not sources or sources[layer] == layer)
    finest = finest_heads(own)
    sizes = [
        next((kind.head_dim for kind, window in zip(heads, of_layer, strict=True) if bool(window) == has_window), 0)
        for has_window in (True, False)
    ]
    rope, gemma4 = _read(fields, [size or finest.head_dim for size in sizes])
    sees_images = fields.get("use_bidirectional_attention") == "vision"  # layers with full attention never do
    return {
        "rope": rope,
        "num_kv_heads": finest.num_kv_heads,
        "head_dim": finest.head_dim,
        "attention": tuple(
            AttentionSpec(scale=1.0, window=window, whole_images=sees_images and window is not None)
            for window in of_layer
        ),
        "kv_heads": own if len(set(own)) > 1 else (),
        "kv_sources": sources,
        "moe": _moe(fields),
        "gemma4": gemma4,
    }


def _read(fields: ConfigFields, sizes: Sequence[int]) -> tuple[RopeConfig, Gemma4Config]:
    """Return the rotary embedding of layers with a window, and what else layers read.

    ``sizes``: elements of a head in layers with a window, and with full attention.
    """
    activation = fields.get("hidden_activation", _ACTIVATION)
    if activation != _ACTIVATION:
        raise fields.error(f"has hidden_activation = {shown(activation)}; supported is {_ACTIVATION!r}. {REMEDY}")
    if fields.get("use_bidirectional_attention") == "all":
        raise fields.error("has use_bidirectional_attention = 'all', attention to later tokens. Choose a causal model")
    if fields.flag("attention_bias"):
        raise fields.error("has attention_bias = true; supported is false. Leave --model-impl at transformers")
    size_per_layer = fields.integer("hidden_size_per_layer_input", 0, least=0)
    vocab_size = fields.integer("vocab_size")
    vocab_per_layer = fields.get("vocab_size_per_layer_input")
    if size_per_layer and vocab_per_layer != vocab_size:
        raise fields.error(
            f"has vocab_size_per_layer_input {shown(vocab_per_layer)} beside vocab_size {vocab_size}; supported are "
            f"equal ones. {REMEDY}"
        )
    cap = fields.get("final_logit_softcapping")
    if cap is not None:
        cap = float(fields.check_number("final_logit_softcapping", cap, 1e-3, 1e6))
    sliding, full = (_rope(fields, kind, size) for kind, size in zip(_ROPES, sizes, strict=True))
    return sliding, Gemma4Config(
        full_rope=full,
        values_are_keys=fields.flag("attention_k_eq_v"),
        size_per_layer=size_per_layer,
        wide_mlp=fields.flag("use_double_wide_mlp"),
        logit_cap=cap,
        padding=fields.integer("pad_token_id", 0, least=0),
    )


def _moe(fields: ConfigFields) -> MoEConfig | None:
    """Return the experts beside the dense MLP of each layer, which takes every token; None without any."""
    if not fields.flag("enable_moe_block"):
        for name in ("num_experts", "top_k_experts", "moe_intermediate_size"):
            fields.given(name)  # marks the field as read, although it is not used
        return None
    config = MoEConfig(
        num_experts=fields.integer("num_experts"),
        top_k=fields.integer("top_k_experts"),
        intermediate_size=fields.integer("moe_intermediate_size"),
        shared_intermediate_size=fields.integer("intermediate_size"),
    )
    if config.top_k > config.num_experts:
        raise fields.error(f"chooses {config.top_k} of {config.num_experts} experts per token. {REMEDY}")
    return config


def _rope(fields: ConfigFields, layer_type: str, head_dim: int) -> RopeConfig:
    """Read the rotary embedding of a type of layers. Proportional ones rotate the first part of all pairs."""
    given = fields.given("rope_parameters")
    params = _ROPES[layer_type] if given is None else given.get(layer_type) if isinstance(given, dict) else None
    if not isinstance(params, dict):
        raise fields.error(f"has rope_parameters = {shown(given)}; it must have {layer_type}. {REMEDY}")
    params = {name: value for name, value in params.items() if value is not None}
    part = 1.0
    proportional = params.get("rope_type") == "proportional"
    if proportional:
        part = fields.check_number("partial_rotary_factor", params.pop("partial_rotary_factor", 1.0), 0.0, 1.0)
        factor = fields.check_number("factor", params.pop("factor", 1.0), 1e-3, 1e6)
        params["rope_type"] = "default"
    within = copy(fields)
    within.values = {"rope_parameters": params}
    within.within = f"{fields.within} rope_parameters {layer_type}"
    rope = read_rope(within, fields.integer("max_position_embeddings"), head_dim, partial_rotary=False)
    if rope.rope_type == "dynamic":
        raise fields.error(f"has rope type 'dynamic' for {layer_type}; supported are all others. {REMEDY}")
    if not proportional:
        return rope
    return msgspec.structs.replace(
        rope, rope_type="proportional", params={"factor": float(factor), "partial_rotary_factor": float(part)}
    )
