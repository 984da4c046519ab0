"""The ranks of a node among themselves: torch.distributed, by NCCL between GPUs and by gloo between CPUs.

Every rank runs the same calls in the same order: what one of them leaves out, the others wait for. Only tensors are
sent, never objects, so that nothing is unpickled.
"""

from __future__ import annotations

import logging
import os
import socket
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from pdserve.config.node_config import DeviceInfo
from pdserve.config.parallel import RankPosition
from pdserve.errors import NodeError
from pdserve.rpc.address import join_address, split_address
from runner.distributed.peer_memory import PeerMemory, map_memory

if TYPE_CHECKING:
    from runner.kernels.all_reduce import SumAndNorm

_log = logging.getLogger(__name__)
_dist: Any = torch.distributed  # torch itself imports it; its types leave out some of what it documents

#: How long ranks wait for each other. A rank that has died is noticed elsewhere, and one that is stopped may go on;
#: this is the end of those that wait for it in vain, and must be longer than any rank takes to read its weights.
_PATIENCE = timedelta(minutes=30)

#: Multiprocessors that a message between stages takes up: who waits for one must leave them all but a few to the step
#: before, and the message is sent while the next step is computed.
_LANE_PROCESSORS = 4


class TensorTransfer(Protocol):
    """A message on its way."""

    def wait(self) -> Any:
        """Let the current stream wait until it is there, on a CPU the host."""


class Lane:
    """One end of a connection between two ranks, for messages in one direction, which keep their order."""

    def __init__(self, group: Any, other: int, outward: bool, device: torch.device) -> None:
        self._group, self._other = group, other
        self.device = device
        self.outward = outward  # whether messages leave here

    def send(self, message: Tensor) -> TensorTransfer:
        """``message`` is contiguous, complete on the current stream, and stays as it is until it has been sent."""
        assert self.outward
        transfer: TensorTransfer = _dist.isend(message, self._other, group=self._group)
        return transfer

    def receive(self, message: Tensor) -> TensorTransfer:
        """Into ``message``, which nothing needs any more that is not done on the current stream."""
        assert not self.outward
        transfer: TensorTransfer = _dist.irecv(message, self._other, group=self._group)
        return transfer

    def swap(self, mine: bytes) -> bytes:
        """What the other end gives, for as many bytes from here."""
        here: int = _dist.get_rank(self._group)
        return _gather_bytes(mine, 2, self._group, self.device)[1 - here]


