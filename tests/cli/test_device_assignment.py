"""GPUs and threads that ``pdserve up`` assigns to nodes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.up.device_assignment import assign_devices, gpus_of, nodes_on_gpus, with_parallel_sizes
from pdserve.config.node_options import NodeOptions
from pdserve.errors import ConfigError

ONE = NodeOptions(model="m")
TWO = NodeOptions(model="m", tp=2)
FOUR = NodeOptions(model="m", tp=4)


@pytest.mark.parametrize(
    ("nodes", "num_gpus", "devices"),
    [
        ([ONE, ONE], 1, ["cuda:0", "cuda:0"]),
        ([ONE, ONE], 4, ["cuda:0", "cuda:1"]),
        ([ONE] * 5, 2, ["cuda:0", "cuda:1", "cuda:0", "cuda:1", "cuda:0"]),
        ([ONE, TWO], 4, ["cuda:0", "cuda:1"]),
        ([FOUR, ONE, ONE], 8, ["cuda:0", "cuda:4", "cuda:5"]),
        ([TWO, TWO], 4, ["cuda:0", "cuda:2"]),
        ([TWO, TWO, ONE], 4, ["cuda:0", "cuda:2", "cuda:0"]),
        ([TWO, TWO], 3, ["cuda:0", "cuda:1"]),
        ([TWO, TWO], 2, ["cuda:0", "cuda:0"]),
        ([TWO, ONE, TWO], 4, ["cuda:0", "cuda:2", "cuda:2"]),
        ([TWO, TWO], 0, ["auto", "auto"]),
        ([TWO, TWO], 1, ["auto", "auto"]),  # refused later, where the devices are looked up
    ],
)
def test_each_rank_gets_its_own_gpu_if_there_are_enough(
    nodes: list[NodeOptions], num_gpus: int, devices: list[str]
) -> None:
    assert [node.device for node in assign_devices(nodes, num_gpus, 8)] == devices


def test_assignment_starts_at_the_named_device() -> None:
    first = NodeOptions(model="m", tp=2, device="cuda:1")
    assert [node.device for node in assign_devices([first, first, first], 5, 8)] == ["cuda:1", "cuda:3", "cuda:1"]
    any_gpu = NodeOptions(model="m", device="cuda")
    assert [node.device for node in assign_devices([any_gpu, any_gpu], 2, 8)] == ["cuda:0", "cuda:1"]


@pytest.mark.parametrize(
    ("options", "num_gpus", "expected"),
    [
        ({}, 0, 0),
        ({}, 1, 1),
        ({"device": "cuda:1"}, 4, 3),
        ({"tp": 2, "pp": 2}, 8, 2),
        ({"tp": 4}, 2, 1),  # refused later
        ({"device": "cpu"}, 4, 0),
        ({"engine": "simulated"}, 4, 0),
    ],
)
def test_each_rank_of_a_node_takes_a_gpu(options: dict[str, Any], num_gpus: int, expected: int) -> None:
    assert nodes_on_gpus(NodeOptions(model="m", **options), num_gpus) == expected


@pytest.mark.parametrize("options", [{"device": "cpu"}, {"engine": "simulated"}])
def test_nodes_without_gpus_get_none(options: dict[str, Any]) -> None:
    node = NodeOptions(model="m", threads=1, **options)
    assert assign_devices([node, node], 4, 8) == [node, node]


@pytest.mark.parametrize(
    ("nodes", "num_gpus", "shares"),
    [
        ([ONE, ONE], 2, [None, None]),
        ([ONE, ONE], 1, [0.45, 0.45]),
        ([TWO, ONE], 2, [0.45, 0.45]),
        ([TWO, TWO], 3, [0.45, 0.45]),
        ([ONE, ONE, ONE], 2, [0.45, None, 0.45]),
    ],
)
def test_nodes_that_share_a_gpu_divide_its_memory(
    nodes: list[NodeOptions], num_gpus: int, shares: list[float | None]
) -> None:
    assert [node.gpu_memory_utilization for node in assign_devices(nodes, num_gpus, 8)] == shares


def test_shares_of_more_than_a_gpu_are_refused() -> None:
    half, most = (NodeOptions(model="m", gpu_memory_utilization=share) for share in (0.5, 0.6))
    assert [node.gpu_memory_utilization for node in assign_devices([half, half], 1, 8)] == [0.5, 0.5]
    assert len(assign_devices([most, most], 2, 8)) == 2
    with pytest.raises(ConfigError, match=r"--gpu-memory-utilization 0\.6 .* at most 0\.5"):
        assign_devices([most, most], 1, 8)


@given(
    st.lists(
        st.builds(
            NodeOptions, model=st.just("m"), tp=st.integers(1, 4), kv_cache_memory=st.sampled_from([None, 1 << 30])
        ),
        min_size=1,
        max_size=12,
    ),
    st.integers(0, 9),
    st.sampled_from(["auto", "cuda", "cuda:1"]),
)
def test_no_gpu_is_shared_while_another_is_free(nodes: list[NodeOptions], num_gpus: int, device: str) -> None:
    nodes = [NodeOptions(model="m", device=device, tp=node.tp, kv_cache_memory=node.kv_cache_memory) for node in nodes]
    first = int(device == "cuda:1")
    assigned = assign_devices(nodes, num_gpus, 8)
    possible = [node for node in nodes if first + node.tp <= num_gpus]
    placed = [
        node for node in assigned if node.threads and node.device.startswith("cuda:") and node.tp + first <= num_gpus
    ]
    assert len(placed) == len(possible)
    used = Counter(gpu for node in placed for gpu in gpus_of(node))
    assert all(first <= gpu < num_gpus for gpu in used)
    if max(used.values(), default=0) > 1:
        assert set(used) >= set(range(first, num_gpus)), "a free GPU is left"
    for gpu in used:
        measured = [n for n in placed if gpu in gpus_of(n) and n.kv_cache_memory is None]
        assert sum(node.memory_share for node in measured) <= 1
    for before, after in zip(nodes, assigned, strict=True):
        assert (after.tp, after.kv_cache_memory) == (before.tp, before.kv_cache_memory)


def test_threads_are_divided_among_all_ranks() -> None:
    assert [node.threads for node in assign_devices([ONE, TWO, ONE], 0, 8)] == [2, 4, 2]
    assert [node.threads for node in assign_devices([ONE, TWO], 0, 1)] == [1, 1]
    chosen = NodeOptions(model="m", threads=3)
    assert [node.threads for node in assign_devices([chosen, chosen], 0, 8)] == [3, 3]


def test_each_kind_of_node_has_its_parallel_sizes() -> None:
    options = NodeOptions(model="m", pp=2, tp=2, stage_layers=(3, 1))
    assert with_parallel_sizes(options, None, None) == options
    assert with_parallel_sizes(options, 1, 4) == NodeOptions(model="m", tp=4)
    whole_experts = NodeOptions(model="m", tp=2, ep=2)
    assert with_parallel_sizes(whole_experts, None, None) == whole_experts
    assert with_parallel_sizes(whole_experts, None, 4) == NodeOptions(model="m", tp=4, ep=4)
    assert with_parallel_sizes(whole_experts, None, 1) == NodeOptions(model="m")
