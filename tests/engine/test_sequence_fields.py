"""The state of a sequence changes by its own methods only."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import engine
from engine.request import Sequence

_OWN = {field.name for field in fields(Sequence)} - {"constraint"}  # GrammarConstraints sets it
_NAMES = {"sequence", "branch", "each", "head", "victim"}  # variables that hold a sequence in engine/
_CHANGES = {"append", "extend", "insert", "pop", "remove", "clear"}  # list methods that change the list


def test_other_modules_only_read_the_fields_of_a_sequence() -> None:
    folder = Path(engine.__file__).parent
    found = [
        f"{path.relative_to(folder)}:{node.lineno}"
        for path in folder.rglob("*.py")
        for node in _written(ast.parse(path.read_text()))
        if isinstance(node.value, ast.Name) and node.value.id in _NAMES and node.attr in _OWN
    ]
    assert not found


def _written(tree: ast.AST) -> Iterator[ast.Attribute]:
    """Yield the attributes that are assigned to, or whose list is changed in place."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node
        elif isinstance(node, ast.Attribute) and node.attr in _CHANGES and isinstance(node.value, ast.Attribute):
            yield node.value
