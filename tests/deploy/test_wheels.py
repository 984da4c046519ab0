"""The wheels of pdserve and pdserve-router are built once, installed into empty environments, and serve from there."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from installed import clean_environment, completion_of, run

from pdserve import __version__
from pdserve.__main__ import PACKAGES as IMPORTED

ROOT = Path(__file__).parents[2]
CPU_TORCH = "https://download.pytorch.org/whl/cpu"
PACKAGES = ("pdserve", *IMPORTED, "models")
SIMULATED = ("up", "--port", "0", "--engine", "simulated")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]  # torch is large


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the sdist and the wheels."""
    directory = tmp_path_factory.mktemp("wheels")
    run(ROOT / "scripts" / "build-wheels", directory, PYTHON=sys.executable)
    return directory


@pytest.fixture(scope="module")
def wheels(built: Path) -> dict[str, Path]:
    """Return the wheel of each distribution."""
    return {wheel.name.split("-")[0]: wheel for wheel in built.glob("*.whl")}


@pytest.fixture(scope="module")
def router_python(wheels: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return environment(tmp_path_factory.mktemp("router"), [wheels["pdserve_router"]])


def environment(directory: Path, packages: Sequence[str | Path]) -> Path:
    """Make a virtual environment with these packages; return its interpreter."""
    run(sys.executable, "-m", "venv", directory)
    python = directory / "bin" / "python"
    flags: list[str | Path] = [
        "--quiet",
        "--retries",
        "0",
        "--extra-index-url",
        CPU_TORCH,
        "--constraint",
        ROOT / "constraints.txt",
    ]
    run(python, "-m", "pip", "install", *flags, *packages)
    return python


def test_wheels_contain_the_same_files(wheels: dict[str, Path]) -> None:
    contents = []
    for wheel in wheels.values():
        names = zipfile.ZipFile(wheel).namelist()
        contents.append({name for name in names if ".dist-info/" not in name})
        assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert contents[0] == contents[1]
    tracked = run("git", "-C", ROOT, "ls-files", *PACKAGES).split()
    assert set(tracked) <= contents[0]


def test_what_is_published_has_one_version_and_metadata(built: Path, wheels: dict[str, Path]) -> None:
    """scripts/build-wheels has had twine check the metadata."""
    (sdist,) = built.glob("*.tar.gz")
    assert sdist.name == f"pdserve-{__version__}.tar.gz"
    for name, wheel in wheels.items():
        assert wheel.name == f"{name}-{__version__}-py3-none-any.whl"
        archive = zipfile.ZipFile(wheel)
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        for line in ("License-Expression: Apache-2.0", "Requires-Python: >=3.11", "Classifier: Typing :: Typed"):
            assert f"\n{line}\n" in text
        assert text.count("\nProject-URL: ") == 4


def test_wheel_serves_the_embedded_model(wheels: dict[str, Path], tmp_path: Path) -> None:
    python = environment(tmp_path / "venv", [wheels["pdserve"]])
    assert completion_of([python.with_name("pdserve"), "up", "--port", "0", "--device", "cpu"], tmp_path / "log")


def test_router_wheel_serves_simulated_nodes_without_torch(router_python: Path, tmp_path: Path) -> None:
    packages = {package["name"] for package in json.loads(run(router_python, "-m", "pip", "list", "--format", "json"))}
    assert not packages & {"torch", "safetensors", "transformers", "nixl-cu12", "nixl-cu13"}
    assert completion_of([router_python.with_name("pdserve"), *SIMULATED], tmp_path / "log")


def test_router_wheel_refuses_a_model(router_python: Path) -> None:
    command: list[str | Path] = [router_python.with_name("pdserve"), "up", "--port", "0"]
    done = subprocess.run(command, capture_output=True, text=True, cwd="/", env=clean_environment())
    assert done.returncode == 2
    assert "install pdserve in place of pdserve-router" in done.stderr


@pytest.mark.parametrize("installer", ["uv", "pipx"])
def test_tool_installers(installer: str, wheels: dict[str, Path], tmp_path: Path) -> None:
    tool = environment(tmp_path / "installer", [installer]).with_name(installer)
    name = installer.upper()
    folders = {
        f"{name}_TOOL_DIR": "tools",
        f"{name}_HOME": "home",
        f"{name}_TOOL_BIN_DIR": "bin",
        f"{name}_BIN_DIR": "bin",
    }
    environ = {key: str(tmp_path / folder) for key, folder in folders.items()}
    command = ["tool", "install"] if installer == "uv" else ["install"]
    run(tool, *command, wheels["pdserve_router"], **environ)
    assert completion_of([tmp_path / "bin" / "pdserve", *SIMULATED], tmp_path / "log")
