"""docs/constants.md lists the constants of cost and load control with the values of the code."""

from __future__ import annotations

import ast
import importlib
import re
from functools import reduce
from pathlib import Path

import msgspec
import pytest

from pdserve import request_cost

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "constants.md").read_text()
ROWS = re.findall(r"^\| `([\w/]+\.py)` \| `([\w.]+)` \| (.+?) \| (.+?) \| (.+?) \| (.+?) \|$", PAGE, re.MULTILINE)
LISTED = {(path, name) for path, name, *_ in ROWS}
#: Files of which the page has every number.
COMPLETE = (
    "pdserve/request_cost.py",
    "pdserve/step_pacing.py",
    "pdserve/config/simulated_costs.py",
    "cli/virtual_fleet/cards.py",
    "engine/executor/idle_step.py",
    "engine/executor/step_pipeline.py",
    "engine/scheduler/fair_share.py",
    "engine/scheduler/itl_target.py",
    "engine/scheduler/scheduler_config.py",
    "engine/scheduler/step_builder.py",
    "engine/speculation/acceptance.py",
    "engine/speculation/draft_planner.py",
    "engine/step_cost_meter.py",
    "router/fleet/moves.py",
    "router/fleet/policy.py",
    "router/fleet/stream_mover.py",
)
#: Numbers that tune nothing: null objects, ranges, "without limit", lists for traces, a card fitted as a whole.
OTHERS = {
    "MOST_SECONDS",
    "NO_DRAFTS",
    "NO_PULL",
    "H100",
    "H100_COSTS",
    "_MANY",
    "_MOST_OPTIONS",
    "_MOST_STEPS",
    "_SEQ",
}
TUNED_FIELDS = {"SimulatedCosts", "Delays"}  # classes whose defaults are constants


def has_number(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Constant) and type(part.value) in (int, float) for part in ast.walk(node))


def constants(path: str) -> set[str]:
    """Return the names of numbers at the top of a module, and of the defaults of some classes."""
    names = set()
    for node in ast.parse((ROOT / path).read_text()).body:
        body = node.body if isinstance(node, ast.ClassDef) and node.name in TUNED_FIELDS else [node]
        prefix = f"{node.name}." if isinstance(node, ast.ClassDef) else ""
        for part in body:
            if isinstance(part, ast.Assign | ast.AnnAssign) and part.value is not None and has_number(part.value):
                target = part.targets[0] if isinstance(part, ast.Assign) else part.target
                names |= {prefix + name.id for name in ast.walk(target) if isinstance(name, ast.Name)}
    return names


def value_of(path: str, name: str) -> object:
    """Return the value of a constant, or the default of a field of a class."""
    module = importlib.import_module(path.removesuffix(".py").replace("/", "."))
    *classes, field = name.split(".")
    if classes and issubclass(owner := getattr(module, classes[0]), msgspec.Struct):
        return getattr(owner(), field)
    return reduce(getattr, name.split("."), module)


@pytest.mark.parametrize("row", ROWS, ids=[f"{path}:{name}" for path, name, *_ in ROWS])
def test_value_is_that_of_the_code(row: tuple[str, ...]) -> None:
    path, name, text, *_ = row
    assert eval(text, vars(request_cost).copy()) == value_of(path, name)


@pytest.mark.parametrize("path", COMPLETE)
def test_page_has_every_constant(path: str) -> None:
    assert sorted(constants(path) - OTHERS - {name for file, name in LISTED if file == path}) == []


def test_each_constant_is_listed_once() -> None:
    assert len(ROWS) == len(LISTED) >= 66
    assert len(ROWS) == len(re.findall(r"^\| `", PAGE, re.MULTILINE)), "each row has all its cells"