class ParallelState:
    """One rank's way to the others. A node of one rank has nobody to talk to: everything is returned as it came.

    Stages talk through the default process group, in which each rank has its number of ``pdserve.config.parallel``.
    """

    def __init__(self, place: RankPosition, device: DeviceInfo, meeting: str | socket.socket) -> None:
        """Wait until all ranks are there. They find each other at ``meeting``: for rank 0 the socket that listens
        there, for others its "host:port", "" for one rank. Raises NodeError where they do not.
        """
        self.place = place
        self.device = torch.device(device.kind if device.kind == "cpu" else f"{device.kind}:{device.index}")
        self.kernel: SumAndNorm | None = None  # for few rows, where there is one
        self._shards: Any = None  # process group of this stage's tensor shards
        self._mailboxes: PeerMemory | None = None
        self._meets = place.split.num_ranks > 1
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        if self._meets:
            self._meet(meeting)

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of x [tokens, hidden_size] over the shards of this stage.

        x is contiguous, and may be overwritten and returned. The call can be captured into a CUDA graph.
        """
        if self._shards is not None:
            _dist.all_reduce(x, group=self._shards)
        return x

    def use_kernel(self, size: int) -> None:
        """From now on, sum few rows of ``size`` values by our kernel, where GPUs can write to each other's memory.

        All shards must call it. Triton is imported only where it is used.
        """
        if self._shards is None or self.device.type != "cuda":
            return
        from runner.kernels.all_reduce import SumAndNorm, mailbox_bytes, most_rows

        tp, shard = self.place.split.tp, self.place.shard
        rows = most_rows(tp, size)
        self._mailboxes = map_memory(
            mailbox_bytes(tp, rows, size), shard, lambda mine: _gather_bytes(mine, tp, self._shards, self.device)
        )
        if self._mailboxes is None:
            _log.warning("%s sums by NCCL alone: the GPUs of its stage do not reach each other's memory", self.place)
        else:
            self.kernel = SumAndNorm(self._mailboxes.addresses, shard, rows, size, self.device)

    def gather_vocabulary(self, logits: Tensor, vocab_size: int, out: Tensor | None = None) -> Tensor:
        """Logits [rows, vocab_size] of all tokens from those of each shard, [rows, as many tokens on every shard].

        What exceeds ``vocab_size`` is dropped. Written to ``out`` if given. The call can be captured into a CUDA graph.
        """
        if self._shards is None:
            return logits if out is None else out.copy_(logits)
        (rows, each), tp = logits.shape, self.place.split.tp
        if rows == 1 and out is not None and out.is_contiguous() and tp * each == vocab_size:
            _all_gather(out.view(tp, each), logits, self._shards)
            return out
        parts = logits.new_empty(tp * rows, each)
        _all_gather(parts, logits, self._shards)
        if rows == 1 and out is None:
            return parts.view(1, -1)[:, :vocab_size]
        runs = [part[:, : max(0, vocab_size - shard * each)] for shard, part in enumerate(parts.view(tp, rows, each))]
        return torch.cat(runs, dim=1) if out is None else torch.cat(runs, dim=1, out=out)

    def smallest(self, number: int) -> int:
        """The least of what the ranks of all stages say."""
        if not self._meets:
            return number
        numbers = torch.tensor([number], dtype=torch.int64, device=self.device)
        _dist.all_reduce(numbers, op=_dist.ReduceOp.MIN)
        return int(numbers.item())

    def lane(self, source: int, target: int) -> Lane | None:
        """A new lane between two ranks, or None on the others. All ranks make all lanes, in the same order."""
        options = None
        if self.device.type == "cuda":
            options = _dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
            options.config.max_ctas = _LANE_PROCESSORS
            options._timeout = _PATIENCE
        group = _dist.new_group((source, target), timeout=_PATIENCE, pg_options=options)
        rank = self.place.rank
        if rank not in (source, target):
            return None
        return Lane(group, target if rank == source else source, outward=rank == source, device=self.device)

    def close(self) -> None:
        """Part from the others. Captured graphs with calls in them must be gone. Idempotent."""
        if self._meets:
            self._meets, self._shards, self.kernel = False, None, None
            if self._mailboxes is not None:
                self._mailboxes.close()
            _dist.destroy_process_group()

    def _meet(self, meeting: str | socket.socket) -> None:
        host, port = split_address(meeting) if isinstance(meeting, str) else meeting.getsockname()[:2]
        listening = None if isinstance(meeting, str) else meeting.detach()  # the store takes it over
        gpu = self.device.type == "cuda"
        if host == "127.0.0.1":  # all ranks are on this host: nobody else needs to see their ports
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        # Multicast takes hold of switches between GPUs that other programs of the host share.
        os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
        num_ranks = self.place.split.num_ranks
        try:
            store = _dist.TCPStore(
                host, port, num_ranks, listening is not None, _PATIENCE, False, master_listen_fd=listening
            )
            _dist.init_process_group(
                "nccl" if gpu else "gloo",
                store=store,
                rank=self.place.rank,
                world_size=num_ranks,
                timeout=_PATIENCE,
                device_id=self.device if gpu else None,
            )
            self._shards = self._group_of_shards()
        except RuntimeError as exc:
            message = " ".join(str(exc).split())
            raise NodeError(
                f"{self.place} does not reach the other ranks, which meet at {join_address(host, port)} ({message}); "
                "start all ranks of the node, with the same --pp and --tp, where this address can be reached"
            ) from exc

    def _group_of_shards(self) -> Any:
        """None where a stage has one shard. Every rank takes part in making the group of every stage."""
        split, groups = self.place.split, []
        if split.tp == 1:
            return None
        if split.pp == 1:
            return _dist.group.WORLD
        for stage in range(split.pp):
            first = split.tp * stage
            groups.append(_dist.new_group(range(first, first + split.tp), timeout=_PATIENCE))
        return groups[self.place.stage]


def _gather_bytes(mine: bytes, size: int, group: Any, device: torch.device) -> list[bytes]:
    """What each of the ``size`` members of a group gave, all of one length."""
    one = torch.frombuffer(bytearray(mine), dtype=torch.uint8).to(device)[None]
    all_ = one.new_empty(size, len(mine))
    _all_gather(all_, one, group)
    return [bytes(row) for row in all_.tolist()]


def _all_gather(parts: Tensor, mine: Tensor, group: Any) -> None:
    """parts [shards * rows, size] from mine [rows, size]. torch 2.13 renamed the call, and warns of the old name."""
    gather = getattr(_dist, "all_gather_single", None) or _dist.all_gather_into_tensor
    gather(parts, mine, group=group)
