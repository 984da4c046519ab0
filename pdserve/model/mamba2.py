"""Hybrids of Mamba2 and attention as config.json describes them: Granite 4, Nemotron-H and Falcon-H1.

Granite 4    each layer mixes tokens by Mamba2 or by attention; an MLP, or experts beside it, follows
Nemotron-H   each layer is one of Mamba2, attention, an MLP without gates, or such experts
Falcon-H1    each layer mixes tokens by both, from the same inputs, and adds the results; an MLP follows
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.errors import shown
from pdserve.kv.groups import KVHeads
from pdserve.kv.states import Mamba2Spec
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.moe import granite_moe, nemotron_moe
from pdserve.model.rope import NO_ROPE, read_rope

MAMBA = "M"
ATTENTION = "*"
MLP = "-"
EXPERTS = "E"
_KINDS = {
    "linear_attention": MAMBA,
    "mamba": MAMBA,
    "full_attention": ATTENTION,
    "attention": ATTENTION,
    "mlp": MLP,
    "moe": EXPERTS,
}
#: Earlier names of Nemotron-H's fields, which replace the usual ones, as in transformers.
_EARLIER_NAMES = {
    "mamba_n_groups": "n_groups",
    "mamba_d_conv": "conv_kernel",
    "mamba_dt_min": "time_step_min",
    "mamba_conv_bias": "use_conv_bias",
}
#: Fields of Nemotron-H that only training, or code of NVIDIA's own, reads.
_NEMOTRON_UNUSED = (
    "attention_bias",
    "chunk_size",
    "expand",
    "hidden_dropout",
    "mamba_chunk_size",
    "mamba_dt_init_floor",
    "mamba_dt_limit",
    "mamba_dt_max",
    "mamba_expand",
    "mamba_proj_bias",
    "mamba_ssm_cache_dtype",
    "moe_shared_expert_overlap",
    "mtp_hybrid_override_pattern",
    "mtp_layers_block_type",
    "n_shared_experts",
    "num_logits_to_keep",
    "rescale_prenorm_residual",
    "residual_in_fp32",
    "time_step_floor",
    "time_step_limit",
    "time_step_max",
    "use_mamba_kernels",
)
_ROPE = ("partial_rotary_factor", "rope_parameters", "rope_scaling", "rope_theta")
_SCALES = (-1e6, 1e6)


class Mamba2Config(msgspec.Struct, frozen=True, kw_only=True):
    """Properties of hybrids with Mamba2 beside the sizes of the state. Scales are factors, 1 where there are none."""

    conv_bias: bool
    in_bias: bool
    out_bias: bool
    least_step: float = 0.0  # limits of the time step, after its softplus
    most_step: float | None = None  # None: no limit
    norm: str = "behind gate"  # RMS norm of each group's outputs: "behind gate", "before gate", or "none"
    blocks: str = ""  # kinds of layers that have one part only; empty: each layer mixes tokens, then has an MLP
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # factor of what a mixer or an MLP adds to the residual
    logit_scale: float = 1.0
    attention_in_scale: float = 1.0
    attention_out_scale: float = 1.0
    input_scales: tuple[float, ...] = ()  # factors of what in_proj returns: gates, x, B, C, time steps; empty: 1
    out_scale: float = 1.0  # factor of what out_proj returns
    gate_scale: float = 1.0  # factor of the gates of an MLP
    down_scale: float = 1.0  # factor of the output of an MLP


# ---------------------------------------------------------------- Granite 4


def granite_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is Mamba2's; empty if no layer is."""
    kinds = _kinds(fields, ("layer_types", "layers_block_type"), f"{MAMBA}{ATTENTION}") or MAMBA * num_layers
    if len(kinds) != num_layers:
        raise fields.error(
            f"has {len(kinds)} layer_types for {num_layers} layers; it must be a list with one per layer"
        )
    _check_attends(fields, kinds)
    return tuple(kind == MAMBA for kind in kinds) if MAMBA in kinds else ()


