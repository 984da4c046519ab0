"""The list of tests that never become slow (tests/support/fast_set.py); tests/conftest.py enforces it at collection."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from fast_set import NEVER_SLOW, moved_to_slow
from machine import patience

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("test", NEVER_SLOW)
def test_listed_tests_exist(test: str) -> None:
    file, _, function = test.partition("::")
    assert f"\ndef {function}(" in (ROOT / file).read_text()


def test_a_listed_test_needs_one_fast_cell() -> None:
    test, behaviour = next(iter(NEVER_SLOW.items()))
    assert moved_to_slow([(f"{test}[a]", True), (f"{test}[b]", False), ("another", True)]) == []
    assert moved_to_slow([(f"{test}[a]", True), (f"{test}[b]", True), (f"{test}_more", False)]) == [
        f"{test}: {behaviour}"
    ]


@pytest.mark.slow  # each fast run collects all tests, and so checks the list
def test_a_fast_run_refuses_a_listed_test_that_is_slow(tmp_path: Path) -> None:
    own = "tests/docs/test_fast_set.py::test_a_fast_run_refuses_a_listed_test_that_is_slow"
    (tmp_path / "one_more.py").write_text(f"import fast_set\nfast_set.NEVER_SLOW[{own!r}] = 'this very test'\n")
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-m", "not slow", "-p", "one_more", __file__]
    path = ":".join(map(str, (tmp_path, ROOT / "tests" / "support", ROOT)))
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, timeout=patience(60)
    )
    assert done.returncode == pytest.ExitCode.USAGE_ERROR
    assert f"{own}: this very test" in done.stderr
