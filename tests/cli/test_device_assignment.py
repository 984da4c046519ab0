"""GPUs and threads that ``pdserve up`` assigns to nodes."""

from __future__ import annotations

import pytest

from pdserve.config.node_config import NodeOptions
from pdserve.launcher.device_assignment import assign_devices, with_parallel_sizes

ONE = NodeOptions(model="m")
TWO = NodeOptions(model="m", tp=2)


@pytest.mark.parametrize(
    ("nodes", "num_gpus", "devices"),
    [
        ([ONE, ONE], 4, ["auto", "auto"]),  # a GPU is shared, as long as every node has one rank
        ([ONE, TWO], 4, ["cuda:0", "cuda:1"]),
        ([TWO, TWO], 4, ["cuda:0", "cuda:2"]),
        ([TWO, TWO, ONE], 4, ["cuda:0", "cuda:2", "cuda:0"]),
        ([TWO, TWO], 2, ["cuda:0", "cuda:0"]),
        ([TWO, ONE, TWO], 4, ["cuda:0", "cuda:2", "cuda:0"]),
        ([TWO, TWO], 0, ["auto", "auto"]),
    ],
)
def test_each_rank_gets_its_own_gpu_if_there_are_enough(
    nodes: list[NodeOptions], num_gpus: int, devices: list[str]
) -> None:
    assert [node.device for node in assign_devices(nodes, num_gpus, 8)] == devices


def test_assignment_starts_at_the_named_device() -> None:
    first = NodeOptions(model="m", tp=2, device="cuda:1")
    assert [node.device for node in assign_devices([first, first, first], 5, 8)] == ["cuda:1", "cuda:3", "cuda:1"]
    on_cpu = NodeOptions(model="m", tp=2, device="cpu")
    assert [node.device for node in assign_devices([on_cpu, on_cpu], 4, 8)] == ["cpu", "cpu"]


def test_threads_are_divided_among_all_ranks() -> None:
    assert [node.threads for node in assign_devices([ONE, TWO, ONE], 0, 8)] == [2, 4, 2]
    assert [node.threads for node in assign_devices([ONE, TWO], 0, 1)] == [1, 1]
    chosen = NodeOptions(model="m", threads=3)
    assert [node.threads for node in assign_devices([chosen, chosen], 0, 8)] == [3, 3]


def test_each_kind_of_node_has_its_parallel_sizes() -> None:
    options = NodeOptions(model="m", pp=2, tp=2, stage_layers=(3, 1))
    assert with_parallel_sizes(options, None, None) == options
    assert with_parallel_sizes(options, 1, 4) == NodeOptions(model="m", tp=4)
