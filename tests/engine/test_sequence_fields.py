"""Each field of a sequence, of its parts and of a request is written by its own methods and by one owner only."""

from __future__ import annotations

import ast
import functools
import re
from dataclasses import fields
from inspect import get_annotations
from pathlib import Path

import pytest

import engine
from engine import sequence as sequence_module
from engine.request import Request
from engine.sequence import Sequence
from engine.sequence_parts import BlockTable, Constraint, SequenceDrafts, SplitLoad
from engine.sequence_state import SequenceState

ENGINE = Path(engine.__file__).parent
PARTS = {
    "table": BlockTable,
    "state": SequenceState,
    "split": SplitLoad,
    "drafts": SequenceDrafts,
    "constraint": Constraint,
}
#: Modules that write fields of a request. Nothing writes the others, but ``end_load`` writes ``mode``.
REQUEST_WRITERS = {
    "lacks_draft_kv": {"peers/connected_peers.py"},
    "cached_tokens": {"scheduler/loads.py", "scheduler/room.py"},
    "paused": {"scheduler/live_sequences.py"},
    "waits_since": {"scheduler/live_sequences.py", "scheduler/loads.py"},
    "queued": {"scheduler/scheduler.py"},
    "num_scored": {"scheduler/step_results.py"},
    "branches": {"scheduler/choices.py"},
    "stop_ids": {"scheduler/choices.py"},
    "grammar": {"grammars/constraints.py"},
    "rules": {"grammars/constraints.py"},
}
_SEQUENCES = {"sequence", "branch", "head", "victim", "prompt", "other"}  # variables that hold a sequence in engine/
_CHANGES = {"append", "extend", "insert", "pop", "remove", "clear", "update"}  # methods that change a container


def owners() -> dict[str, list[str]]:
    """Return the writers of each part, as the table in engine/sequence.py names them."""
    rows = re.findall(r"^\| ``(\w+)`` .*\| ([^|]*) *\|$", sequence_module.__doc__ or "", re.MULTILINE)
    return {part: re.findall(r"\w+/\w+\.py", writers) for part, writers in rows}


def test_table_names_the_writer_of_each_part() -> None:
    assert owners().keys() == PARTS.keys()
    assert all((ENGINE / writer).exists() for writers in owners().values() for writer in writers)
    assert PARTS.keys() <= {field.name for field in fields(Sequence)}


def test_fields_of_a_sequence_are_written_by_its_methods() -> None:
    names = {field.name for field in fields(Sequence)}
    wrong = [
        place
        for place, base, field in writes()
        if base in _SEQUENCES and field in names and place.partition(":")[0] not in owners().get(field, [])
    ]
    assert not wrong


@pytest.mark.parametrize("part", PARTS)
def test_fields_of_a_part_are_written_by_its_owner(part: str) -> None:
    names = get_annotations(PARTS[part])
    written = [place for place, base, field in writes() if base == part and field in names]
    assert not [place for place in written if place.partition(":")[0] not in owners()[part]]


def test_fields_of_a_request_are_written_by_the_modules_that_its_comments_name() -> None:
    names = {field.name for field in fields(Request)}
    places: dict[str, set[str]] = {}
    for place, base, field in writes():
        if base == "request" and field in names:
            places.setdefault(field, set()).add(place.partition(":")[0])
    assert places == REQUEST_WRITERS


@functools.cache
def writes() -> list[tuple[str, str, str]]:
    """Return where an attribute is assigned to or its container is changed, what has it, and its name.

    ``sequence.table.ready = 1`` is ("scheduler/file.py:7", "table", "ready").
    """
    places: list[tuple[str, str, str]] = []
    for path in sorted(ENGINE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if (written := _written(node)) is None:
                continue
            base = written.value
            name = base.id if isinstance(base, ast.Name) else base.attr if isinstance(base, ast.Attribute) else ""
            if name not in ("", "self"):
                places.append((f"{path.relative_to(ENGINE)}:{written.lineno}", name, written.attr))
    return places


def _written(node: ast.AST) -> ast.Attribute | None:
    """Return the attribute that a node assigns to, or whose container it changes."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node
    if isinstance(node, ast.Attribute) and node.attr in _CHANGES and isinstance(node.value, ast.Attribute):
        return node.value
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and isinstance(node.value, ast.Attribute):
        return node.value
    return None
