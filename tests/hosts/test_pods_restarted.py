"""A rolling restart of all pods under load fails no request and changes no answer."""

from __future__ import annotations

import pytest
from cluster import Cluster
from traffic import Traffic, check_recovered, wait


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_rolling_restart_of_all_pods_fails_no_request(cluster: Cluster, traffic: Traffic) -> None:
    """In the order of Kubernetes: StatefulSets from the last pod, and the router after its replacement is ready."""
    with traffic.running():
        for role in ("prefill", "decode"):
            for pod in reversed(cluster.running_pods(role)):
                cluster.restart(pod.name)
                cluster.wait_connected(20.0)  # nodes connect to the new address; names are resolved every 5 s
        cluster.replace_router()
        wait(2.0)
    check_recovered(cluster)
