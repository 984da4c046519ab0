"""The Dockerfile, linted and compared with what pods expect. test_image_build.py builds it."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import tomllib
import venv
from itertools import pairwise
from pathlib import Path

import pytest
from overlays import OVERLAYS, pods

import pdserve

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
SCRIPT = ROOT / "scripts" / "build-image"
VARIANTS = ("router", "cpu", "gpu")
SUFFIXES = {"router": "-router", "cpu": "-cpu", "gpu": ""}
PIP = (sys.executable, "-m", "pip", "install")


def stages() -> dict[str, str]:
    """Return the instructions by stage name, with continued lines joined."""
    text = DOCKERFILE.read_text().replace("\\\n", " ")
    parts = re.split(r"^FROM \S+ AS (\S+)\n", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def test_hadolint_finds_nothing() -> None:
    done = subprocess.run([Path(sys.executable).with_name("hadolint"), DOCKERFILE], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "")


def test_image_user_equals_the_pod_user() -> None:
    users = {str(pod.spec["securityContext"]["runAsUser"]) for overlay in OVERLAYS for pod in pods(overlay)}
    for variant in VARIANTS:
        assert re.findall(r"^USER (\d+):\d+$", stages()[variant], re.MULTILINE) == list(users)


def test_only_the_gpu_image_has_a_compiler() -> None:
    assert "apt-get" not in stages()["cpu"] + stages()["router"]
    assert re.findall(r"install --yes --no-install-recommends (.*?) *&&", stages()["gpu"]) == ["gcc libc6-dev"]
    assert "flashinfer-jit-cache" in stages()["built-gpu"]


def test_each_image_variant_has_a_bill_of_materials() -> None:
    for variant in VARIANTS:
        assert "--output-file /opt/pdserve/sbom.cdx.json" in stages()[f"built-{variant}"]
        assert f"COPY --from=built-{variant} /opt/pdserve /opt/pdserve" in stages()[variant]


def test_build_context_has_exactly_the_packages() -> None:
    lines = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line.removeprefix("!") for line in lines if line.startswith("!")}
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = {name.removesuffix("*") for name in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= kept
    assert all((ROOT / name).exists() for name in kept)
    assert lines[1] == "*"


def test_overlay_models_are_on_a_volume_or_in_the_image() -> None:
    for overlay in OVERLAYS:
        for pod in pods(overlay):
            mounts = {mount["mountPath"] for mount in pod.container["volumeMounts"]}
            if "/models" not in mounts:
                assert f"COPY models/tiny {pod.environment['MODEL']}\n" in stages()["cpu"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_script_builds_the_stage_with_a_name_per_variant(variant: str) -> None:
    shown = subprocess.run([SCRIPT, "--print", variant], capture_output=True, text=True, check=True).stdout
    words = shlex.split(shown)
    values = dict(pairwise(words))
    assert (ROOT / values["--file"]).samefile(DOCKERFILE)
    assert values["--target"] == variant
    assert values["--target"] in stages()
    assert values["--tag"] == f"registry.example/pdserve:{pdserve.__version__}{SUFFIXES[variant]}"
    assert f"org.opencontainers.image.version={pdserve.__version__}" in words
    assert words[-1] == "."


def test_script_passes_flags_on_and_refuses_other_variants() -> None:
    flags = ["--build-arg", "PYTHON=python@sha256:0"]
    shown = subprocess.run(
        [SCRIPT, "--print", "cpu", "my:1", *flags], capture_output=True, text=True, check=True
    ).stdout
    assert shlex.split(shown)[-3:] == [*flags, "."]
    assert "--tag my:1 " in shown
    refused = subprocess.run([SCRIPT, "tpu"], capture_output=True, text=True)
    assert refused.returncode == 2
    assert "gpu|cpu|router" in refused.stderr


def test_jit_cache_has_the_version_of_flashinfer() -> None:
    """The Dockerfile takes it from constraints.txt by a command."""
    (command,) = re.findall(r'"\$\((sed -n .*?)\)"', stages()["built-gpu"])
    shown = subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, text=True, check=True).stdout
    (version,) = re.findall(r"^flashinfer-python==(\S+)$", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert shown == f"flashinfer-jit-cache=={version}\n"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_bill_of_materials_names_the_packages(tmp_path: Path) -> None:
    """The tool and the command of the Dockerfile, on the environment of the tests."""
    (tool,) = re.findall(r"pip install --no-cache-dir (cyclonedx-bom==\S+)", stages()["materials"])
    venv.create(tmp_path / "sbom", with_pip=True)
    installed = subprocess.run([tmp_path / "sbom/bin/pip", "install", tool], capture_output=True, text=True)
    if installed.returncode:
        pytest.skip(f"{tool} cannot be installed: {installed.stderr[-300:]}")
    output = tmp_path / "sbom.cdx.json"
    command = [str(tmp_path / "sbom/bin/cyclonedx-py"), "environment", "--output-file", str(output), sys.executable]
    subprocess.run(command, check=True, capture_output=True)
    content = json.loads(output.read_text())
    assert content["bomFormat"] == "CycloneDX"
    versions = {component["name"].lower(): component.get("version") for component in content["components"]}
    assert {"pdserve", "torch", "grpcio", "fastapi"} <= versions.keys()
    assert all(versions.values())
