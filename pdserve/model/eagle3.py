"""An EAGLE-3 head (arXiv 2503.01840) as its own config.json and tensors describe it.

Two forms are published. Ids of auxiliary layers count layers from 0, and mean another hidden state in each:

| form                              | fields of the layer        | id i of eagle_aux_hidden_state_layer_ids           |
|-----------------------------------|----------------------------|----------------------------------------------------|
| SGLang, ModelOpt, the authors'    | beside the head's          | in eagle_config: the hidden state behind layer i   |
| Speculators                       | in transformer_layer_config| the hidden state before layer i, behind i - 1      |

Without ids they are the hidden states before layers 2, n / 2 and n - 3 of n.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import msgspec

from pdserve.checkpoint.weight_files import read_headers
from pdserve.errors import shown
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.rope import RopeConfig, read_rope

_EMBEDDING = "embed_tokens.weight"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
_MAX_AUXILIARY = 16
UNUSED_TENSORS = ("t2d",)  # per token, whether the head can draft it; d2t says the same


class TargetSizes(msgspec.Struct, frozen=True):
    """Sizes of the model whose tokens a head drafts. The head must have equal ones."""

    vocab_size: int
    hidden_size: int  # may differ if the head has an embedding of its own
    num_layers: int  # layers of the model; the head has one
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Eagle3Config(msgspec.Struct, frozen=True, kw_only=True):
    hidden_size: int
    intermediate_size: int
    draft_vocab_size: int  # tokens that the head can draft
    rms_norm_eps: float
    rope: RopeConfig
    layers: tuple[int, ...]  # model layers whose input is an auxiliary state; num_layers: output of the last layer
    attention_bias: bool = False
    mlp_bias: bool = False
    norm_before_residual: bool = False  # the residual of the layer begins with the normed hidden state
    norm_before_fc: bool = False  # one norm over all auxiliary hidden states of a token
    fc_norm: bool = False  # one norm per auxiliary hidden state
    norm_output: bool = False  # the next draft takes the normed result, as the head does
    has_embedding: bool = False  # False: the head uses the model's embedding
    has_token_map: bool = True  # d2t; else draft ids are token ids


def plain_name(name: str) -> str:
    """Return the name of a tensor in the form of the authors."""
    name = name.removeprefix("model.")
    return f"midlayer.{name.removeprefix('layers.0.')}" if name.startswith("layers.0.") else name


def load_eagle3(directory: Path, target: TargetSizes, *, weights: bool = True) -> Eagle3Config:
    """Read the head in ``directory`` for a model of these sizes.

    Without ``weights`` it has no tensors: then it uses the model's embedding if it can. Raises CheckpointError with the
    field, its value and what it must be.
    """
    fields = ConfigFields(directory / "config.json")
    _check_kind(fields)
    nested = fields.get("transformer_layer_config")
    layer = _within(fields, nested if isinstance(nested, dict) else fields.values)
    head = _read(fields, layer, target, speculators=isinstance(nested, dict))
    names = {plain_name(name) for name in chain.from_iterable(read_headers(directory).values())} if weights else None
    return _with_tensors(fields, head, target, names)


def _within(fields: ConfigFields, values: dict[str, Any]) -> ConfigFields:
    """Return a part of the fields; its errors name the same file."""
    part = ConfigFields(fields.path)
    part.values = values
    return part


def _check_kind(fields: ConfigFields) -> None:
    names = fields.get("architectures")
    if not isinstance(names, list) or not any(isinstance(name, str) and "eagle3" in name.lower() for name in names):
        raise fields.error(
            f"has architectures = {shown(names)}; an EAGLE-3 head has one such as 'LlamaForCausalLMEagle3'. Name the "
            "directory of such a head behind eagle3:"
        )
    if fields.get("quantization_config") is not None:
        raise fields.error("has a quantization_config; heads here are not quantized. Choose another head")


def _read(fields: ConfigFields, layer: ConfigFields, target: TargetSizes, speculators: bool) -> Eagle3Config:
    num_heads = layer.integer("num_attention_heads")
    hidden_size = layer.integer("hidden_size")
    head_dim = layer.integer("head_dim", hidden_size // num_heads)
    positions = layer.integer("max_position_embeddings")
    _check_sizes(fields, layer, target, num_heads, head_dim)
    vocab_size = target.vocab_size if fields.get("draft_vocab_size") is None else fields.integer("draft_vocab_size")
    if vocab_size > target.vocab_size:
        raise fields.error(f"has draft_vocab_size {vocab_size}, more than the model's vocab_size {target.vocab_size}")
    rope = read_rope(layer, positions, head_dim, partial_rotary=False)
    if rope.rope_type == "dynamic":
        raise fields.error(f"has rope type 'dynamic', which no head has here. {REMEDY}")
    nested = _eagle_config(fields)
    return Eagle3Config(
        hidden_size=hidden_size,
        intermediate_size=layer.integer("intermediate_size"),
        draft_vocab_size=vocab_size,
        rms_norm_eps=layer.number("rms_norm_eps", 1e-6, 1e-20, 1.0),
        rope=rope,
        layers=_layers(fields, nested, target.num_layers),
        attention_bias=layer.flag("attention_bias"),
        mlp_bias=layer.flag("mlp_bias"),
        norm_before_residual=_flag(fields, "norm_before_residual", speculators),
        norm_before_fc=_flag(nested, "norm_before_fc", False) or _flag(fields, "norm_before_fc", False),
        fc_norm=_flag(fields, "fc_norm", False),
        norm_output=_flag(fields, "norm_output", False),
    )


def _check_sizes(fields: ConfigFields, layer: ConfigFields, target: TargetSizes, num_heads: int, head_dim: int) -> None:
    """Raise CheckpointError unless the layer fits beside the model's: one KV cache and one attention serve both."""
    activation = layer.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"has hidden_act = {shown(activation)}; supported is 'silu'. {REMEDY}")
    if "sliding_attention" in (layer.get("layer_types") or ()):
        raise fields.error("has a layer with a sliding window; a head here attends to all tokens. Choose another head")
    pairs = [
        ("num_hidden_layers", layer.integer("num_hidden_layers", 1), 1),
        ("num_attention_heads", num_heads, target.num_heads),
        ("num_key_value_heads", layer.integer("num_key_value_heads", num_heads), target.num_kv_heads),
        ("head_dim", head_dim, target.head_dim),
        ("vocab_size", layer.integer("vocab_size", target.vocab_size), target.vocab_size),
    ]
    if fields.get("target_hidden_size") is not None:
        pairs.append(("target_hidden_size", fields.get("target_hidden_size"), target.hidden_size))
    for name, value, needed in pairs:
        if value != needed:
            raise fields.error(
                f"has {name} {shown(value)}, here it must be {needed}: the head's KV lies beside the model's, of equal "
                "shape. Choose a head that was trained for the model"
            )


