"""Nodes of several pods: the groups of the overlay multi-node-pp start in any order, with names that resolve late.

A group whose container ends is not recreated: each container is started again where it is, and they meet again.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cluster import Cluster
from machine import patience
from network import first_process, require_namespaces
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


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("role", ["decode", "decode-ranks"])
def test_containers_of_a_group_end_together_and_meet_again(checkpoint: Path, tmp_path: Path, role: str) -> None:
    require_namespaces()
    with Cluster("multi-node-pp", tmp_path, checkpoint) as cluster:
        cluster.wait_ready()
        (killed,) = cluster.running_pods(role)
        group = [*cluster.running_pods("decode"), *cluster.running_pods("decode-ranks")]
        programs = [pod.program for pod in group]
        assert killed.program is not None
        first_process(killed.program).kill()
        for program in programs:
            assert program is not None
            assert program.wait(patience(30.0)) != 0
        for pod in group:
            cluster.start_container(pod.name)
        cluster.wait_ready()
        Traffic(cluster, seed=5, count=4)
