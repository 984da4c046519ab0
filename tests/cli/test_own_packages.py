"""The command runs the packages beside its own one, whatever PYTHONPATH and the working directory have."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from machine import patience

import pdserve
from pdserve.__main__ import PACKAGES

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def script() -> list[str]:
    """Return the command that an installer makes of the entry point."""
    module, function = PROJECT["project"]["scripts"]["pdserve"].split(":")
    return [sys.executable, "-P", "-c", f"import sys; from {module} import {function}; sys.exit({function}())"]


def run(command: list[str], folder: Path, *paths: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, [*paths, ROOT]))}
    command = [*command, "--version"]
    return subprocess.run(command, cwd=folder, env=environ, capture_output=True, text=True, timeout=patience(60))


@pytest.mark.parametrize("name", ["cli/__init__.py", "cli/main.py", "router.py", "engine/__init__.py"])
def test_package_of_a_pythonpath_is_named_and_not_run(name: str, tmp_path: Path) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("raise SystemExit('it ran')\n")
    done = run(script(), Path("/"), tmp_path)
    if name == "cli/main.py":  # a folder that is no package shadows none
        assert (done.returncode, done.stdout) == (0, f"pdserve {pdserve.__version__}\n")
        return
    shadow = tmp_path / name.removesuffix("/__init__.py")
    package = shadow.stem
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        f"error: {shadow} shadows the package {package} of pdserve, {ROOT / package}; remove {tmp_path}" in done.stderr
    )


def test_working_directory_is_named_where_it_shadows_a_package(tmp_path: Path) -> None:
    (tmp_path / "node.py").touch()
    done = run([sys.executable, "-m", "pdserve"], tmp_path)
    assert done.returncode == 2
    assert f"{tmp_path / 'node.py'} shadows the package node" in done.stderr
    assert "start it from another folder" in done.stderr


def test_module_is_the_command(tmp_path: Path) -> None:
    done = run([sys.executable, "-m", "pdserve"], tmp_path)
    assert (done.returncode, done.stdout) == (0, f"pdserve {pdserve.__version__}\n")


def test_all_packages_are_checked_and_typed() -> None:
    """models has no modules: its files are read beside those of pdserve."""
    packages = {name.removesuffix("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert {*PACKAGES, "pdserve", "models"} == packages
    assert PROJECT["tool"]["setuptools"]["package-data"]["*"] == ["py.typed"]
    assert [name for name in {*PACKAGES, "pdserve"} if not (ROOT / name / "py.typed").exists()] == []
