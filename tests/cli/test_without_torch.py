"""The distribution pdserve-router: routers, tools and simulated nodes run without torch and NIXL."""

from __future__ import annotations

import subprocess
import sys

from machine import patience

PROGRAM = """
import sys

for name in ("torch", "safetensors", "transformers", "triton", "nixl_cu12", "nixl_cu13"):
    sys.modules[name] = None  # importing it fails
import router.server, elastic_node.__main__, prefill_node.__main__, decode_node.__main__
import cli.up.command, cli.doctor.command
import engine.process, runner.simulated, connector.backends.simulated
from cli.main import main

assert main(["explain", "--engine", "simulated"]) == 0
sys.exit(main(["explain"]))
"""


def test_programs_run_without_torch_and_a_model_asks_for_pdserve() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=patience(60))
    assert (done.returncode, done.stderr) == (
        2,
        "pdserve: error: torch and safetensors not installed, which nodes with a model need; install pdserve in place "
        "of pdserve-router, or give --engine simulated\n",
    )
    assert "simulated" in done.stdout
