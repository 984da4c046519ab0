"""Device assignment of ``pdserve up``: parallel sizes, GPUs, shares of GPU memory and threads of each node."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import msgspec

from pdserve.config.node_options import GPU_MEMORY_UTILIZATION, NodeOptions
from pdserve.errors import ConfigError


def with_parallel_sizes(options: NodeOptions, pp: int | None, tp: int | None) -> NodeOptions:
    """Override the parallel sizes for one kind of node. ``stage_layers`` applies only to nodes with stages.

    A node with whole experts per shard keeps them: its ``ep`` is its ``tp``.
    """
    ep = options.ep if tp in (None, options.tp) or options.ep == 1 else tp
    pp = pp or options.pp
    tp = tp or options.tp
    return msgspec.structs.replace(
        options,
        pp=pp,
        tp=tp,
        ep=ep,
        stage_layers=options.stage_layers if pp > 1 else None,
    )


def assign_devices(nodes: Sequence[NodeOptions], num_gpus: int, num_threads: int) -> list[NodeOptions]:
    """Return the nodes with GPUs, shares of GPU memory and CPU threads assigned; options that the user set stay.

    Each rank gets a GPU of its own as long as they suffice, from the first node's ``cuda:N`` on. Further nodes share
    the GPUs with the fewest nodes, and each of them gets an equal share of the memory. ``num_threads`` is the machine's
    thread count. Raises ConfigError if nodes that share a GPU were told to use more than all of it.
    """
    num_ranks = sum(node.num_ranks for node in nodes)
    gpus = _assign_gpus(nodes, num_gpus)
    load = Counter(gpu for window in gpus for gpu in window)
    assigned = []
    for node, window in zip(nodes, gpus, strict=True):
        changes: dict[str, object] = {"threads": node.threads or max(1, num_threads * node.num_ranks // num_ranks)}
        if window:
            changes["device"] = f"cuda:{window.start}"
            changes["gpu_memory_utilization"] = _memory_share(node, window, max(load[gpu] for gpu in window))
        assigned.append(msgspec.structs.replace(node, **changes))
    return assigned


def gpus_of(node: NodeOptions) -> range:
    """Return the GPUs of a node's ranks; none unless its device is ``cuda:N``."""
    first = _first_gpu(node)
    return range(first, first + node.num_ranks if node.device.startswith("cuda:") else first)


def nodes_on_gpus(options: NodeOptions, num_gpus: int) -> int:
    """Return how many nodes of these options the GPUs can run, a GPU per rank: at least 1; 0 for other devices."""
    on_cpu = options.simulated or options.device == "cpu" or not num_gpus
    return 0 if on_cpu else max(1, (num_gpus - _first_gpu(options)) // options.num_ranks)


def _assign_gpus(nodes: Sequence[NodeOptions], num_gpus: int) -> list[range]:
    """Return the GPUs of each node: the first adjacent ones with the fewest other nodes; none if the CPU runs it."""
    first = _first_gpu(nodes[0])
    used: Counter[int] = Counter()
    chosen = []
    for node in nodes:
        starts = (
            range(first, num_gpus - node.num_ranks + 1) if node.device != "cpu" and not node.simulated else range(0)
        )
        windows = [range(start, start + node.num_ranks) for start in starts]
        best = min(
            windows, key=lambda gpus: (max(used[gpu] for gpu in gpus), sum(used[gpu] for gpu in gpus)), default=range(0)
        )
        used.update(best)
        chosen.append(best)
    return chosen


def _first_gpu(options: NodeOptions) -> int:
    """Return N of ``cuda:N``, else 0."""
    return int(options.device.partition(":")[2] or 0)


def _memory_share(node: NodeOptions, gpus: range, num_nodes: int) -> float | None:
    """Return the share of its GPUs' memory for a node, where ``num_nodes`` share the one with the most nodes."""
    share = node.gpu_memory_utilization
    if node.kv_cache_memory is not None or num_nodes == 1:
        return share
    if share is None:
        return GPU_MEMORY_UTILIZATION / num_nodes
    if share * num_nodes > 1:
        raise ConfigError(
            f"--gpu-memory-utilization {share:g} is the share of each node, but {num_nodes} nodes share a GPU of "
            f"cuda:{gpus.start} … cuda:{gpus.stop - 1}; give at most {1 / num_nodes:.2g}, or leave it out"
        )
    return share