def granite_state(fields: ConfigFields, dtype: str) -> Mamba2Spec:
    return _state(fields, fields.integer("mamba_expand") * fields.integer("hidden_size"), dtype)


def granite(fields: ConfigFields, num_layers: int, num_heads: int, usual: KVHeads) -> dict[str, Any]:
    """Return the fields of a ModelConfig that Granite 4 has values of its own for. Raises CheckpointError."""
    recurrent = granite_layers(fields, num_layers)
    attending = num_layers - sum(recurrent)
    scale = _number(fields, "attention_multiplier", least=1e-6)
    if fields.values.get("attention_multiplier", scale) is None:  # a null is the library's usual scale
        scale = usual.head_dim**-0.5
    shared = fields.integer("shared_intermediate_size")
    has_experts = fields.integer("num_local_experts", least=0) > 0
    rope = NO_ROPE
    if fields.get("position_embedding_type") == "rope":
        rope = read_rope(fields, fields.integer("max_position_embeddings"), usual.head_dim, partial_rotary=False)
    else:
        _unused(fields, *_ROPE)
    _unused(fields, "mamba_chunk_size", "num_experts_per_tok")
    return {
        "rope": rope,
        "attention": (AttentionSpec(scale=scale),) * attending,
        "intermediate_size": shared,
        "moe": granite_moe(fields, num_layers) if has_experts else None,
        "mamba2": Mamba2Config(
            conv_bias=fields.flag("mamba_conv_bias"),
            in_bias=fields.flag("mamba_proj_bias"),
            out_bias=fields.flag("mamba_proj_bias"),
            least_step=_step_limits(fields)[0],
            most_step=_step_limits(fields)[1],
            embedding_scale=_number(fields, "embedding_multiplier"),
            residual_scale=_number(fields, "residual_multiplier"),
            logit_scale=1 / _number(fields, "logits_scaling", least=1e-6),
        ),
    }


# ---------------------------------------------------------------- Nemotron-H


def rename_nemotron(fields: ConfigFields) -> None:
    """Write Nemotron-H's fields under their usual names: kinds of layers as a list, and their number."""
    values = fields.values
    for earlier, name in _EARLIER_NAMES.items():
        if fields.given(earlier) is not None:
            values[name] = values[earlier]
    kinds = _kinds(fields, ("layers_block_type", "layer_types"), f"{MAMBA}{ATTENTION}{MLP}{EXPERTS}")
    if not kinds:
        pattern = fields.get("hybrid_override_pattern", "ME*-")
        if not isinstance(pattern, str) or set(pattern) - set(_KINDS.values()) or not pattern:
            raise fields.error(
                f"has hybrid_override_pattern = {shown(pattern)}; it must consist of M, *, - and E. {REMEDY}"
            )
        kinds = pattern
    fields.given("hybrid_override_pattern")
    names = {kind: name for name, kind in reversed(_KINDS.items())}
    values["layers_block_type"] = [names[kind] for kind in kinds]
    values["num_hidden_layers"] = len(kinds)
    values["rms_norm_eps"] = fields.get("layer_norm_epsilon", 1e-5)


def nemotron_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    kinds = _nemotron_kinds(fields)
    _check_attends(fields, kinds)
    return tuple(kind == MAMBA for kind in kinds) if MAMBA in kinds else ()


def nemotron_state(fields: ConfigFields, dtype: str) -> Mamba2Spec:
    return _checked_state(
        fields,
        Mamba2Spec(
            key_heads=fields.integer("n_groups"),
            value_heads=fields.integer("mamba_num_heads"),
            key_dim=fields.integer("ssm_state_size"),
            value_dim=fields.integer("mamba_head_dim"),
            conv_width=fields.integer("conv_kernel", least=2),
            dtype=dtype,
        ),
    )


