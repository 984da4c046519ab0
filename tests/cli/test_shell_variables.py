"""Tests ignore variables of the shell that runs them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fleet import RUNNER_ENVIRONMENTS

from pdserve.config.runner_oracle import RUNNERS, VARIABLE

TESTS = Path(__file__).parent.parent

TEST_FILE = """
import os
import subprocess
import sys


def test_child_processes_inherit_none_of_them() -> None:
    script = "import os; print(*(name for name in os.environ if name.startswith(('PDSERVE_', 'OMP_', 'TRITON_'))))"
    assert subprocess.run([sys.executable, "-c", script], capture_output=True, text=True).stdout == "\\n"
"""


@pytest.mark.slow
def test_conftest_clears_variables_of_the_shell(tmp_path: Path) -> None:
    (tmp_path / "test_inherited.py").write_text(TEST_FILE)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "conftest", "-p", "no:cacheprovider"]
    shell = {VARIABLE: "1", "PDSERVE_LOG_LEVEL": "DEBUG", "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "7"}
    environ = os.environ | {"PYTHONPATH": f"{TESTS}:{TESTS / 'support'}:{TESTS.parent}", **shell}
    done = subprocess.run([*command, str(tmp_path)], capture_output=True, text=True, env=environ, cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def test_each_runner_is_forced_explicitly() -> None:
    assert {name: environ[VARIABLE] for name, environ in RUNNER_ENVIRONMENTS.items()} == {
        record.name: record.forced_by for record in RUNNERS
    }
