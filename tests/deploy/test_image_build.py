"""The images are built by buildah, which needs neither root nor a daemon, and each serves a request."""

from __future__ import annotations

import ast
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import completion_of, run

ROOT = Path(__file__).parents[2]
DOCKER = ROOT / "deploy" / "docker"
PYTHON = "docker.io/library/python:3.11-slim-bookworm"
FLASHINFER = "https://flashinfer.ai/whl/"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(shutil.which("buildah") is None, reason="needs buildah (apt install buildah)"),
]


class Builder:
    """buildah with a storage of its own. Builds use the pip settings and certificates of this machine."""

    def __init__(self, directory: Path) -> None:
        self.environ = {"BUILDAH_ISOLATION": "chroot", "STORAGE_DRIVER": "vfs"}
        self.command = ["buildah", "--root", str(directory / "root"), "--runroot", str(directory / "run")]
        self._mounts = self._pip_mounts(directory)

    def __call__(self, *words: str) -> str:
        return run(*self.command, *words, **self.environ)

    def python_image(self) -> str:
        """Return a base image: the one of the Dockerfile, or Debian's Python where no registry is reachable."""
        pull = [*self.command, "pull", "--quiet", PYTHON]
        if subprocess.run(pull, capture_output=True, env=os.environ | self.environ).returncode == 0:
            return PYTHON
        if shutil.which("mmdebstrap") is None:
            pytest.skip(f"{PYTHON} cannot be pulled, and mmdebstrap is not installed")
        wrapper = Path(self.command[2]).parent / "bin" / "buildah"
        wrapper.parent.mkdir()
        wrapper.write_text(f'#!/bin/sh\nexec {shutil.which("buildah")} {" ".join(self.command[1:])} "$@"\n')
        wrapper.chmod(0o755)
        return run(DOCKER / "debian-base", **self.environ, PATH=f"{wrapper.parent}:{os.environ['PATH']}").split()[-1]

    def build(self, target: str, python: str) -> None:
        files = ["--file", str(DOCKER / "Dockerfile"), "--ignorefile", str(DOCKER / "Dockerfile.dockerignore")]
        name = ["--target", target, "--build-arg", f"PYTHON={python}", "--tag", target]
        self("build", *self._mounts, *files, *name, str(ROOT))

    def _pip_mounts(self, directory: Path) -> list[str]:
        lines = run(sys.executable, "-m", "pip", "config", "list").splitlines()
        pairs = [line.split("=", 1) for line in lines if "=" in line]
        settings = {name.rpartition(".")[2]: ast.literal_eval(value) for name, value in pairs}
        settings = {name: settings[name] for name in ("index-url", "find-links") if name in settings}
        config = [f"{name} = {value}" for name, value in {"retries": "1", **settings}.items()]
        (directory / "pip.conf").write_text("\n".join(["[global]", *config]))
        folders = [folder for folder in settings.get("find-links", "").split() if Path(folder).is_dir()]
        mounts = [
            "/etc/ssl/certs:/etc/ssl/certs",
            f"{directory}/pip.conf:/etc/pip.conf",
            *(f"{at}:{at}" for at in folders),
        ]
        return [word for mount in mounts for word in ("--volume", f"{mount}:ro")]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Builder]:
    directory = tmp_path_factory.mktemp("images")
    yield Builder(directory)
    shutil.rmtree(directory)  # gigabytes, which pytest would keep for three more runs


@pytest.fixture(scope="module")
def python_image(builder: Builder) -> str:
    return builder.python_image()


def serve(builder: Builder, image: str, log: Path, *flags: str) -> str:
    """Start ``pdserve up`` in a container, as the user of the image, and return the text of a completion."""
    container = builder("from", image).split()[-1]
    command = [*builder.command, "run", container, "--", "pdserve", "up", "--port", "0", *flags]
    return completion_of(command, log, **builder.environ)


def test_router_image_serves_simulated_nodes(builder: Builder, python_image: str, tmp_path: Path) -> None:
    builder.build("router", python_image)
    assert serve(builder, "router", tmp_path / "log", "--engine", "simulated")


@pytest.mark.parametrize("target", ["cpu", "gpu"])
def test_image_serves_its_model(target: str, builder: Builder, python_image: str, tmp_path: Path) -> None:
    if target == "gpu":
        try:
            urllib.request.urlopen(FLASHINFER, timeout=10).close()
        except urllib.error.URLError as exc:
            pytest.skip(f"{FLASHINFER}, which has FlashInfer's compiled kernels, cannot be reached: {exc.reason}")
    builder.build(target, python_image)
    assert serve(builder, target, tmp_path / "log", "--device", "cpu")
