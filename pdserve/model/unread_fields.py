"""Fields of config.json that native layers do not read: without effect, of a fixed value, or unknown.

tests/runner/test_config_fields.py changes each field of transformers' config classes: a native model then computes what
the library does, or refuses.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from pdserve.errors import shown
from pdserve.model.config_fields import REMEDY, ConfigFields

#: Fields of transformers' configs that do not change logits: token ids, training, labels and kinds of outputs.
WITHOUT_EFFECT = frozenset(
    {
        "attention_dropout",
        "bos_token_id",
        "chunk_size_feed_forward",
        "eos_token_id",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "label2id",
        "output_hidden_states",
        "output_router_logits",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "router_aux_loss_coef",
        "router_jitter_noise",
        "transformers_version",
        "use_cache",
    }
)


_MAX_NAMES = 32


class _Fixed(NamedTuple):
    value: Any  # None: the field must be absent, null or empty
    meaning: str  # meaning of any other value, for the error


#: Fields that change the forward pass, each with the value that all native layers have built in.
FIXED: Mapping[str, _Fixed] = {
    "attention_chunk_size": _Fixed(None, "attention within chunks"),
    "is_causal": _Fixed(True, "attention to later tokens"),
    "is_encoder_decoder": _Fixed(False, "an encoder"),
    "kv_sharing_modes": _Fixed(None, "layers that share keys and values"),
    "per_layer_config": _Fixed(None, "layers of different shapes"),
}


#: Other model types for which transformers uses the layers of a family, by the family's type.
_ALIASES: Mapping[str, tuple[str, ...]] = {"deepseek_v3": ("kimi_k2",), "llama": ("internlm3", "iquestcoder")}


def check_unread(fields: ConfigFields, model_type: str, *, has_layer_config: bool = False) -> None:
    """Raise CheckpointError if a field that native layers do not read asks for another computation.

    ``model_type`` is the family's. transformers chooses layers by this field, whatever ``architectures`` say.
    ``has_layer_config``: the family reads per_layer_config.
    """
    given = fields.get("model_type")
    if given not in (None, model_type, *_ALIASES.get(model_type, ())):
        raise fields.error(
            f"has model_type = {shown(given)} beside architectures = {shown(fields.get('architectures'))}, whose "
            f"model_type is {model_type!r}. If its weights are of that architecture, write {model_type!r} there; "
            "else correct architectures"
        )
    for name, (value, meaning) in FIXED.items():
        given = fields.values.get(name, value)  # transformers takes a null for false
        if given == value or (value is None and not given) or (has_layer_config and name == "per_layer_config"):
            continue
        supported = "none" if value is None else str(value).lower()
        raise fields.error(f"has {name} = {shown(given)}: {meaning}; supported is {supported}. {REMEDY}")


def unread_names(fields: ConfigFields) -> tuple[str, ...]:
    """Return the names of fields without a reader, up to 32, that no list above has. transformers ignores them, too."""
    names_with_reader = fields.names_read | WITHOUT_EFFECT | FIXED.keys()
    names = sorted(name for name in fields.values if name not in names_with_reader and not name.startswith("_"))
    return tuple(names[:_MAX_NAMES])
