"""What each node of ``pdserve up`` gets of the machine: a split of the model, GPUs, threads."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.config.node_config import NodeOptions


def with_split(options: NodeOptions, pp: int | None, tp: int | None) -> NodeOptions:
    """Options of nodes of one kind, which may be split in their own way. A list of layers is for nodes with stages."""
    pp, tp = pp or options.pp, tp or options.tp
    return msgspec.structs.replace(options, pp=pp, tp=tp, stage_layers=options.stage_layers if pp > 1 else None)


def assign_devices(nodes: Sequence[NodeOptions], num_gpus: int, num_threads: int) -> list[NodeOptions]:
    """The nodes, each with its GPUs and its threads, in turn; what a person has chosen stays.

    Nodes of one rank share a GPU: a person gives each its memory. As soon as one has more, every rank gets a GPU of its
    own, from the named one on, as long as there are any; then it begins anew. ``num_threads`` are those of the machine.
    """
    num_ranks = sum(node.num_ranks for node in nodes)
    dealt, gpu = [], _first_gpu(nodes[0].device)
    for node in nodes:
        threads = node.threads or max(1, num_threads * node.num_ranks // num_ranks)
        device = node.device
        if num_gpus and device != "cpu" and num_ranks > len(nodes):
            if gpu + node.num_ranks > num_gpus:
                gpu = _first_gpu(device)
            device, gpu = f"cuda:{gpu}", gpu + node.num_ranks
        dealt.append(msgspec.structs.replace(node, device=device, threads=threads))
    return dealt


def _first_gpu(device: str) -> int:
    """Of "cuda:N"; 0 where none is named."""
    return int(device.partition(":")[2] or 0)
