"""Runs every causal type of the installed transformers; ``scripts/model-table`` writes docs/model-table.md from it."""

from __future__ import annotations

import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import transformers
from any_models import CONDITIONS, make_any_checkpoint

from pdserve.errors import PdserveError

PAGE = Path(__file__).parents[2] / "docs" / "model-table.md"

EXACT = "exact"
NOT_BUILT = "not built"

#: Errors of refused types, and the reasons that the page gives.
_REASONS = (
    (r"a model with ([\w -]+?) \(", r"\1"),
    (r"keeps a state beside the KV cache", "state beside the KV cache"),
    (r"takes? no positions", "its layers take no positions, so sequences cannot share a step"),
    (r"do not call a given attention function|ran 0 times", "no layer calls the attention function that it is given"),
    (r"attention ran \d+ times", "some layers do not attend, or attend several times"),
    (r"attends to later tokens", "attends to later tokens"),
    (r"asks for ([\w, ]+), which", r"asks for \1, which paged attention does not have"),
    (r"changes its mask", "a layer changes its mask"),
    (r"heads per layer follow", "its layers differ from each other, or from config.json, in heads or head sizes"),
    (
        r"logits on the paged KV cache differ",
        "the self-test finds other logits: positions or state are not in the KV cache",
    ),
    (r"config\.json lacks '(\w+)'", r"config.json has no `\1`"),
    (r"is no causal language model", "its text part alone is no model of the library's causal ones"),
    (r"transformers' cache keeps", "its mask and the library's cache disagree on the window"),
    (r"layers fail on two tokens", "its layers fail on two tokens"),
)

_INTRO = """\
# Causal model types of transformers {version}

`scripts/model-table` writes this page. It runs a tiny random checkpoint of each type in float32 on V1, with chunks,
mixed steps and, but for recurrent types, prefix hits, and compares the tokens with the library's. None is wrong.
[models.md](models.md) says how a node finds out. {exact} of {total} types are exact, {refused} are refused at start,
and {not_built} have no small config that the script can build, so nothing is known of them.
"""


def causal_types() -> list[str]:
    mapping: Any = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    return sorted(mapping)


def sweep(directory: Path, check: Callable[[Path], None]) -> dict[str, str]:
    """Return EXACT, NOT_BUILT or the reason of the refusal, by type. ``check`` fails for wrong tokens."""
    outcomes = {}
    for model_type in causal_types():
        outcomes[model_type] = _outcome(model_type, directory / model_type, check)
        shutil.rmtree(directory / model_type, ignore_errors=True)
        print(f"{model_type}: {outcomes[model_type]}", flush=True)
    return outcomes


def as_page(outcomes: Mapping[str, str]) -> str:
    groups = defaultdict[str, list[str]](list)
    for model_type, outcome in outcomes.items():
        groups[outcome].append(model_type)
    exact = groups.pop(EXACT)
    not_built = groups.pop(NOT_BUILT, [])
    sizes = {"total": len(outcomes), "exact": len(exact), "not_built": len(not_built)}
    refused = len(outcomes) - len(exact) - len(not_built)
    rows = [("exact", [model_type for model_type in exact if model_type not in CONDITIONS])]
    for condition in {str(fields): fields for fields in CONDITIONS.values()}.values():
        fields = ", ".join(f"`{name}` {_words(value)}" for name, value in condition.items())
        rows.append(
            (
                f"exact with {fields}; else refused",
                [model_type for model_type in exact if CONDITIONS.get(model_type) == condition],
            )
        )
    rows += [(f"refused: {reason}", types) for reason, types in sorted(groups.items(), key=lambda item: -len(item[1]))]
    rows.append(("no small config", not_built))
    lines = [
        _INTRO.format(version=transformers.__version__, refused=refused, **sizes),
        "| result | types |",
        "|---|---|",
    ]
    lines += [f"| {result} | {', '.join(types)} |" for result, types in rows if types]
    return "\n".join(lines) + "\n"


def types_of(page: str) -> list[str]:
    """Return all types that a page lists."""
    rows = [line.split("|")[2] for line in page.splitlines() if line.startswith("| ")][1:]
    return [model_type.strip() for row in rows for model_type in row.split(",")]


def _outcome(model_type: str, directory: Path, check: Callable[[Path], None]) -> str:
    try:
        make_any_checkpoint(directory, model_type)
    except Exception as exc:
        print(f"{model_type} cannot be built: {type(exc).__name__}: {str(exc)[:200]}")
        return NOT_BUILT
    try:
        check(directory)
    except PdserveError as exc:
        error = str(exc)
        return next(match.expand(reason) for pattern, reason in _REASONS if (match := re.search(pattern, error)))
    return EXACT


def _words(value: Any) -> str:
    return f"all `{value[0]}`" if isinstance(value, list) else f"`{str(value).lower()}`"
