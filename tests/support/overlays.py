"""The Kubernetes overlays, built by kubectl or kustomize into plain values, and their pods."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

KUBERNETES = Path(__file__).parents[2] / "deploy" / "k8s"
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
REVISION = "pdserve.dev/revision"
COMPONENT = "app.kubernetes.io/component"

Manifest = dict[str, Any]


def builder() -> list[str]:
    if shutil.which("kustomize"):
        return ["kustomize", "build"]
    if shutil.which("kubectl"):
        return ["kubectl", "kustomize"]
    pytest.skip("neither kubectl nor kustomize is installed, and PyPI has no package of them", allow_module_level=True)


@cache
def build(overlay: str) -> list[Manifest]:
    """Return all objects of an overlay."""
    built = subprocess.run([*builder(), str(KUBERNETES / "overlays" / overlay)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return list(yaml.load_all(built.stdout, yaml.CSafeLoader))


def build_with(folder: Path, overlay: str, *components: str) -> list[Manifest]:
    """Return all objects of an overlay with further components, such as nodes/roce, built in a copy in ``folder``."""
    deploy = Path(shutil.copytree(KUBERNETES.parent, folder / "deploy"))
    copy = deploy / KUBERNETES.name
    for component in components:
        where = copy / "overlays" / overlay / ("nodes" if component.startswith("nodes/") else "")
        path = where / "kustomization.yaml"
        content = yaml.safe_load(path.read_text())
        up = "../" * len(where.relative_to(copy).parts)
        content.setdefault("components", []).append(f"{up}components/{component}")
        path.write_text(yaml.safe_dump(content))
    built = subprocess.run([*builder(), str(copy / "overlays" / overlay)], capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return list(yaml.load_all(built.stdout, yaml.CSafeLoader))


def of_kind(overlay: str, kind: str) -> list[Manifest]:
    return [manifest for manifest in build(overlay) if manifest["kind"] == kind]


@dataclass(frozen=True)
class Pod:
    """The pod template of a workload, with the number of replicas."""

    name: str
    replicas: int
    labels: dict[str, str]
    spec: Manifest

    @property
    def role(self) -> str:
        """router, up, prefill, decode or both; prefill-ranks and decode-ranks are pods without a frontend."""
        return self.labels[COMPONENT]

    @property
    def is_node(self) -> bool:
        return self.role in ("prefill", "decode", "both")

    @property
    def is_rank(self) -> bool:
        """Whether it only adds ranks to the node of another pod."""
        return self.role.endswith("-ranks")

    @property
    def leader_address(self) -> str:
        """The name of the first group's leader, as LeaderWorkerSet makes it."""
        return f"{self.name}-0.{self.name}.ai"

    @property
    def container(self) -> Manifest:
        (only,) = self.spec["containers"]
        return only  # type: ignore[no-any-return]

    @property
    def environment(self) -> dict[str, str]:
        """The container's environment, with example values for fields that a cluster sets."""
        return self.environment_of(f"{self.name}-0", "10.1.2.3")

    def environment_of(self, name: str, address: str) -> dict[str, str]:
        """Return the container's environment in a pod with this name and address."""
        given = {
            "metadata.name": name,
            "metadata.namespace": "ai",
            "status.podIP": address,
            f"metadata.labels['{REVISION}']": self.labels.get(REVISION, ""),
            "metadata.labels['leaderworkerset.sigs.k8s.io/worker-index']": "1" if "ranks" in self.role else "0",
        }
        values = {"LWS_LEADER_ADDRESS": self.leader_address}
        for entry in self.container["env"]:
            source = entry.get("valueFrom")
            values[entry["name"]] = entry["value"] if source is None else given[source["fieldRef"]["fieldPath"]]
        return values

    @property
    def arguments(self) -> list[str]:
        return self.arguments_in(self.environment)

    def arguments_in(self, environment: dict[str, str]) -> list[str]:
        """Return the container's arguments; like Kubernetes, leave $(NAME) as it is if NAME is not set."""
        return [
            re.sub(r"\$\((\w+)\)", lambda match: environment.get(match[1], match[0]), word)
            for word in self.container["args"]
        ]

    def flags(self, name: str) -> list[str]:
        return [word.partition("=")[2] for word in self.arguments if word.startswith(f"--{name}=")]


def pods(overlay: str) -> Iterator[Pod]:
    for manifest in build(overlay):
        name = manifest["metadata"]["name"]
        spec = manifest.get("spec") or {}
        if manifest["kind"] in ("Deployment", "StatefulSet"):
            template = spec["template"]
            replicas = spec["replicas"] if "replicas" in spec else _most_replicas(overlay, name)
            yield _pod(name, replicas, template)
        elif manifest["kind"] == "LeaderWorkerSet":
            group = spec["leaderWorkerTemplate"]
            yield _pod(name, spec["replicas"], group["leaderTemplate"])
            yield _pod(name, spec["replicas"] * (group["size"] - 1), group["workerTemplate"])


def _pod(name: str, replicas: int, template: Manifest) -> Pod:
    return Pod(name, replicas, template["metadata"]["labels"], template["spec"])


def _most_replicas(overlay: str, name: str) -> int:
    """Return the maximum replicas of an autoscaled workload."""
    scaled = [manifest["spec"] for manifest in of_kind(overlay, "ScaledObject")]
    (most,) = [int(spec["maxReplicaCount"]) for spec in scaled if spec["scaleTargetRef"]["name"] == name]
    return most


def headless_services(overlay: str, pod: Pod) -> list[str]:
    """Return the headless Services that select the pod."""
    services = [manifest for manifest in of_kind(overlay, "Service") if manifest["spec"].get("clusterIP") == "None"]
    return [
        service["metadata"]["name"] for service in services if service["spec"]["selector"].items() <= pod.labels.items()
    ]


def selects(selector: Manifest, labels: dict[str, str]) -> bool:
    """Return whether a label selector matches; an empty one matches everything."""
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items()) and all(
        labels.get(expression["key"]) in expression["values"] for expression in selector.get("matchExpressions", ())
    )
