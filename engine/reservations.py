"""Requests on D that hold blocks for KV which is to come from P, until it is confirmed or given up."""

from __future__ import annotations

from collections.abc import Iterable

from engine.messages import ReadEnded, Reserved, StartRead
from engine.report import Report
from engine.requests import Sequence
from engine.transfers import Transfers
from pdserve.records import ReadResult


class Reservations:
    """By request id. A read belongs to its reservation; without one it is abandoned, and its blocks quarantined."""

    def __init__(self, transfers: Transfers, report: Report, block_size: int) -> None:
        self._transfers = transfers
        self._report = report
        self._block_size = block_size
        self._sequences: dict[int, Sequence] = {}

    def __len__(self) -> int:
        return len(self._sequences)

    def add(self, sequence: Sequence) -> None:
        """Its blocks are held; the front is told how many leading ones are cached already."""
        rid = sequence.request.rid
        self._sequences[rid] = sequence
        self._report.reserved.append(Reserved(rid, sequence.num_computed))

    def pop(self, rid: int) -> Sequence | None:
        """End a reservation. None where there is none (any more)."""
        return self._sequences.pop(rid, None)

    def start_read(self, message: StartRead) -> None:
        """Order the read of a request's next blocks. An unknown rid (cancelled meanwhile) is ignored."""
        sequence = self._sequences.get(message.rid)
        if sequence is None:
            return
        request, num_tokens = sequence.request, message.num_tokens
        start = max(request.announced, sequence.num_computed // self._block_size)
        end = -(-num_tokens // self._block_size)
        if num_tokens > sequence.prompt_len or (num_tokens % self._block_size and num_tokens != sequence.prompt_len):
            text = f"the peer named blocks up to token {num_tokens} of a prompt of {sequence.prompt_len}"
            self._report.reads.append(ReadEnded(request.rid, text))
        elif start + len(message.remote_blocks) != end:
            text = f"the peer named {len(message.remote_blocks)} blocks where {end - start} are missing"
            self._report.reads.append(ReadEnded(request.rid, text))
        else:
            request.announced = end
            local = tuple(sequence.blocks[start:end])
            request.reads.add(self._transfers.start_read(request.rid, message.epoch, local, message.remote_blocks))

    def reads_ended(self, results: Iterable[ReadResult]) -> None:
        """Tell the front of reads that somebody waits for; free the blocks of the others."""
        for result in results:
            rid = self._transfers.ended(result.read_id)
            if rid is None:
                self._report.status_changed = True
                continue
            self._sequences[rid].request.reads.discard(result.read_id)
            self._report.reads.append(
                ReadEnded(rid, result.error, result.num_bytes, result.num_descriptors, result.seconds)
            )
