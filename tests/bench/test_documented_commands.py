"""The programs of bench/ import what they need when they are started as documented."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "bench").glob("*.py"))
_COMMAND = re.compile(r"(?:PYTHONPATH=(\S+) )?\S*python (bench/\w+\.py)")
#: Commands with the PYTHONPATH of each, or an empty string.
COMMANDS = sorted({(program, path) for page in PAGES for path, program in _COMMAND.findall(page.read_text())})
PROGRAMS = {f"bench/{path.name}" for path in (ROOT / "bench").glob("*.py") if "__main__" in path.read_text()}


def needs_tests(program: str) -> bool:
    """Whether a program imports modules of tests/ or training/, which are not installed."""
    text = (ROOT / program).read_text()
    return "sys.path" in text or "from training" in text


@pytest.mark.parametrize(
    "commands",
    [
        pytest.param([command for command in COMMANDS if needs_tests(command[0])], id="with-tests"),
        pytest.param(COMMANDS, id="all", marks=pytest.mark.slow),
    ],
)
def test_programs_import_what_they_need_as_documented(commands: list[tuple[str, str]]) -> None:
    assert {program for program, _ in COMMANDS} == PROGRAMS
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    arguments = [f"{path}={program}" for program, path in commands]
    command = [sys.executable, "tests/bench/import_programs.py", *arguments]
    ended = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
