"""config.json of any causal decoder, in the words of Llama's. For models that run through transformers.

Only what the KV cache and the scheduler need is read here; the layers read the rest from the file themselves. The
runner compares head counts and sizes with what the loaded layers do, and refuses a model that differs.
"""

from __future__ import annotations

import importlib.util
from typing import Any

from pdserve.errors import shown
from pdserve.kv.groups import KVHeads, finest_heads
from pdserve.model.config_fields import LARGEST, ConfigFields
from pdserve.model.from_transformers.library_configs import config_class, library_defaults
from pdserve.model.kv_heads import GEMMA4, MORE_IN_WINDOWS, gemma4_windows, read_kv_heads

#: Other names of fields, in the order in which they are looked for. Source: ``attribute_map`` of transformers' configs.
_ALIASES: dict[str, tuple[str, ...]] = {
    "num_hidden_layers": ("n_layer", "n_layers", "num_layers", "decoder_layers"),
    "hidden_size": ("n_embd", "d_model", "dim"),
    "num_attention_heads": ("n_head", "n_heads", "num_heads", "decoder_attention_heads", "attention_heads"),
    "num_key_value_heads": ("num_kv_heads", "n_head_kv", "multi_query_group_num"),
    "intermediate_size": ("n_inner", "ffn_dim", "decoder_ffn_dim", "d_ff", "ffn_hidden_size", "moe_intermediate_size"),
    "max_position_embeddings": ("n_positions", "n_ctx", "max_seq_len", "max_sequence_length", "seq_length"),
}
#: Fields that have the library's default where config.json lacks them.
_WITH_DEFAULT = frozenset({*LARGEST, *_ALIASES, *(other for others in _ALIASES.values() for other in others)})
#: Period of layers that attend to all tokens, if a config has no ``layer_types``. Source: the library's configs.
_WINDOW_PERIODS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4}
#: Fields of a multimodal config that its part for text does not replace.
_OF_WHOLE = ("architectures", "dtype", "eos_token_id", "quantization_config")


def add_defaults(fields: ConfigFields) -> None:
    """Add the sizes that config.json, or its ``text_config``, leaves to the library's defaults."""
    text = fields.values.get("text_config")
    values = text if isinstance(text, dict) else fields.values
    defaults = library_defaults(str(values.get("model_type")))
    values |= {name: defaults[name] for name in _WITH_DEFAULT & defaults.keys() - values.keys()}


def rename_fields(fields: ConfigFields) -> None:
    """Copy fields with other names to their usual names."""
    values = fields.values
    model_type = values.get("model_type")
    fields.remedy = "a model without it cannot run through transformers, as the KV cache has no size"
    if isinstance(model_type, str) and importlib.util.find_spec("transformers") and config_class(model_type) is None:
        fields.remedy = f"transformers lacks model type {shown(model_type)}, too, and checkpoints' code is not run"
    text = values.get("text_config")
    if isinstance(text, dict):  # multimodal model: the config of its text decoder
        values.update({name: value for name, value in text.items() if value is not None and name not in _OF_WHOLE})
    for name, others in _ALIASES.items():
        if values.get(name) is None:
            values[name] = next((values[other] for other in others if values.get(other) is not None), None)
    if isinstance(values.get("intermediate_size"), list):  # Gemma 3n: one size per layer
        values["intermediate_size"] = max(filter(_is_size, values["intermediate_size"]), default=None)
    attention = values.get("attn_config")  # DBRX
    if isinstance(attention, dict) and values.get("num_key_value_heads") is None:
        values["num_key_value_heads"] = attention.get("kv_n_heads")
    if values.get("num_key_value_heads") is None and values.get("multi_query") is True:
        values["num_key_value_heads"] = 1
    if values.get("intermediate_size") is None and isinstance(values.get("hidden_size"), int):
        values["intermediate_size"] = 4 * values["hidden_size"]


def _is_size(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def read_positions(fields: ConfigFields) -> int:
    """Return the number of positions that a model is served with. Raises CheckpointError.

    LongRoPE has other frequencies for longer sequences. Transformers changes them for all sequences of a step, so the
    short ones would be wrong: such a model gets the positions before the change.
    """
    positions = fields.integer("max_position_embeddings")
    values = fields.values
    given = values.get("rope_parameters") or values.get("rope_scaling")
    sets = [given, *given.values()] if isinstance(given, dict) else []
    for rope in sets:
        if isinstance(rope, dict) and "long_factor" in rope:
            name = "original_max_position_embeddings"
            values[name] = rope.get(name) or values.get(name)
            positions = min(positions, fields.integer(name, positions))
    return positions


def read_windows(fields: ConfigFields, num_layers: int) -> tuple[int | None, ...]:
    """Return the window of each layer, so that the KV cache need not keep more; empty: all layers may see all tokens.

    The runner refuses a model whose loaded layers look further.
    """
    if fields.get("model_type") in GEMMA4:
        return gemma4_windows(fields, num_layers)
    types = fields.get("layer_types")
    if fields.get("model_type") in MORE_IN_WINDOWS:
        types = types or ["sliding_attention" if layer and (layer + 1) % 6 else "full_attention"
                          for layer in range(num_layers)]  # fmt: skip
        if fields.get("sliding_window_size") is not None:  # tokens before the query
            fields.values["sliding_window"] = fields.integer("sliding_window_size") + 1
    period = _WINDOW_PERIODS.get(str(fields.get("model_type")))
    if types is None and period is not None:
        period = fields.integer("sliding_window_pattern", period)
        types = ["sliding_attention" if (layer + 1) % period else "full_attention" for layer in range(num_layers)]
    if not isinstance(types, list) or len(types) != num_layers or "sliding_attention" not in types:
        return ()  # without such layers transformers writes a window of 0 for Qwen2-MoE
    window = fields.optional_integer("sliding_window")
    if window is None:
        return ()
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def read_heads(fields: ConfigFields, num_layers: int) -> dict[str, Any]:
    """Return num_heads, and num_kv_heads and head_dim, that of keys; kv_heads, too, if layers have unlike ones.

    Raises CheckpointError.
    """
    num_heads = fields.integer("num_attention_heads")
    if fields.get("kv_lora_rank") is not None:  # latent attention, expanded for each head
        head_dim = fields.integer("qk_nope_head_dim") + fields.integer("qk_rope_head_dim")
        return {"num_heads": num_heads, "num_kv_heads": num_heads, "head_dim": head_dim}
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    head_dim = fields.integer("head_dim", max(1, fields.integer("hidden_size") // num_heads))
    windows = read_windows(fields, num_layers) or (None,) * num_layers
    kv_heads = read_kv_heads(fields, windows, KVHeads(num_kv_heads, head_dim))
    for heads in kv_heads:
        if num_heads % heads.num_kv_heads:
            raise fields.error(f"{num_heads} attention heads cannot share {heads.num_kv_heads} key/value heads evenly")
    finest = finest_heads(kv_heads)
    return {
        "num_heads": num_heads,
        "num_kv_heads": finest.num_kv_heads,
        "head_dim": finest.head_dim,
        "kv_heads": kv_heads if len(set(kv_heads)) > 1 else (),
    }
