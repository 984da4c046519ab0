"""Communication between the ranks of a node: torch.distributed, NCCL between GPUs and gloo between CPUs.

Every rank makes the same calls in the same order: if one leaves a call out, the others wait for it. Only tensors are
sent, never objects, so nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.distributed import Work

from pdserve.config.node_config import DeviceInfo
from pdserve.config.parallel import RankPosition
from pdserve.errors import NodeError
from pdserve.rpc.address import join_address, split_address
from runner.distributed.peer_memory import PeerMemory, map_memory

if TYPE_CHECKING:
    from runner.kernels.all_reduce import SumAndNorm

_log = logging.getLogger(__name__)
_dist: Any = torch.distributed  # torch itself imports it; its types leave out some of what it documents

#: How long a rank waits for the others. A dead rank is noticed elsewhere, and a stopped rank may continue; this limit
#: ends waiting that is in vain, and must exceed the time that any rank takes to read its weights.
_TIMEOUT = timedelta(minutes=30)

#: Multiprocessors that a message between stages occupies. A message is sent while the next step is computed, so its
#: NCCL kernel must leave all but a few multiprocessors to that step.
_CHANNEL_PROCESSORS = 4

_LONGEST_PROBLEM = 4096  # bytes


class PeerChannel:
    """One end of an ordered, one-way connection between two ranks."""

    def __init__(self, group: Any, peer: int, sends: bool, device: torch.device) -> None:
        self._group = group
        self._peer = peer
        self.device = device
        self.sends = sends  # whether this is the sending end

    def send(self, message: Tensor) -> Work:
        """Send a contiguous tensor that is complete on the current stream; it must not change until it is sent."""
        assert self.sends
        work: Work = _dist.isend(message, self._peer, group=self._group)
        return work

    def receive(self, message: Tensor) -> Work:
        """Receive into ``message``, which only work on the current stream may still need.

        ``wait`` of the result makes the current stream wait for the message; on a CPU, the host.
        """
        assert not self.sends
        work: Work = _dist.irecv(message, self._peer, group=self._group)
        return work

    def exchange(self, mine: bytes) -> bytes:
        """Return the bytes that the other end passes to this call; both ends pass equally many."""
        rank: int = _dist.get_rank(self._group)
        return _gather_bytes(mine, 2, self._group, self.device)[1 - rank]


class ParallelState:
    """One rank's process groups. On a node of one rank every collective call returns its input.

    Stages use the default process group, with the rank numbers of ``pdserve.config.parallel``.
    """

    def __init__(self, position: RankPosition, device: DeviceInfo, rendezvous: str | socket.socket) -> None:
        """Wait until all ranks have joined at ``rendezvous``. Raises NodeError if they do not.

        ``rendezvous`` is the listening socket on rank 0, its "host:port" on other ranks, "" for a single rank.
        """
        self.position = position
        self.device = torch.device(device.kind if device.kind == "cpu" else f"{device.kind}:{device.index}")
        self.fused_all_reduce: SumAndNorm | None = None  # for few rows, on GPUs with peer access
        self._shards: Any = None  # process group of this stage's tensor shards
        self._peer_memory: PeerMemory | None = None
        self._initialized = position.parallel.num_ranks > 1
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._initialized:
            self._join(rendezvous)

    @property
    def shard_group(self) -> Any:
        """The process group of this stage's tensor shards, None for one shard."""
        return self._shards

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the sum of x [tokens, hidden_size] over the shards of this stage.

        x is contiguous, and may be overwritten and returned. The call can be captured into a CUDA graph.
        """
        if self._shards is not None:
            _dist.all_reduce(x, group=self._shards)
        return x

    def enable_fused_all_reduce(self, size: int) -> None:
        """Let our kernel sum few rows of ``size`` values, if the GPUs can write to each other's memory.

        All shards must call it. Triton is imported only here.
        """
        if self._shards is None or self.device.type != "cuda":
            return
        from runner.kernels.all_reduce import SumAndNorm, mailbox_bytes, most_rows

        tp = self.position.parallel.tp
        shard = self.position.shard
        rows = most_rows(tp, size)
        self._peer_memory = map_memory(
            mailbox_bytes(tp, rows, size), shard, lambda mine: _gather_bytes(mine, tp, self._shards, self.device)
        )
        if self._peer_memory is None:
            _log.warning("%s sums by NCCL alone: the GPUs of its stage have no access to each other", self.position)
        else:
            self.fused_all_reduce = SumAndNorm(self._peer_memory.addresses, shard, rows, size, self.device)

    def gather_columns(self, mine: Tensor, size: int, out: Tensor | None = None) -> Tensor:
        """Return [rows, size], such as logits, from each shard's [rows, columns]; all shards pass equal shapes.

        Padding beyond ``size`` is dropped. Written to ``out`` if given. The call can be captured into a CUDA
        graph.
        """
        if self._shards is None:
            return mine if out is None else out.copy_(mine)
        rows, columns = mine.shape
        tp = self.position.parallel.tp
        if rows == 1 and out is not None and out.is_contiguous() and tp * columns == size:
            _all_gather(out.view(tp, columns), mine, self._shards)
            return out
        parts = mine.new_empty(tp * rows, columns)
        _all_gather(parts, mine, self._shards)
        if rows == 1 and out is None:
            return parts.view(1, -1)[:, :size]
        runs = [part[:, : max(0, size - shard * columns)] for shard, part in enumerate(parts.view(tp, rows, columns))]
        return torch.cat(runs, dim=1) if out is None else torch.cat(runs, dim=1, out=out)

    def all_reduce_min(self, number: int) -> int:
        """Return the least ``number`` of all ranks of all stages."""
        if not self._initialized:
            return number
        numbers = torch.tensor([number], dtype=torch.int64, device=self.device)
        _dist.all_reduce(numbers, op=_dist.ReduceOp.MIN)
        return int(numbers.item())

    def broadcast(self, x: Tensor, rank: int) -> Tensor:
        """Return ``rank``'s x. All ranks of all stages pass contiguous tensors of one shape, and may lose theirs."""
        if self._initialized:
            _dist.broadcast(x, src=rank)
        return x

    def first_problem(self, mine: str) -> str:
        """Return the problem of the first rank that has one, "" if no rank has one."""
        if not self._initialized:
            return mine
        text = mine.encode()[:_LONGEST_PROBLEM]
        num_ranks = self.position.parallel.num_ranks
        padded = text.ljust(_LONGEST_PROBLEM, b"\0")
        problems = _gather_bytes(padded, num_ranks, _dist.group.WORLD, self.device)
        return next((problem.rstrip(b"\0").decode(errors="replace") for problem in problems if any(problem)), "")

    def channel(self, source: int, target: int) -> PeerChannel | None:
        """Open a channel between two ranks; None on other ranks. All ranks open all channels, in the same order."""
        options = None
        if self.device.type == "cuda":
            options = _dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.config.max_ctas = _CHANNEL_PROCESSORS
            options._timeout = _TIMEOUT
        group = _dist.new_group((source, target), timeout=_TIMEOUT, pg_options=options)
        rank = self.position.rank
        if rank not in (source, target):
            return None
        return PeerChannel(group, target if rank == source else source, sends=rank == source, device=self.device)

    def close(self) -> None:
        """Leave the process groups. Captured graphs with calls in them must be gone. Idempotent."""
        if self._initialized:
            self._initialized = False
            self._shards = None
            self.fused_all_reduce = None
            if self._peer_memory is not None:
                self._peer_memory.close()
            _dist.destroy_process_group()

    def _join(self, rendezvous: str | socket.socket) -> None:
        host, port = split_address(rendezvous) if isinstance(rendezvous, str) else rendezvous.getsockname()[:2]
        listener = None if isinstance(rendezvous, str) else rendezvous.detach()  # the store takes ownership
        gpu = self.device.type == "cuda"
        if host == "127.0.0.1":  # all ranks are on this host: no other host needs to see their ports
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # NVLink multicast takes hold of switches between GPUs that other programs of the host share.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        num_ranks = self.position.parallel.num_ranks
        try:
            store = _dist.TCPStore(
                host, port, num_ranks, listener is not None, _TIMEOUT, False, master_listen_fd=listener
            )
            _dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=store,
                rank=self.position.rank,
                world_size=num_ranks,
                timeout=_TIMEOUT,
                device_id=self.device if gpu else None,
            )
            self._shards = self._shard_group()
        except RuntimeError as exc:
            message = " ".join(str(exc).split())
            raise NodeError(
                f"{self.position} does not reach the other ranks at the rendezvous {join_address(host, port)} "
                f"({message}); start all ranks of the node, with the same --pp and --tp, where this address is "
                "reachable"
            ) from exc

    def _shard_group(self) -> Any:
        """Return this stage's group, None for one shard. Every rank helps to create the group of every stage."""
        parallel = self.position.parallel
        groups = []
        if parallel.tp == 1:
            return None
        if parallel.pp == 1:
            return _dist.group.WORLD
        for stage in range(parallel.pp):
            first = parallel.tp * stage
            groups.append(_dist.new_group(range(first, first + parallel.tp), timeout=_TIMEOUT))
        return groups[self.position.stage]


def _gather_bytes(mine: bytes, size: int, group: Any, device: torch.device) -> list[bytes]:
    """Return the bytes of each of the ``size`` members of a group, all of one length."""
    one = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)[None]
    all_ = one.new_empty(size, len(mine))
    _all_gather(all_, one, group)
    return [bytes(row) for row in all_.tolist()]


def _all_gather(parts: Tensor, mine: Tensor, group: Any) -> None:
    """Gather parts [shards * rows, size] from mine [rows, size]. torch 2.13 renamed the call and warns of the old."""
    gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
    gather(parts, mine, group=group)
