"""The engine process starts before the frontend imports what takes long, so flags must not need that."""

from __future__ import annotations

import subprocess
import sys

import pytest
from machine import patience

PROGRAM = """
import sys
from importlib import import_module

import_module(sys.argv[1]).make_parser().parse_args(["MODEL"])
print([name for name in ("grpc", "prometheus_client", "uvloop", "numpy", "torch") if name in sys.modules])
"""


@pytest.mark.parametrize("program", ["prefill_node.__main__", "decode_node.__main__", "elastic_node.__main__"])
def test_flags_of_a_node_are_parsed_without_its_services(program: str) -> None:
    command = [sys.executable, "-c", PROGRAM, program]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert (done.stdout, done.stderr) == ("[]\n", "")
