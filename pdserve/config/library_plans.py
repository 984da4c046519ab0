"""The plans by which transformers splits a model type over ranks, read from the library's source.

The base does not import transformers, and a node must say before it loads weights whether ``--tp`` and ``--pp`` are
possible. So the literals ``base_model_tp_plan`` and ``base_model_pp_plan`` of a config class are parsed, not run.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from pdserve.config.config_fields import ConfigFields
from pdserve.config.parallel import ParallelConfig
from pdserve.errors import ConfigError, shown

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


class LibraryPlans(NamedTuple):
    """Plans of a model type; empty if the library has none."""

    tp: dict[str, str]  # module → style
    pp: dict[str, Any]  # module → inputs and outputs


def check_split(model_dir: Path, architecture: str, parallel: ParallelConfig) -> str:
    """Return how a model of transformers is split. Raises ConfigError if the library's plans do not allow it."""
    model_type = str(ConfigFields(model_dir / "config.json").get("model_type"))
    plans = read_plans(model_type)
    unknown = sorted(set(plans.tp.values()) - TENSOR_STYLES)
    problem = None
    if parallel.tp > 1 and not plans.tp:
        problem = f"tp {parallel.tp}: transformers has no tensor-parallel plan for {shown(model_type)}"
    elif parallel.tp > 1 and unknown:
        problem = f"tp {parallel.tp}: transformers' plan has the styles {', '.join(unknown)}, which are not known here"
    elif parallel.pp > 1 and not plans.pp:
        problem = f"pp {parallel.pp}: transformers has no pipeline-parallel plan for {shown(model_type)}"
    if problem is not None:
        raise ConfigError(
            f"{architecture} runs through transformers, which splits models by plans of its own. {problem}; use 1"
        )
    return f"pp={parallel.pp}, tp={parallel.tp}: by transformers' plans for {model_type}"


def read_plans(model_type: str) -> LibraryPlans:
    """Return the plans of a model type. Both are empty for an unknown type."""
    for path in _config_files(model_type):
        text = path.read_text()
        if f'model_type = "{model_type}"' in text:
            classes = {node.name: node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)}
            for found in classes.values():
                if _literal(found, "model_type") == model_type:
                    tp, pp = (_literal(found, f"base_model_{kind}_plan") or {} for kind in ("tp", "pp"))
                    return LibraryPlans(tp, pp)
    return LibraryPlans({}, {})


def _config_files(model_type: str) -> Iterator[Path]:
    """Yield the modules of config classes, the most likely one first."""
    spec = importlib.util.find_spec("transformers")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        models = Path(folder) / "models"
        yield from sorted(
            models.glob("*/configuration_*.py"), key=lambda path: (path.parent.name not in model_type, path)
        )


def _literal(found: ast.ClassDef, name: str) -> Any:
    """Return the value of a class attribute that is a literal; None without one."""
    for node in found.body:
        targets = (
            node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        )
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            value = node.value  # type: ignore[attr-defined]
            try:
                return None if value is None else ast.literal_eval(value)
            except ValueError:  # it is computed
                return None
    return None
