"""The plans by which transformers splits a model type over ranks, read from the library's source.

A node must say before it loads weights whether ``--tp`` and ``--pp`` are possible. So the literals
``base_model_tp_plan`` and ``base_model_pp_plan`` of a config class are parsed (``pdserve/model/from_transformers/``).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.config.parallel import ParallelConfig
from pdserve.errors import ConfigError, shown
from pdserve.model.config_fields import ConfigFields
from pdserve.model.from_transformers.library_configs import config_class, library_defaults, literal
from pdserve.model.text_part import text_kind

#: Styles of tensor-parallel plans that runner/models/from_transformers/tensor_shards.py knows.
TENSOR_STYLES = frozenset(
    {
        "colwise",
        "colwise_gather_output",
        "colwise_rep",
        "rowwise",
        "rowwise_split_input",
        "rowwise_rep",
        "packed_colwise",
        "packed_rowwise",
        "embedding_rowwise",
        "embedding_colwise",
        "moe_tp_experts",
        "moe_identity_expert",
        "all_reduce",
        "replicate",
        "replicated_with_grad_allreduce",
        "mla_kv_a_proj",
        "local_params",
    }
)

_LAYER_EMBEDDINGS = "hidden_size_per_layer_input"  # field of configs: size of each layer's own embeddings; 0: none


class LibraryPlans(NamedTuple):
    """Plans of a model type; empty if the library has none."""

    tp: dict[str, str]  # module → style
    pp: dict[str, Any]  # module → inputs and outputs


def check_split(model_dir: Path, architecture: str, parallel: ParallelConfig) -> str:
    """Return how a model of transformers is split. Raises ConfigError if the library's plans do not allow it."""
    values = ConfigFields(model_dir / "config.json").values
    model_type = text_kind(values)
    plans = read_plans(model_type)
    unknown = sorted(set(plans.tp.values()) - TENSOR_STYLES)
    problem = None
    if parallel.tp > 1 and not plans.tp:
        problem = f"tp {parallel.tp}: transformers has no tensor-parallel plan for {shown(model_type)}"
    elif parallel.tp > 1 and unknown:
        problem = f"tp {parallel.tp}: transformers' plan has the styles {', '.join(unknown)}, which are not known here"
    elif parallel.pp > 1 and not plans.pp:
        problem = f"pp {parallel.pp}: transformers has no pipeline-parallel plan for {shown(model_type)}"
    elif parallel.pp > 1 and _has_layer_embeddings(model_type, values):
        problem = f"pp {parallel.pp}: each layer reads embeddings of its own, which only the first stage has"
    if problem is not None:
        raise ConfigError(
            f"{architecture} runs through transformers, which splits models by plans of its own. {problem}; use 1"
        )
    return f"pp={parallel.pp}, tp={parallel.tp}: by transformers' plans for {model_type}"


def _has_layer_embeddings(model_type: str, values: Mapping[str, Any]) -> bool:
    """Whether each layer of a text model adds an embedding of its own (Gemma 3n, Gemma 4 E2B and E4B)."""
    text = values.get("text_config") or values
    return bool(text.get(_LAYER_EMBEDDINGS, library_defaults(model_type).get(_LAYER_EMBEDDINGS)))


def read_plans(model_type: str) -> LibraryPlans:
    """Return the plans of a model type. Both are empty for an unknown type."""
    config = config_class(model_type)
    if config is None:
        return LibraryPlans({}, {})
    tp, pp = (literal(config, f"base_model_{kind}_plan") or {} for kind in ("tp", "pp"))
    return LibraryPlans(tp, pp)
