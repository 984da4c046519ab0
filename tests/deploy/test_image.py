"""The Dockerfile, linted and compared with what pods expect. test_image_build.py builds it."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

from overlays import OVERLAYS, pods

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"
VARIANTS = ("router", "cpu", "gpu")


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
