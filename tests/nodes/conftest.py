"""Real nodes, shared by all tests of this folder because starting one takes seconds."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from node_fleet import Nodes, start_nodes
from stages import Pair, start_pair


@pytest.fixture(scope="package")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("nodes") / "model", "qwen3", num_hidden_layers=2)


@pytest.fixture(scope="package")
def all_nodes(checkpoint: Path) -> Iterator[Nodes]:
    with start_nodes(checkpoint) as nodes:
        yield nodes


@pytest.fixture
def nodes(all_nodes: Nodes) -> Iterator[Nodes]:
    """Yield all nodes, idle. After the test, proxies are reset and no node holds a block."""
    yield all_nodes
    all_nodes.settle()


@pytest.fixture(scope="package")
def shared_pair(checkpoint: Path) -> Iterator[Pair]:
    with start_pair(checkpoint) as pair:
        yield pair