def _eagle_config(fields: ConfigFields) -> ConfigFields:
    section = fields.get("eagle_config")
    nested = _within(fields, section if isinstance(section, dict) else {})
    if nested.get("use_aux_hidden_state", True) is not True:
        raise fields.error("has use_aux_hidden_state false, as EAGLE-1 has; supported are heads of EAGLE-3")
    return nested


def _flag(fields: ConfigFields, name: str, default: bool) -> bool:
    return default if fields.get(name) is None else fields.flag(name)


def _layers(fields: ConfigFields, nested: ConfigFields, num_layers: int) -> tuple[int, ...]:
    """Return the layers before which the auxiliary hidden states are taken."""
    ids: Any = fields.get(_LAYER_IDS)
    behind = 0
    if not ids:
        ids = nested.get(_LAYER_IDS)
        behind = 1
    if not ids:
        ids = [2, num_layers // 2, num_layers - 3]
        behind = 0
    valid = isinstance(ids, list) and all(isinstance(layer, int) and not isinstance(layer, bool) for layer in ids)
    layers = tuple(layer + behind for layer in ids) if valid else ()
    ascending = all(first < second for first, second in pairwise(layers))
    if not 1 <= len(layers) <= _MAX_AUXILIARY or not ascending or layers[0] < 0 or layers[-1] > num_layers:
        raise fields.error(
            f"has {_LAYER_IDS} = {shown(ids)}; ids must ascend within {-behind} … {num_layers - behind}, as the "
            f"model has {num_layers} layers. Choose a head that was trained for the model"
        )
    return layers


def _with_tensors(
    fields: ConfigFields, head: Eagle3Config, target: TargetSizes, names: Collection[str] | None
) -> Eagle3Config:
    """Return the head, completed from its tensors. Raises CheckpointError if a table is missing."""
    maps = head.draft_vocab_size != target.vocab_size
    narrower = head.hidden_size != target.hidden_size
    has_embedding = narrower if names is None else _EMBEDDING in names
    if narrower and not has_embedding:
        raise fields.error(
            f"has hidden_size {head.hidden_size}, and its checkpoint no {_EMBEDDING}; the model's embedding has "
            f"{target.hidden_size} values a token. Download the head again"
        )
    if names is not None and maps and "d2t" not in names:
        raise fields.error(
            f"has draft_vocab_size {head.draft_vocab_size} of {target.vocab_size} tokens, and its checkpoint no tensor "
            "d2t, which names them. Download the head again"
        )
    has_map = maps if names is None else "d2t" in names
    return msgspec.structs.replace(head, has_embedding=has_embedding, has_token_map=has_map)
