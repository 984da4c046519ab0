"""Each line of "From zero" in docs/deploy.md is run on a copy of the manifests, or compared with what they create."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from overlays import builder

from cli.commands import parser_of

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "deploy.md").read_text()
LINES = re.findall(r"^    (\S.*?)(?: +#.*)?$", PAGE.partition("## From zero\n")[2].partition("\n## ")[0], re.MULTILINE)
GPU = next(index for index, line in enumerate(LINES) if line.startswith("scripts/build-image gpu"))
SCHEMAS = "1.33"  # as in test_overlays.py

Manifest = dict[str, Any]


class Cluster:
    """Images and objects that the lines so far have built, pushed and created."""

    def __init__(self, checkout: Path) -> None:
        self.checkout = checkout
        self.images: set[str] = set()  # images that the lines have built
        self.reachable: set[str] = set()  # images that the cluster can pull
        self.files: set[str] = set()
        self.objects: dict[str, dict[str, Manifest]] = {}  # by namespace, and by kind/name

    def run(self, line: str) -> None:
        words = shlex.split(line)
        match words:
            case ["scripts/build-image", *_]:
                shown = subprocess.run(
                    [ROOT / words[0], "--print", *words[1:]], capture_output=True, text=True, check=True
                )
                self.images.add(re.findall(r"--tag (\S+)", shown.stdout)[0])
            case ["kind", "load", "docker-image", image] | ["docker", "push", image]:
                assert image in self.images
                self.reachable.add(image)
            case ["grep", *_] | ["deploy/k8s/revise", _]:
                subprocess.run(["bash", "-euc", line], cwd=self.checkout, check=True)
            case ["pdserve", command, *flags]:
                before, _, file = " ".join(flags).partition(" >> ")
                parser_of(command).parse_args(before.split())
                self.files.add(file)
            case ["kubectl", "create", "namespace", name]:
                assert name not in self.objects
                self.objects[name] = {}
            case ["kubectl", *rest]:
                at = rest.index("-n")
                self._kubectl(self.objects[rest[at + 1]], [*rest[:at], *rest[at + 2 :]])
            case _:
                pytest.fail(f"no check of: {line}")

    def _kubectl(self, namespace: dict[str, Manifest], words: list[str]) -> None:
        match words:
            case ["apply", "-k", folder]:
                for manifest in self._build(folder):
                    namespace[f"{manifest['kind']}/{manifest['metadata']['name']}".lower()] = manifest
                check_pods(namespace, self.reachable)
            case ["create", "secret", "generic", name, file]:
                assert file.removeprefix("--from-file=") in self.files
                namespace[f"secret/{name}"] = {"data": {Path(file.partition("=")[2]).name: ""}}
            case ["rollout", "status", workload, "--timeout", _]:
                assert namespace[workload]["kind"] in ("Deployment", "StatefulSet")
            case ["wait", condition, job, "--timeout", _]:
                assert (condition, namespace[job]["kind"]) == ("--for=condition=complete", "Job")
            case ["port-forward", service, ports]:
                served = [str(port["port"]) for port in namespace[service]["spec"]["ports"]]
                assert ports.partition(":")[2] in served
            case _:
                pytest.fail(f"no check of: kubectl {shlex.join(words)}")

    def _build(self, folder: str) -> list[Manifest]:
        command = [*builder(), str(self.checkout / folder)]
        built = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        return list(yaml.load_all(built, yaml.CSafeLoader))


def check_pods(namespace: dict[str, Manifest], reachable: set[str]) -> None:
    """Check that images, claims and Secrets of all pods exist."""
    for manifest in list(namespace.values()):
        template = manifest.get("spec", {}).get("template")
        if template is None:
            continue
        for container in template["spec"]["containers"]:
            assert container["image"] in reachable
        for volume in template["spec"]["volumes"]:
            if claim := volume.get("persistentVolumeClaim"):
                assert f"persistentvolumeclaim/{claim['claimName']}" in namespace
            if (secret := volume.get("secret")) and not secret.get("optional"):
                assert f"secret/{secret['secretName']}" in namespace


def test_the_section_has_the_lines_of_a_local_cluster_a_registry_and_a_gpu() -> None:
    programs = {shlex.split(line)[0] for line in LINES}
    assert programs == {"scripts/build-image", "kind", "docker", "grep", "deploy/k8s/revise", "kubectl", "pdserve"}


@pytest.mark.parametrize("registry", [False, True], ids=["kind", "registry"])
def test_lines_create_what_later_lines_and_pods_need(registry: bool, tmp_path: Path) -> None:
    """The lines for a registry replace the lines for kind; the rest needs the registry's image of the GPU."""
    shutil.copytree(ROOT / "deploy", tmp_path / "deploy")
    cluster = Cluster(tmp_path)
    local = [line for line in LINES if line == "scripts/build-image cpu" or line.startswith("kind ")]
    pushed = LINES[len(local) : LINES.index("kubectl create namespace ai")]
    assert LINES[: len(local)] == local
    for line in LINES if registry else LINES[:GPU]:
        if line not in (local if registry else pushed):
            cluster.run(line)
    assert "deployment/router" in cluster.objects["ai"]
    assert ("statefulset/up" in cluster.objects.get("gpu", {})) == registry


def test_the_job_brings_the_model_that_the_overlay_serves() -> None:
    """The job may reach the hub only over HTTPS, and its pod is as unprivileged as the others."""

    def environment(container: Manifest) -> dict[str, str]:
        return {variable["name"]: variable["value"] for variable in container["env"]}

    cluster = Cluster(ROOT)
    manifests = {
        f"{manifest['kind']}/{manifest['metadata']['name']}": manifest
        for manifest in cluster._build("deploy/k8s/models")
    }
    up = next(
        manifest for manifest in cluster._build("deploy/k8s/overlays/one-gpu") if manifest["kind"] == "StatefulSet"
    )
    pod = manifests["Job/bring-model"]["spec"]["template"]
    (job,) = pod["spec"]["containers"]
    (server,) = up["spec"]["template"]["spec"]["containers"]
    assert environment(job)["MODEL"] == environment(server)["MODEL"]
    assert job["image"] == server["image"]
    assert job["securityContext"] == server["securityContext"]
    assert pod["spec"]["securityContext"] == up["spec"]["template"]["spec"]["securityContext"]
    policy = manifests["NetworkPolicy/bring-model"]["spec"]
    assert policy["podSelector"]["matchLabels"].items() <= pod["metadata"]["labels"].items()
    for manifest in manifests.values():
        kubernetes_validate.validate(manifest, SCHEMAS, strict=True)
    assert "app.kubernetes.io/part-of" not in pod["metadata"]["labels"], "the nodes' policies deny it everything"
    assert [port["port"] for rule in policy["egress"] for port in rule["ports"]] == [53, 53, 443]
