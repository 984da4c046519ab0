"""Engines for tests of scheduling: with and without steps in flight beside the next one, with 1 to 3 stages."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from toy_node import DEPTHS, Make, Node

#: Depths of the slow tests alone: the others have one and several stages, with and without a step more.
_SLOW_DEPTHS = ((3, 2), (3, 3))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        parameters = item.callspec.params if isinstance(item, pytest.Function) and hasattr(item, "callspec") else {}
        if parameters.get("depth") in _SLOW_DEPTHS:
            item.add_marker("slow")


@pytest.fixture(params=DEPTHS, ids=[f"depth{depth}of{stages}" for depth, stages in DEPTHS])
def depth(request: pytest.FixtureRequest) -> tuple[int, int]:
    """(steps in flight, stages)"""
    depth, stages = request.param
    return depth, stages


@pytest.fixture
def make(depth: tuple[int, int]) -> Iterator[Make]:
    nodes = []

    def make(num_blocks: int, **options: Any) -> Node:
        nodes.append(Node(num_blocks, *depth, **options))
        return nodes[-1]

    yield make
    for node in nodes:
        node.close()
