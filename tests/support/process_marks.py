"""Finds the tests that start processes: their module, or a module of tests/ that it imports, starts some.

A module starts processes if it has something of ``_STARTERS``. ``scripts/test fast`` leaves its tests out.
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

_TESTS = Path(__file__).parents[1]
_STARTERS = frozenset({"subprocess", "multiprocessing", "cli.up.supervisor", "node.engine_client.client"})


def starts_processes(item: pytest.Function) -> bool:
    """Return whether the module of a test or of one of its fixtures starts processes."""
    definitions = [
        definition for name in item.fixturenames for definition in item._fixtureinfo.name2fixturedefs.get(name, ())
    ]
    modules = {item.function.__module__, *(definition.func.__module__ for definition in definitions)}
    return any(_starts(name) for name in modules)


@cache
def _starts(name: str) -> bool:
    module = sys.modules.get(name)
    file = getattr(module, "__file__", None)
    if module is None or file is None or not Path(file).is_relative_to(_TESTS):
        return False
    names = {_module_of(value) for value in vars(module).values()} - {name}
    return bool(names & _STARTERS) or any(_starts(name) for name in names)


def _module_of(value: object) -> str:
    """Return the name of a module, or of the module that defines a class or function."""
    if isinstance(value, ModuleType):
        return value.__name__.partition(".")[0]
    return str(getattr(value, "__module__", ""))
