"""The config classes of transformers, read from the library's source: the base does not import the library.

A class body is parsed, not run. It has the defaults of fields that a config.json leaves out, as published ones do,
above all in ``text_config``.
"""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any


@cache
def config_class(model_type: str) -> ast.ClassDef | None:
    """Return the parsed config class of a model type; None for an unknown type."""
    for path in _config_files(model_type):
        text = path.read_text()
        if f'model_type = "{model_type}"' in text:
            classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
            definition = next((node for node in classes if literal(node, "model_type") == model_type), None)
            if definition is not None:
                return definition
    return None


def _config_files(model_type: str) -> Iterator[Path]:
    """Yield the modules of config classes, the most likely one first."""
    spec = importlib.util.find_spec("transformers")
    for folder in [] if spec is None else spec.submodule_search_locations or []:
        models = Path(folder) / "models"
        yield from sorted(
            models.glob("*/configuration_*.py"), key=lambda path: (path.parent.name not in model_type, path)
        )


@cache
def library_defaults(model_type: str) -> Mapping[str, Any]:
    """Return the default of each field of a model type that is a number, a flag, a text or null."""
    definition = config_class(model_type)
    theta = None if definition is None else literal(definition, "default_theta")
    defaults: dict[str, Any] = {"rope_theta": theta} if isinstance(theta, int | float) else {}
    for node in definition.body if definition is not None else []:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and node.value is not None:
            is_constant, value = _constant(node.value)
            if is_constant:
                defaults[node.target.id] = value
    return defaults


def _constant(node: ast.expr) -> tuple[bool, Any]:
    """Return whether an expression is a constant, or a product such as ``4096 * 32``, and its value."""
    if isinstance(node, ast.Constant):
        return True, node.value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        _, left = _constant(node.left)
        _, right = _constant(node.right)
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        return numbers, left * right if numbers else None
    return False, None


def literal(definition: ast.ClassDef, name: str) -> Any:
    """Return the value of a class attribute that is a literal; None without one."""
    for node in definition.body:
        if not isinstance(node, ast.Assign | ast.AnnAssign) or node.value is None:
            continue
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        if any(isinstance(target, ast.Name) and target.id == name for target in targets):
            try:
                return ast.literal_eval(node.value)
            except ValueError:  # a computed value
                return None
    return None
