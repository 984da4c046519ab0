"""Lines that a process logs at each level."""

from __future__ import annotations

import subprocess
import sys
from itertools import product

import pytest

PROGRAM = """
import logging, sys
from pdserve.logs import setup_logging
setup_logging("decode", "text", sys.argv[1])
for name in ("engine.engine", "__main__", "grpc._cython.cygrpc", "asyncio"):
    for level in (logging.DEBUG, logging.INFO, logging.WARNING):
        logging.getLogger(name).log(level, "%s %s", name, logging.getLevelName(level))
"""
OURS = {"engine.engine", "__main__"}
LIBRARIES = {"grpc._cython.cygrpc", "asyncio"}


@pytest.mark.parametrize(
    ("level", "ours", "libraries"),
    [
        ("debug", {"DEBUG", "INFO", "WARNING"}, {"WARNING"}),
        ("info", {"INFO", "WARNING"}, {"INFO", "WARNING"}),
        ("warning", {"WARNING"}, {"WARNING"}),
        ("error", set(), set()),
    ],
)
def test_debug_is_the_level_of_this_program_alone(level: str, ours: set[str], libraries: set[str]) -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM, level], capture_output=True, text=True, check=True)
    lines = {tuple(line.split()[-2:]) for line in done.stderr.splitlines()}
    assert lines == {*product(OURS, ours), *product(LIBRARIES, libraries)}
