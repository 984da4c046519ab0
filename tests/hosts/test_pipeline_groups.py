"""Nodes of several pods: the groups of the overlay multi-node-pp start in any order, with names that resolve late."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import Cluster
from network import require_namespaces
from traffic import Traffic


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_groups_start_although_names_resolve_late_and_workers_come_later(checkpoint: Path, tmp_path: Path) -> None:
    """In a tenth of the time of a cluster, a worker comes 40 s after its leader."""
    require_namespaces()
    cluster = Cluster("multi-node-pp", tmp_path, checkpoint, late=("prefill-ranks", "decode-ranks"))
    cluster.resolves_leaders = False
    with cluster:
        cluster.wait_until(lambda: all("trying again" in pod.log.read_text() for pod in cluster.nodes))
        cluster.resolve_leaders()
        for pod in cluster.pods.values():
            if pod.role == "prefill-ranks":
                cluster.start(pod.name)
        time.sleep(40.0)
        for pod in cluster.pods.values():
            if pod.role == "decode-ranks":
                cluster.start(pod.name)
        cluster.wait_ready()
        Traffic(cluster, seed=5, count=4)
