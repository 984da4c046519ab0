"""The distribution pdserve-router: routers, tools and simulated nodes run without torch and NIXL."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from any_models import small_config
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL

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


EXPLAIN = """
import sys

from cli.main import main

for path in sys.argv[1:]:
    assert main(["explain", path, "--device", "cpu", "--load-format", "dummy"]) == 0
assert not {"torch", "transformers", "triton"} & set(sys.modules)
"""


def test_explain_imports_no_torch(tmp_path: Path) -> None:
    """Also of a model that runs through transformers, and of one with recurrent layers."""
    models = []
    for model_type, architecture in (("gemma2", "Gemma2ForCausalLM"), ("qwen3_next", "Qwen3NextForCausalLM")):
        config = small_config(model_type)
        config.architectures = [architecture]
        config.save_pretrained(tmp_path / model_type)
        models.append(str(tmp_path / model_type))
    command = [sys.executable, "-c", EXPLAIN, str(EMBEDDED_MODEL), *models]
    done = subprocess.run(command, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\nrunner ") == 3


def test_programs_run_without_torch_and_a_model_asks_for_pdserve() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=patience(60))
    assert (done.returncode, done.stderr) == (
        2,
        "pdserve: error: torch and safetensors not installed, which nodes with a model need; install pdserve in place "
        "of pdserve-router, or give --engine simulated\n",
    )
    assert "simulated" in done.stdout
