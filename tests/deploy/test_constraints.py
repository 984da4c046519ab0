"""The pinned versions resolve from PyPI alone, as on a machine without an index or wheels of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
UV = Path(sys.executable).with_name("uv")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("extra", ["", "gpu", "dev"])
@pytest.mark.parametrize("python", ["3.11.5", "3.12", "3.13"])
def test_constraints_resolve_from_the_default_index(python: str, extra: str) -> None:
    """Here torch is built for CUDA and brings its own Triton. FlashInfer's jit-cache is on no such index."""
    if not UV.exists():
        pytest.skip("scripts/setup installs uv")
    words = [str(UV), "pip", "compile", "-q", "--no-config", "--no-annotate", "--python-version", python]
    words += ["pyproject.toml", "-c", "constraints.txt", *(("--extra", extra) if extra else ())]
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("UV_", "PIP_"))}
    done = subprocess.run(words, cwd=ROOT, env=environ, capture_output=True, text=True)
    if "Failed to fetch" in done.stderr or "error sending request" in done.stderr:
        pytest.skip("the package index does not answer")
    assert done.returncode == 0, done.stderr
    versions = dict(line.split("==") for line in done.stdout.splitlines() if "==" in line)
    assert versions.keys() >= {"torch", "triton", "transformers", "grpcio", *(("nixl-cu13",) if extra == "gpu" else ())}
