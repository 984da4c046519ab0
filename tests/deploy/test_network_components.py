"""Components for RDMA networks, IPv6 and shared caches."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from overlays import COMPONENT, Manifest, build_with


@pytest.fixture(scope="module", params=["multi-node", "multi-node-pp"])
def built(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[Manifest]:
    added = ["nodes/roce", "nodes/ipv6", "router/dual-stack"]
    added += [] if request.param == "multi-node-pp" else ["nodes/cache"]  # the other overlay has it
    return build_with(tmp_path_factory.mktemp("network"), request.param, *added)


def templates(built: list[Manifest]) -> Iterator[dict[str, Any]]:
    for manifest in built:
        match manifest["kind"]:
            case "Deployment" | "StatefulSet":
                yield manifest["spec"]["template"]
            case "LeaderWorkerSet":
                group = manifest["spec"]["leaderWorkerTemplate"]
                yield from (group["leaderTemplate"], group["workerTemplate"])


def nodes(built: list[Manifest]) -> list[dict[str, Any]]:
    return [template for template in templates(built) if template["metadata"]["labels"][COMPONENT] != "router"]


def test_all_pods_of_nodes_are_on_the_network_of_the_card(built: list[Manifest]) -> None:
    annotations = [template["metadata"].get("annotations") for template in nodes(built)]
    assert len(annotations) in (2, 4)
    assert all(networks == {"k8s.v1.cni.cncf.io/networks": "roce"} for networks in annotations)


def test_all_programs_listen_on_both_families(built: list[Manifest]) -> None:
    for template in templates(built):
        args = template["spec"]["containers"][0]["args"]
        assert "--host=::" in args
        assert "--host=0.0.0.0" not in args
        assert "--metrics-host=0.0.0.0" not in args


def test_clients_reach_the_router_by_both_families_and_nodes_have_one_address(built: list[Manifest]) -> None:
    policies = {manifest["metadata"]["name"]: manifest["spec"] for manifest in built if manifest["kind"] == "Service"}
    assert policies.pop("pdserve")["ipFamilyPolicy"] == "PreferDualStack"
    assert policies
    for spec in policies.values():
        assert (spec["clusterIP"], spec["ipFamilyPolicy"]) == ("None", "SingleStack")


@pytest.mark.parametrize("variable", ["XDG_CACHE_HOME", "FLASHINFER_WORKSPACE_BASE"])
def test_digests_of_weights_and_compiled_kernels_are_kept_on_a_volume(built: list[Manifest], variable: str) -> None:
    for template in nodes(built):
        (container,) = template["spec"]["containers"]
        (cache,) = (entry["value"] for entry in container["env"] if entry["name"] == variable)
        (mount,) = (mount for mount in container["volumeMounts"] if mount["mountPath"] == cache)
        (volume,) = (volume for volume in template["spec"]["volumes"] if volume["name"] == mount["name"])
        assert not mount.get("readOnly")
        assert volume["persistentVolumeClaim"] == {"claimName": "cache"}
