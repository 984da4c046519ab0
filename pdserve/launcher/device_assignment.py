"""Device assignment of ``pdserve up``: parallel sizes, GPUs and threads of each node."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.config.node_config import NodeOptions


def with_parallel_sizes(options: NodeOptions, pp: int | None, tp: int | None) -> NodeOptions:
    """Override the parallel sizes for one kind of node. ``stage_layers`` applies only to nodes with stages."""
    pp, tp = pp or options.pp, tp or options.tp
    return msgspec.structs.replace(options, pp=pp, tp=tp, stage_layers=options.stage_layers if pp > 1 else None)


def assign_devices(nodes: Sequence[NodeOptions], num_gpus: int, num_threads: int) -> list[NodeOptions]:
    """Return the nodes with GPUs and CPU threads assigned; options that the user set stay.

    If every node has one rank, all share a GPU and the user limits their memory. Otherwise each rank gets a GPU,
    starting at the configured index and wrapping around. ``num_threads`` is the machine's thread count.
    """
    num_ranks = sum(node.num_ranks for node in nodes)
    assigned, gpu = [], _first_gpu(nodes[0].device)
    for node in nodes:
        threads = node.threads or max(1, num_threads * node.num_ranks // num_ranks)
        device = node.device
        if num_gpus and device != "cpu" and num_ranks > len(nodes):
            if gpu + node.num_ranks > num_gpus:
                gpu = _first_gpu(device)
            device, gpu = f"cuda:{gpu}", gpu + node.num_ranks
        assigned.append(msgspec.structs.replace(node, device=device, threads=threads))
    return assigned


def _first_gpu(device: str) -> int:
    """Return N of "cuda:N", else 0."""
    return int(device.partition(":")[2] or 0)
