"""Recurrent layers as config.json describes them: which layers are recurrent, and the state that each keeps."""

from __future__ import annotations

from pdserve.errors import shown
from pdserve.kv.states import GatedDeltaSpec, ShortConvSpec
from pdserve.model.config_fields import REMEDY, ConfigFields

_LINEAR = "linear_attention"
_CONVOLUTION = "conv"
_FULL = "full_attention"


def linear_attention_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is recurrent: by ``layer_types``, else all but every fourth one.

    ``full_attention_interval`` replaces the four. The result is empty if no layer is.
    """
    layer_types = fields.get("layer_types")
    if layer_types is None:
        interval = fields.integer("full_attention_interval", 4)
        recurrent = tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    else:
        fields.given("full_attention_interval")  # marks the field as read; layer_types imply it
        recurrent = _of_types(fields, layer_types, num_layers, _LINEAR)
    return _checked(fields, recurrent, _LINEAR)


def convolution_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Return for each layer whether it is a short convolution: by ``layer_types``, else all but ``full_attn_idxs``.

    Without both, all layers attend. The result is empty if no layer is.
    """
    layer_types = fields.get("layer_types")
    attending = fields.get("full_attn_idxs")
    if layer_types is not None:
        recurrent = _of_types(fields, layer_types, num_layers, _CONVOLUTION)
    elif attending is None:
        return ()
    else:
        if not isinstance(attending, list) or not all(isinstance(layer, int) for layer in attending):
            raise fields.error(f"has full_attn_idxs = {shown(attending)}; it must be a list of layers. {REMEDY}")
        recurrent = tuple(layer not in attending for layer in range(num_layers))
    return _checked(fields, recurrent, _CONVOLUTION)


def _of_types(fields: ConfigFields, layer_types: object, num_layers: int, kind: str) -> tuple[bool, ...]:
    """Return which layers are of a kind by ``layer_types``; the others attend."""
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        count = len(layer_types) if isinstance(layer_types, list) else shown(layer_types)
        raise fields.error(f"has {count} layer_types for {num_layers} layers; it must be a list with one per layer")
    return tuple(fields.choice("layer type", name, (kind, _FULL)) == kind for name in layer_types)


def _checked(fields: ConfigFields, recurrent: tuple[bool, ...], kind: str) -> tuple[bool, ...]:
    if all(recurrent):
        raise fields.error(f"has layers of {kind} only; a model without a KV cache is not supported. {REMEDY}")
    return recurrent if any(recurrent) else ()


def read_short_conv(fields: ConfigFields, dtype: str) -> ShortConvSpec:
    """Read the sizes of short convolutions, which have as many channels as hidden states have values."""
    return ShortConvSpec(
        channels=fields.integer("hidden_size"), conv_width=fields.integer("conv_L_cache", least=2), dtype=dtype
    )


def read_gated_delta(fields: ConfigFields, dtype: str) -> GatedDeltaSpec:
    """Read the sizes of gated delta nets."""
    spec = GatedDeltaSpec(
        key_heads=fields.integer("linear_num_key_heads"),
        value_heads=fields.integer("linear_num_value_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_dim=fields.integer("linear_value_head_dim"),
        conv_width=fields.integer("linear_conv_kernel_dim", least=2),
        dtype=dtype,
    )
    if spec.value_heads % spec.key_heads:
        raise fields.error(f"{spec.value_heads} value heads cannot share {spec.key_heads} key heads evenly. {REMEDY}")
    return spec
