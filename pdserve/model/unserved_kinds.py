"""Kinds of models that no runner serves, found in config.json and named in the words of their model cards.

Layers with linear attention, Mamba or convolutions keep a state for each sequence, for which the KV cache has no place.
With DeepSeek sparse attention, an indexer chooses the keys of each query. RoBERTa counts positions from its padding
token on, where a node counts from 0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pdserve.model.config_fields import ConfigFields

_LINEAR = "linear attention"
_MAMBA = "Mamba state"
_CONVOLUTIONS = "short convolutions"
_SPARSE = "DeepSeek sparse attention"
_SHIFTED = "positions that begin behind its padding token"

#: Model types whose layers are always of the kind.
_BY_TYPE: Mapping[str, str] = {
    **dict.fromkeys(("bailing_hybrid", "kimi_linear", "olmo_hybrid"), _LINEAR),
    **dict.fromkeys(("bamba", "falcon_h1", "falcon_mamba", "jamba", "mamba", "mamba2", "nemotron_h", "plamo2"), _MAMBA),
    **dict.fromkeys(("zamba", "zamba2"), _MAMBA),
    **dict.fromkeys(("camembert", "data2vec-text", "roberta", "roberta-prelayernorm"), _SHIFTED),
    **dict.fromkeys(("xlm-roberta", "xlm-roberta-xl"), _SHIFTED),
    "recurrent_gemma": "recurrent blocks (RG-LRU)",
    "rwkv": "RWKV state",
    "xlstm": "xLSTM state",
    "zaya": _CONVOLUTIONS,
}
_LAYER_LISTS = ("layer_types", "layers_block_type", "block_types")
#: Kinds of layers in these lists. Granite and others name a linear layer without saying that it is Mamba's.
_BY_LAYER: Mapping[str, str] = {
    "compressed_sparse_attention": _SPARSE,
    "conv": _CONVOLUTIONS,
    "deepseek_sparse_attention": _SPARSE,
    "heavily_compressed_attention": _SPARSE,
    "hybrid": _MAMBA,
    "indexed_attention": _SPARSE,
    "linear_attention": _LINEAR,
    "mamba": _MAMBA,
    "mamba2": _MAMBA,
    "recurrent": "recurrent blocks (RG-LRU)",
}


def check_kind(fields: ConfigFields) -> None:
    """Raise CheckpointError for a model of such a kind."""
    kind, where = _find(fields.values)
    if not kind:
        return
    if kind == _SPARSE:
        raise fields.error(
            f"describes a model with {kind} ({where}), which attends to chosen tokens only; it is not supported. "
            "Choose a model with full or sliding-window attention"
        )
    if kind == _SHIFTED:
        raise fields.error(
            f"describes a model with {kind} ({where}); a node counts from 0, so its tokens would be wrong. Choose "
            "another model"
        )
    raise fields.error(
        f"describes a model with {kind} ({where}), which is kept beside the KV cache; it is not supported. "
        "Choose a model whose layers all attend"
    )


def _find(values: Mapping[str, Any]) -> tuple[str, str]:
    """Return the kind and the field that shows it; empty for a model that may be served."""
    model_type = str(values.get("model_type"))
    if model_type in _BY_TYPE:
        return _BY_TYPE[model_type], f"model_type {model_type}"
    for name in _LAYER_LISTS:
        layers = values.get(name)
        for layer in layers if isinstance(layers, list) else []:
            if isinstance(layer, str) and layer in _BY_LAYER:
                has_mamba = any(key.startswith(("mamba", "ssm_")) for key in values)
                kind = _MAMBA if has_mamba and _BY_LAYER[layer] == _LINEAR else _BY_LAYER[layer]
                return kind, f"{name} has {layer!r}"
    return _find_by_field(values)


def _find_by_field(values: Mapping[str, Any]) -> tuple[str, str]:
    """Read fields of published configs that have no list of layers."""
    pattern = values.get("hybrid_override_pattern")
    attention_types = values.get("attn_type_list")
    if isinstance(pattern, str) and "M" in pattern:
        return _MAMBA, "hybrid_override_pattern has 'M'"
    if isinstance(attention_types, list) and 0 in attention_types:
        return _LINEAR, "attn_type_list has 0"
    if values.get("index_topk"):
        return _SPARSE, "index_topk"
    if values.get("linear_attn_config"):
        return _LINEAR, "linear_attn_config"
    attending = values.get("full_attn_idxs")
    num_layers = values.get("num_hidden_layers")
    if isinstance(attending, list) and isinstance(num_layers, int) and len(attending) < num_layers:
        return _CONVOLUTIONS, "full_attn_idxs lacks layers"
    interval = values.get("full_attention_interval")
    if isinstance(interval, int) and interval > 1 and values.get("layer_types") is None:
        return _LINEAR, f"full_attention_interval {interval}"
    return "", ""
