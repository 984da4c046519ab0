"""Requests on D that hold blocks for KV which is to come from P, until it is confirmed or given up."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial

import msgspec

from engine.ipc.event_batch import EventBatch
from engine.ipc.messages import ReadEnded, Reserved, StartRead
from engine.kv_cache.block_digests import BlockDigests
from engine.kv_cache.kv_transfers import KVTransfers
from engine.request import Sequence
from engine.throughput_meter import ThroughputMeter
from pdserve.records import ReadResult


class KVReceives:
    """By request id. A read belongs to its reservation; without one it is abandoned, and its blocks quarantined.

    With ``digests``, a read has ended for the front only when its blocks have been found to be what P has announced.
    """

    def __init__(
        self,
        transfers: KVTransfers,
        report: EventBatch,
        meter: ThroughputMeter,
        digests: BlockDigests | None,
        block_size: int,
    ) -> None:
        self._transfers = transfers
        self._report = report
        self._meter = meter
        self._digests = digests
        self._block_size = block_size
        self._sequences: dict[int, Sequence] = {}
        self._started: list[Sequence] = []
        self._to_check: dict[int, StartRead] = {}  # by read

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
        request = sequence.request
        start = max(request.announced, sequence.num_computed // self._block_size)
        end = -(-message.num_tokens // self._block_size)
        problem = self._problem(message, sequence.prompt_len, end - start)
        if problem:
            self._report.reads.append(ReadEnded(request.rid, problem, epoch=message.epoch))
            return
        request.announced = end
        local = tuple(sequence.blocks[start:end])
        read = self._transfers.start_read(request.rid, message.epoch, local, message.remote_blocks)
        request.reads.add(read)
        self._started.append(sequence)
        if self._digests is not None:
            self._to_check[read] = message

    def take_started(self) -> list[Sequence]:
        """Whose reads were ordered since the last call."""
        started, self._started = self._started, []
        return started

    def reads_ended(self, results: Iterable[ReadResult]) -> None:
        """Tell the front of reads, but check first what somebody waits for; free the blocks of the others."""
        for result in results:
            reading = self._transfers.ended(result.read_id)
            rid, error, sizes = reading.rid, result.error, (result.num_bytes, result.num_descriptors)
            ended = ReadEnded(rid, error, *sizes, result.seconds, epoch=reading.epoch)
            if not error:
                self._meter.add_read(len(reading.blocks) * self._block_size, result.seconds)
            asked = self._to_check.pop(result.read_id, None)
            if not reading.abandoned:
                self._sequences[rid].request.reads.discard(result.read_id)
            if asked is None or reading.abandoned or error:
                self._report.reads.append(ended)
            else:
                self._check(asked, ended)

    def _problem(self, message: StartRead, prompt_len: int, num_missing: int) -> str:
        """What a peer got wrong when it announced blocks; "" if nothing."""
        num_tokens, num_blocks = message.num_tokens, len(message.remote_blocks)
        if num_tokens > prompt_len or (num_tokens % self._block_size and num_tokens != prompt_len):
            return f"the peer named blocks up to token {num_tokens} of a prompt of {prompt_len}"
        if not num_blocks or num_blocks != num_missing:
            return f"the peer named {num_blocks} blocks where {num_missing} are missing"
        if self._digests is not None and len(message.digests) != num_blocks:
            return f"the peer named {num_blocks} blocks with {len(message.digests)} digests"
        return ""

    def _check(self, asked: StartRead, ended: ReadEnded) -> None:
        assert self._digests is not None
        end = -(-asked.num_tokens // self._block_size)
        local = self._sequences[asked.rid].blocks[end - len(asked.remote_blocks) : end]
        self._digests.order(local, asked.num_tokens, partial(self._compare, asked, ended))

    def _compare(self, asked: StartRead, ended: ReadEnded, found: tuple[int, ...]) -> None:
        """Digests of the blocks as read are there. Where the request has gone, they may be of anything."""
        corrupt = [index for index, digest in enumerate(found) if digest != asked.digests[index]]
        if corrupt and asked.rid in self._sequences:
            index = corrupt[0]
            block = -(-asked.num_tokens // self._block_size) - len(found) + index
            text = (
                f"checksum of {len(corrupt)} of {len(found)} blocks differs: block {block} of the prompt, "
                f"{asked.remote_blocks[index]} at the peer, was announced with {asked.digests[index] % 2**64:#018x} "
                f"and arrived with {found[index] % 2**64:#018x}"
            )
            ended = msgspec.structs.replace(ended, error=text, num_corrupt=len(corrupt))
        self._report.reads.append(ended)
