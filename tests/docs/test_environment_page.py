"""docs/environment.md lists every environment variable that the code reads or sets."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "environment.md").read_text()
ROWS = re.findall(r"^\| (`[A-Z].*?) \|", PAGE, re.MULTILINE)
LISTED = {name for row in ROWS for name in re.findall(r"[A-Z][A-Z0-9_]+", row)}
PREFIXES = (
    "PDSERVE|UCX|GOMP|OMP|GLOO|NCCL|GRPC_ENABLE|HF|KUBERNETES|OPENAI|OTEL|SSL_CERT|TRITON|XDG|CUDA_VISIBLE|"
    "FLASHINFER_WORKSPACE"
)
NO_VARIABLES = {"TRITON_ATTN"}  # vLLM's name of a back end
VARIABLE = re.compile(f"(?:{PREFIXES})_[A-Z0-9_]+")


@functools.cache
def named_in_code() -> set[str]:
    """Return all strings of the programs that look like an environment variable."""
    names: set[str] = set()
    files = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    for path in files.split():
        if path.startswith(("tests/", "pdserve/pb/")):
            continue
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and VARIABLE.fullmatch(node.value):
                names.add(node.value)
    return names


def test_every_variable_of_the_code_is_on_the_page() -> None:
    assert {"PDSERVE_LOG_LEVEL", "UCX_TLS"} <= named_in_code()
    assert sorted(named_in_code() - LISTED - NO_VARIABLES) == []


@pytest.mark.parametrize("name", sorted(name for name in LISTED if name.startswith("PDSERVE_")))
def test_every_variable_of_pdserve_on_the_page_is_in_the_code(name: str) -> None:
    assert name in named_in_code()