def nemotron(fields: ConfigFields, num_layers: int, num_heads: int, usual: KVHeads) -> dict[str, Any]:
    """Return the fields of a ModelConfig that Nemotron-H has values of its own for. Raises CheckpointError."""
    kinds = _nemotron_kinds(fields)
    fields.choice("mlp_hidden_act", fields.get("mlp_hidden_act", "relu2"), ("relu2",))
    fields.choice("mamba_hidden_act", fields.get("mamba_hidden_act", "silu"), ("silu", "swish"))
    if fields.get("sliding_window") is not None:
        raise fields.error(f"has sliding_window = {shown(fields.get('sliding_window'))}; supported is none. {REMEDY}")
    if fields.get("moe_latent_size") is not None:
        raise fields.error(
            f"has moe_latent_size = {shown(fields.get('moe_latent_size'))}: experts of latents; supported is none. "
            "Choose another checkpoint"
        )
    if fields.flag("mlp_bias") and EXPERTS in kinds:
        raise fields.error(f"has mlp_bias = true beside experts; supported is false. {REMEDY}")
    _unused(fields, *_NEMOTRON_UNUSED, *_ROPE)
    bias = fields.flag("use_bias")
    others = tuple(layer for layer, kind in enumerate(kinds) if kind != EXPERTS)
    return {
        "rope": NO_ROPE,
        "attention": (AttentionSpec(scale=usual.head_dim**-0.5),) * kinds.count(ATTENTION),
        "attends": tuple(kind == ATTENTION for kind in kinds),
        "attention_bias": False,
        "moe": nemotron_moe(fields, others) if EXPERTS in kinds else None,
        "mamba2": Mamba2Config(
            conv_bias=fields.flag("use_conv_bias"),
            in_bias=bias,
            out_bias=bias,
            least_step=_number(fields, "time_step_min", least=0.0),
            blocks=kinds,
        ),
    }


def _nemotron_kinds(fields: ConfigFields) -> str:
    return "".join(_KINDS[name] for name in fields.get("layers_block_type"))


# ---------------------------------------------------------------- Falcon-H1


