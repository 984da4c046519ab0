"""KV heads per layer as config.json describes them, for models whose layers have unlike ones."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.errors import shown
from pdserve.kv.groups import KVHeads
from pdserve.model.config_fields import REMEDY, ConfigFields

GEMMA4 = ("gemma4_text", "gemma4_unified_text")
#: Model types whose layers with full attention have other heads by fields of their own, and the default of their size.
_GLOBAL_HEADS = dict.fromkeys(GEMMA4, 512)
#: Model types whose layers with a window have more KV heads than the others, and how many times as many.
MORE_IN_WINDOWS = {"mimo_v2_flash": 2}
_PERIOD = 6  # without layer_types, each sixth layer of Gemma 4 attends to all tokens
_OVERRIDES = "per_layer_config"  # as transformers 5 saves it: by layer, the fields that differ there


def read_kv_heads(fields: ConfigFields, windows: Sequence[int | None], usual: KVHeads) -> tuple[KVHeads, ...]:
    """Return the KV heads of each layer; empty if all have equal ones. Raises CheckpointError.

    ``windows`` of each layer, in tokens; ``usual``: the heads of layers of which the config says nothing else.
    """
    model_type = str(fields.get("model_type"))
    overrides = fields.get(_OVERRIDES) or {}
    if not isinstance(overrides, dict):
        raise fields.error(f"has {_OVERRIDES} = {shown(overrides)}; it must be an object. {REMEDY}")
    kv_heads = [usual] * len(windows)
    if model_type in _GLOBAL_HEADS:
        full = (
            usual if fields.given(_OVERRIDES) is not None else _global_heads(fields, usual, _GLOBAL_HEADS[model_type])
        )
        kv_heads = [usual if window else full for window in windows]
    elif model_type in MORE_IN_WINDOWS:
        more = KVHeads(usual.num_kv_heads * MORE_IN_WINDOWS[model_type], usual.head_dim)
        kv_heads = [more if window else usual for window in windows]
    for name in overrides:
        if not name.isdecimal() or int(name) >= len(windows):
            raise fields.error(f"has layer {shown(name)} in {_OVERRIDES}; it has {len(windows)} layers. {REMEDY}")
        part = fields.part(_OVERRIDES).part(name)
        heads = kv_heads[int(name)]
        kv_heads[int(name)] = KVHeads(
            part.integer("num_key_value_heads", heads.num_kv_heads), part.integer("head_dim", heads.head_dim)
        )
    _check(fields, kv_heads)
    return tuple(kv_heads)


def other_overrides(fields: ConfigFields) -> set[str]:
    """Return the fields that differ in some layer, without those of KV heads."""
    overrides = fields.get(_OVERRIDES) or {}
    parts = overrides.values() if isinstance(overrides, dict) else ()
    return {name for part in parts if isinstance(part, dict) for name in part} - {"num_key_value_heads", "head_dim"}


def gemma4_layer_types(fields: ConfigFields, num_layers: int) -> list[str]:
    """Return the type of each layer. As in transformers, the last one has full attention. Raises CheckpointError."""
    types = fields.get("layer_types")
    if types is None:
        types = ["full_attention" if (layer + 1) % _PERIOD == 0 else "sliding_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error(f"has layer_types that are no list of {num_layers} layers. {REMEDY}")
    for layer_type in types:
        fields.choice("layer type", layer_type, ("sliding_attention", "full_attention"))
    return [*types[:-1], "full_attention"]


def gemma4_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer in tokens."""
    window = fields.integer("sliding_window")
    return tuple(
        window if layer_type == "sliding_attention" else None for layer_type in gemma4_layer_types(fields, num_layers)
    )


def _check(fields: ConfigFields, kv_heads: Sequence[KVHeads]) -> None:
    most = max(heads.num_kv_heads for heads in kv_heads)
    for heads in kv_heads:
        if most % heads.num_kv_heads:
            raise fields.error(
                f"has layers of {heads.num_kv_heads} and of {most} key/value heads; the first must divide the second. "
                f"{REMEDY}"
            )


def _global_heads(fields: ConfigFields, usual: KVHeads, head_dim: int) -> KVHeads:
    """Return the KV heads of layers with full attention in Gemma 4."""
    count = usual.num_kv_heads
    if fields.flag("attention_k_eq_v"):
        count = fields.integer("num_global_key_value_heads", count)
    fields.given("num_global_key_value_heads")  # marks the field as read, although it may not be used
    return KVHeads(count, fields.integer("global_head_dim", head_dim))
