"""The programs of bench/ find the modules that they import when they are started as documented."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.py"))
_COMMAND = re.compile(r"(?:PYTHONPATH=(\S+) )?\S*python (bench/\w+\.py)")
#: Commands with the PYTHONPATH of each, or an empty string.
COMMANDS = sorted({(program, path) for page in PAGES for path, program in _COMMAND.findall(page.read_text())})
PROGRAMS = {f"bench/{path.name}" for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()}
OF_VLLM = {"bench/vllm_steps.py"}  # runs in an environment of vLLM's
_INSERTED = re.compile(r'sys\.path\.insert\(0, str\(Path\(__file__\)\.parents\[1\]((?: / "\w+")*)\)\)')
#: Folders of modules that no package installs.
NOT_INSTALLED = (ROOT / "bench", ROOT / "tests/support", ROOT / "tests/hosts")


def test_every_program_has_a_documented_command() -> None:
    assert {program for program, _ in COMMANDS} == PROGRAMS - OF_VLLM


@pytest.mark.parametrize(("program", "path"), COMMANDS)
def test_a_documented_command_finds_its_modules(program: str, path: str) -> None:
    text = (ROOT / program).read_text()
    inserted = [ROOT / part.replace('"', "").replace(" / ", "/").strip("/") for part in _INSERTED.findall(text)]
    assert len(inserted) == text.count("sys.path")
    folders = [ROOT / "bench", *inserted, *(ROOT / part for part in path.split(":") if path)]
    assert list(lacking(ROOT / program, folders)) == []


def test_a_module_in_no_folder_is_noticed() -> None:
    assert "training" in lacking(ROOT / "bench/chaos.py", [ROOT / "bench", ROOT / "tests/support"])


def lacking(program: Path, folders: list[Path]) -> set[str]:
    """Return the modules of this repository that a program imports, or one of them, and that no folder has."""
    files = [program]
    missing = set[str]()
    for file in files:  # grows meanwhile
        for name in imported(file):
            there = next((folder for folder in folders if (folder / f"{name}.py").exists()), None)
            is_ours = name == "training" or any((folder / f"{name}.py").exists() for folder in NOT_INSTALLED)
            if there is not None and (module := there / f"{name}.py") not in files:
                files.append(module)
            elif there is None and is_ours and not any((folder / name).is_dir() for folder in folders):
                missing.add(name)
    return missing


def imported(file: Path) -> Iterator[str]:
    """Yield the first parts of the names of modules that a file imports, other than in functions."""
    for statement in ast.parse(file.read_text()).body:
        if isinstance(statement, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in statement.names)
        elif isinstance(statement, ast.ImportFrom) and statement.module:
            yield statement.module.partition(".")[0]


@pytest.mark.slow
def test_programs_are_imported_as_documented() -> None:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [f"{path}={program}" for program, path in COMMANDS]
    command = [sys.executable, "tests/bench/import_programs.py", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
