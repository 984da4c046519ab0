"""Rotary position embeddings as config.json describes them, in the format of transformers 4 or 5."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.errors import shown
from pdserve.model.config_fields import LARGEST, REMEDY, ConfigFields


class RopeConfig(msgspec.Struct, frozen=True):
    """Rotary embedding: ``rope_type`` is default, linear, dynamic, yarn, llama3 or none; ``params``: its numbers."""

    theta: float
    rope_type: str = "default"
    params: dict[str, Any] = {}
    rotary_dim: int = 0  # values of each head that are rotated, from its first; 0: all
    query_beta: float = 0.0  # queries are scaled by 1 + query_beta * log(1 + position // trained positions)


NO_ROPE = RopeConfig(theta=10_000.0, rope_type="none")  # attention without positions

# Rope types with the numbers that each needs beside theta.
_ROPE_PARAMS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": (),  # a missing factor follows from the two lengths
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
# Smallest and largest value of each number of rope parameters; others are not used.
_ROPE_BOUNDS: dict[str, tuple[float, float]] = {
    "rope_theta": (2, 1e15),
    "factor": (1e-3, 1e6),
    "low_freq_factor": (1e-6, 1e6),
    "high_freq_factor": (1e-6, 1e6),
    "original_max_position_embeddings": (1, LARGEST["original_max_position_embeddings"]),
    "beta_fast": (1e-3, 1e6),
    "beta_slow": (1e-3, 1e6),
    "mscale": (0, 1e3),
    "mscale_all_dim": (0, 1e3),
    "attention_factor": (1e-6, 1e3),
}
QUERY_BETA = "llama_4_scaling_beta"  # in rope_parameters of Mistral's models
_TRAINED = "original_max_position_embeddings"
_QUERY_BETAS = (0.0, 100.0)
_THETA = 10_000.0
_OTHER_BOUNDS = (-1e15, 1e15)
_IMAGE_ROPE = ("mrope_section", "mrope_interleaved")  # sections of image positions; text has a single position


def read_rope(fields: ConfigFields, max_position_embeddings: int, head_dim: int, partial_rotary: bool) -> RopeConfig:
    """Read ``rope_parameters`` (transformers 5), or ``rope_theta`` with ``rope_scaling`` (4; "type" is older)."""
    params = {name: value for name, value in _rope_params(fields).items() if name not in _IMAGE_ROPE}
    rope_type = params.pop("rope_type", params.get("type", "default"))
    params.pop("type", None)
    fields.choice("rope type", rope_type, tuple(_ROPE_PARAMS))
    theta = params.pop("rope_theta", fields.get("rope_theta", _THETA))
    rotary_dim = _rotary_dim(fields, params, head_dim, partial_rotary)
    if rope_type == "dynamic" and rotary_dim < 4:
        raise fields.error(f"head_dim {rotary_dim} is too small for rope type 'dynamic'; it needs at least 4")
    trained = fields.get("original_max_position_embeddings")
    if rope_type == "dynamic":
        params["original_max_position_embeddings"] = max_position_embeddings
    elif rope_type in ("yarn", "llama3"):
        params.setdefault("original_max_position_embeddings", max_position_embeddings)
        if trained is not None:
            params["original_max_position_embeddings"] = trained
    for name in _ROPE_PARAMS[rope_type]:
        if name not in params:
            raise fields.error(f"has rope type {rope_type!r} without {name!r}. {REMEDY}")
    for name, value in [*params.items(), ("rope_theta", theta)]:
        if name in _ROPE_BOUNDS or not isinstance(value, bool):
            fields.check_number(name, value, *_ROPE_BOUNDS.get(name, _OTHER_BOUNDS))
    if rope_type == "llama3" and params["high_freq_factor"] <= params["low_freq_factor"]:
        raise fields.error(f"has a high_freq_factor that is not above low_freq_factor. {REMEDY}")
    if rope_type == "yarn":
        params.setdefault("factor", max_position_embeddings / params["original_max_position_embeddings"])
    return RopeConfig(theta=float(theta), rope_type=rope_type, params=params, rotary_dim=rotary_dim % head_dim)


def read_rope_of_mistral(
    fields: ConfigFields, max_position_embeddings: int, head_dim: int, partial_rotary: bool
) -> RopeConfig:
    """Read rotary embeddings whose parameters also scale queries by their position.

    A missing factor is refused: the library has no value for it.
    """
    rope = read_rope(fields, max_position_embeddings, head_dim, partial_rotary)
    if QUERY_BETA not in rope.params:
        raise fields.error(
            f"has rope parameters without {QUERY_BETA!r}, by which queries grow with their position; write 0 there if "
            "they do not"
        )
    beta = fields.check_number(QUERY_BETA, rope.params[QUERY_BETA], *_QUERY_BETAS)
    if beta and (rope.rope_type == "dynamic" or _TRAINED not in rope.params):
        raise fields.error(
            f"has {QUERY_BETA} = {shown(beta)} with rope type {rope.rope_type!r}; supported are 0 and rope types with "
            f"{_TRAINED}, such as 'yarn'. {REMEDY}"
        )
    return msgspec.structs.replace(rope, query_beta=float(beta))


def read_rope_of_latents(
    fields: ConfigFields, max_position_embeddings: int, head_dim: int, partial_rotary: bool
) -> RopeConfig:
    """Like ``read_rope_of_mistral``, where ``partial_rotary_factor`` is that part of a head which rotates by design."""
    name = "partial_rotary_factor"
    whole = fields.integer("qk_nope_head_dim") + head_dim
    for place in ("rope_parameters", "rope_scaling", None):
        values = fields.values if place is None else fields.values.get(place)
        if not isinstance(values, dict) or values.get(name) is None:
            continue
        factor = fields.check_number(name, values[name], 0.0, 1.0)
        if int(whole * factor) != head_dim:
            raise fields.error(
                f"has {name} {shown(factor)}, but qk_rope_head_dim {head_dim} of heads of {whole}. {REMEDY}"
            )
        without = {key: value for key, value in values.items() if key != name}
        if place is None:
            fields.values = without
        else:
            fields.values = {**fields.values, place: without}
    return read_rope_of_mistral(fields, max_position_embeddings, head_dim, partial_rotary)


def _rotary_dim(fields: ConfigFields, params: dict[str, Any], head_dim: int, partial_rotary: bool) -> int:
    """Return how many values of each head are rotated: ``rotary_dim``, or ``partial_rotary_factor`` of them."""
    given = params.pop("partial_rotary_factor", fields.get("partial_rotary_factor"))
    factor = 1.0 if given is None else given
    if not partial_rotary:
        if factor != 1.0:
            raise fields.error(f"has partial_rotary_factor {shown(factor)}; supported is 1.0. {REMEDY}")
        return head_dim
    by_factor = int(head_dim * fields.check_number("partial_rotary_factor", factor, 0.0, 1.0))
    rotary_dim = fields.integer("rotary_dim", by_factor, least=0)
    if given is not None and rotary_dim != by_factor:
        raise fields.error(
            f"has rotary_dim {rotary_dim}, but partial_rotary_factor {shown(given)} of heads of {head_dim} is "
            f"{by_factor}. {REMEDY}"
        )
    if not 2 <= rotary_dim <= head_dim or rotary_dim % 2:
        raise fields.error(f"rotates {rotary_dim} values of heads of {head_dim}; it must be an even part. {REMEDY}")
    return rotary_dim


def _rope_params(fields: ConfigFields) -> dict[str, Any]:
    """Return the parameters without nulls. They may be nested per layer type, if all are equal.

    As in transformers, ``rope_scaling`` replaces ``rope_parameters`` as a whole, also the theta in it, which is then
    refused if it differs: YaRN is often added so to a checkpoint that transformers 5 has saved.
    """
    scaling = _object(fields, "rope_scaling")
    parameters = _object(fields, "rope_parameters")
    if not scaling:
        return dict(fields.defaults.get("rope_parameters", {})) if parameters is None else parameters
    replaced = dict(parameters or {})
    if fields.given("rotary_dim") is not None:  # applies to all rope parameters
        replaced.pop("partial_rotary_factor", None)
    for name, default in (("rope_theta", _THETA), ("partial_rotary_factor", 1.0)):
        if name in replaced and replaced[name] != scaling.get(name, fields.get(name, default)):
            raise fields.error(
                f"has rope_scaling, which replaces rope_parameters and their {name} {shown(replaced[name])}. Move the "
                "fields of rope_scaling into rope_parameters"
            )
    return scaling


def _object(fields: ConfigFields, name: str) -> dict[str, Any] | None:
    given = fields.given(name)
    if given is None:
        return None
    if not isinstance(given, dict):
        raise fields.error(f"has {name} = {shown(given)}; it must be an object. {REMEDY}")
    nested = [value for value in given.values() if isinstance(value, dict)]
    if any(value != nested[0] for value in nested):
        raise fields.error(f"has different {name} per layer type; supported is one set for all layers")
    return {key: value for key, value in (nested[0] if nested else given).items() if value is not None}
