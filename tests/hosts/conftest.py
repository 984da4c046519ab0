"""One cluster for all tests of this folder; it takes fifteen seconds to start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from client_load import VOCABULARY
from cluster import Cluster
from fleet import add_tokenizer
from network import require_namespaces
from traffic import Traffic

OVERLAY = "multi-node"


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3", vocab_size=VOCABULARY)
    return add_tokenizer(made)


@pytest.fixture(scope="package")
def started(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    require_namespaces()
    with Cluster(OVERLAY, tmp_path_factory.mktemp("hosts"), checkpoint) as cluster:
        cluster.wait_ready()
        yield cluster


@pytest.fixture
def cluster(started: Cluster) -> Iterator[Cluster]:
    """The cluster; after each test, all links are healed and all peers connected."""
    yield started
    started.network.heal()
    started.wait_connected()


@pytest.fixture(scope="package")
def traffic(started: Cluster) -> Traffic:
    """Requests with expected answers from the undisturbed cluster."""
    return Traffic(started, seed=3, count=6)
