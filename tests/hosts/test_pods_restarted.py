"""Every pod is restarted, one after the other, under load: no request fails, no answer is another one."""

from __future__ import annotations

import pytest
from cluster import Cluster
from traffic import Traffic, check_as_before, wait


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_all_roles(cluster: Cluster, known: Traffic) -> None:
    """As Kubernetes does it: the last of a StatefulSet first, a router when another one is there."""
    with known.running():
        for role in ("prefill", "decode"):
            for pod in reversed(cluster.of(role)):
                cluster.restart(pod.name)
                cluster.wait_connected(20.0)  # at its new address, which is asked for every 5 s
        cluster.replace_router()
        wait(2.0)
    check_as_before(cluster)
