"""Virtual environments of client libraries, created by scripts/test-clients, and the programs that run in them."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
PROGRAMS = Path(__file__).parent / "programs"
RUN_SECONDS = 300.0


class Environment:
    """A virtual environment; the test is skipped if it does not exist."""

    def __init__(self, name: str) -> None:
        self.root = REPOSITORY / f".venv-clients-{name}"
        if not self.root.exists():
            pytest.skip(f"{self.root.name} is missing; run scripts/test-clients to create it")

    def run(self, command: Sequence[str | Path], variables: Mapping[str, str], statuses: Collection[int] = (0,)) -> str:
        """Run a program of the environment with additional variables, and return its output.

        Fails with the output if the status is not one of ``statuses``.
        """
        program, *arguments = command
        modules = {"NODE_PATH": str(self.root / "node_modules")}
        environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ended = subprocess.run(
            [self._find(str(program)), *arguments],
            env={**environ, **modules, **variables},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=RUN_SECONDS,
        )
        assert ended.returncode in statuses, ended.stdout
        return ended.stdout

    def _find(self, program: str) -> str:
        """Return the environment's own program, else the system's; Node is not installed into environments."""
        own = [self.root / folder / program for folder in ("bin", "node_modules/.bin")]
        return next((str(path) for path in own if path.exists()), program)
