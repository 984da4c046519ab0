"""The tracing components of an overlay: flags of the programs and network policies."""

from __future__ import annotations

from typing import Any

import pytest
from overlays import COMPONENT, build_with

COLLECTOR = "--traces=http://collector.observability:4318"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """Build the overlay for several machines with the tracing components."""
    return build_with(tmp_path_factory.mktemp("traces"), "multi-node", "router/tracing", "nodes/tracing")


def test_tracing_components_configure_all_programs(built: list[dict[str, Any]]) -> None:
    specs = [manifest["spec"]["template"] for manifest in built if manifest["kind"] in ("Deployment", "StatefulSet")]
    roles = {spec["metadata"]["labels"][COMPONENT]: spec["spec"]["containers"][0]["args"] for spec in specs}
    assert {*roles} == {"router", "prefill", "decode"}
    assert all(COLLECTOR in args for args in roles.values())
    assert [role for role, args in roles.items() if any("--trace-sample=" in word for word in args)] == ["router"]


def test_only_pods_of_the_fleet_reach_the_collector(built: list[dict[str, Any]]) -> None:
    (policy,) = (manifest["spec"] for manifest in built if manifest["metadata"]["name"] == "traces")
    assert policy["podSelector"]["matchLabels"] == {"app.kubernetes.io/part-of": "pdserve"}
    (rule,) = policy["egress"]
    assert rule["ports"] == [{"port": 4318}]
    assert rule["to"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "observability"}}}]