def every_layer(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    return (True,) * num_layers


def falcon_state(fields: ConfigFields, dtype: str) -> Mamba2Spec:
    inner = fields.optional_integer("mamba_d_ssm") or fields.integer("mamba_expand") * fields.integer("hidden_size")
    _unused(fields, "mamba_expand")
    return _state(fields, inner, dtype)


def falcon(fields: ConfigFields, num_layers: int, num_heads: int, usual: KVHeads) -> dict[str, Any]:
    """Return the fields of a ModelConfig that Falcon-H1 has values of its own for. Raises CheckpointError.

    The factor of keys is a part of the scale of scores.
    """
    scale = usual.head_dim**-0.5 * _number(fields, "key_multiplier", least=1e-9)
    inputs = _number(fields, "ssm_in_multiplier")
    in_bias = fields.flag("mamba_proj_bias")
    if in_bias and inputs != 1:
        raise fields.error(
            f"has mamba_proj_bias = true beside ssm_in_multiplier {inputs}; supported is 1, or no bias. {REMEDY}"
        )
    norm = "before gate" if fields.flag("mamba_norm_before_gate") else "behind gate"
    gates, down = _numbers(fields, "mlp_multipliers", 2)
    _unused(fields, "mamba_chunk_size", "num_logits_to_keep", "layer_types", "layers_block_type")
    return {
        "rope": read_rope(fields, fields.integer("max_position_embeddings"), usual.head_dim, partial_rotary=False),
        "attention": (AttentionSpec(scale=scale),) * num_layers,
        "attends": (True,) * num_layers,
        "mamba2": Mamba2Config(
            conv_bias=fields.flag("mamba_conv_bias"),
            in_bias=in_bias,
            out_bias=fields.flag("projectors_bias"),
            least_step=_step_limits(fields)[0],
            most_step=_step_limits(fields)[1],
            norm=norm if fields.flag("mamba_rms_norm") else "none",
            embedding_scale=_number(fields, "embedding_multiplier"),
            logit_scale=_number(fields, "lm_head_multiplier"),
            attention_in_scale=_number(fields, "attention_in_multiplier"),
            attention_out_scale=_number(fields, "attention_out_multiplier"),
            input_scales=tuple(inputs * scale for scale in _numbers(fields, "ssm_multipliers", 5)),
            out_scale=_number(fields, "ssm_out_multiplier"),
            gate_scale=gates,
            down_scale=down,
        ),
    }


# ---------------------------------------------------------------- fields


def _state(fields: ConfigFields, inner: int, dtype: str) -> Mamba2Spec:
    """Read the sizes of Granite's and Falcon's mixers, which have ``inner`` values."""
    heads = fields.integer("mamba_n_heads")
    size = fields.get("mamba_d_head", "auto")
    size = inner // heads if size == "auto" else fields.integer("mamba_d_head")
    if heads * size != inner:
        raise fields.error(f"has {heads} mamba_n_heads of {size} values for a mixer of {inner}. {REMEDY}")
    spec = Mamba2Spec(
        key_heads=fields.integer("mamba_n_groups"),
        value_heads=heads,
        key_dim=fields.integer("mamba_d_state"),
        value_dim=size,
        conv_width=fields.integer("mamba_d_conv", least=2),
        dtype=dtype,
    )
    return _checked_state(fields, spec)


def _checked_state(fields: ConfigFields, spec: Mamba2Spec) -> Mamba2Spec:
    if spec.value_heads % spec.key_heads:
        raise fields.error(f"{spec.value_heads} heads of Mamba2 cannot share {spec.key_heads} groups evenly. {REMEDY}")
    return spec


def _kinds(fields: ConfigFields, names: tuple[str, ...], supported: str) -> str:
    """Return the kinds of layers by the first list among ``names``; empty without any."""
    lists = [fields.given(name) for name in names]
    layers = next((layers for layers in lists if layers is not None), None)
    if layers is None:
        return ""
    if not isinstance(layers, list) or not layers:
        raise fields.error(f"has {names[0]} = {shown(layers)}; it must be a list with one per layer. {REMEDY}")
    allowed = tuple(name for name, kind in _KINDS.items() if kind in supported)
    return "".join(_KINDS[fields.choice("layer type", layer, allowed)] for layer in layers)


def _check_attends(fields: ConfigFields, kinds: str) -> None:
    if ATTENTION not in kinds:
        raise fields.error(f"has no layer that attends; a model without a KV cache is not supported. {REMEDY}")


def _step_limits(fields: ConfigFields) -> tuple[float, float | None]:
    """Read ``time_step_limit``, whose second number None is infinite; transformers 5 writes infinity as an object."""
    limits = fields.get("time_step_limit", [0.0, None])
    if not isinstance(limits, list) or len(limits) != 2:
        raise fields.error(f"has time_step_limit = {shown(limits)}; it must be a list of two numbers. {REMEDY}")
    least, most = (float("inf") if limit in (None, {"__float__": "Infinity"}) else limit for limit in limits)
    for limit in (least, most):
        fields.check_number("time_step_limit", limit, 0.0, float("inf"))
    if least > most or least == float("inf"):
        raise fields.error(f"has time_step_limit = {shown(limits)}; the first must not exceed the second. {REMEDY}")
    return float(least), None if most == float("inf") else float(most)


def _number(fields: ConfigFields, name: str, least: float = _SCALES[0]) -> float:
    return float(fields.number(name, 1.0, least, _SCALES[1]))


def _numbers(fields: ConfigFields, name: str, count: int) -> tuple[float, ...]:
    values = fields.get(name, [1.0] * count)
    if not isinstance(values, list) or len(values) != count:
        raise fields.error(f"has {name} = {shown(values)}; it must be a list of {count} numbers. {REMEDY}")
    return tuple(float(fields.check_number(name, value, *_SCALES)) for value in values)


def _unused(fields: ConfigFields, *names: str) -> None:
    """Mark fields as read that do not change what layers compute."""
    for name in names:
        fields.given(name)
