"""An engine with the toy runner, driven step by step, and the events that its frontend receives."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time
from array import array
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain, count
from types import MappingProxyType
from typing import Any

from local_connector import LocalConnector
from toy import VOCAB, ErringSource, Slot, ToyRunner, num_tokens

from connector.backends.host_memory import build_host_memory
from connector.setup import ConnectorSetup
from engine.adapters.adapters import AdaptersFactory, no_adapters
from engine.channel import Channel
from engine.engine import Engine
from engine.executor.rank import Pending, Rank
from engine.executor.step_pipeline import StepPipeline
from engine.grammars.workers import GrammarWorkers
from engine.images.image_steps import ImagesFactory, no_images
from engine.kv_cache.block_pool import Use
from engine.kv_cache.cache_parts import CacheParts
from engine.kv_cache.connector_scheduler import ConnectorFactory, KVConnectorScheduler
from engine.peers.connected_peers import ConnectedPeers
from engine.scheduler.drafting import DraftingFactory, no_drafting
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from pdserve.ipc.frames import Frames, framed
from pdserve.ipc.messages import (
    EventBatch,
    FreeLease,
    FromEngine,
    LeaseCached,
    Leased,
    Mode,
    OutputTokens,
    Shutdown,
    Submit,
    ToEngine,
    WeightsAnswer,
)
from pdserve.kv.groups import KVCacheGroups, KVHeads
from pdserve.kv.host_copies import HostRoom
from pdserve.pausing import Pausing, complete, completed
from pdserve.protocols import DiskKV, HostMemory, KVConnector
from pdserve.records import FinishReason, KVConnectorOrders, ModelRunnerOutput, RankKV, StepPlan
from pdserve.sampling_params import SamplingParams

BLOCK = 4
BATCH_TOKENS = 16
_names = count()

#: (steps in flight, stages): a runner with one step per stage, and one with a step more.
DEPTHS = [(1, 1), (2, 1), (2, 2), (3, 2), (3, 3), (4, 3)]


class ModelledPipeline(StepPipeline):
    """Steps take as long as a cost model says."""

    def __init__(self, rank: Rank, seconds: Callable[[StepPlan], float]) -> None:
        super().__init__(rank)
        self._seconds = seconds

    @property
    def busy(self) -> float:
        return 0.0

    def take_oldest(self) -> tuple[StepPlan, ModelRunnerOutput]:
        result = super().take_oldest()
        self.step_seconds = self._seconds(result[0])
        return result


class ToyRank(Rank):
    """Counts the reads that are ordered, and checks where they write to."""

    num_reads = 0

    def start_transfers(self, orders: KVConnectorOrders) -> None:
        assert isinstance(self._runner, ToyRunner)
        for read in orders.reads:
            written = self._runner.writing.keys() & set(read.local_blocks)
            assert not written, "a read is ordered into blocks that a step writes"
        self.num_reads += len(orders.reads)
        super().start_transfers(orders)


class WholeLaunches(ToyRank):
    """Launches each step without a pause, as an Executor does."""

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[Pending]:
        return completed(complete(super().launch_with_pauses(plan)))

    def delays_results(self, plan: StepPlan) -> bool:
        return self.launches_by_layer(plan)


class Node:
    """``depth`` is the number of steps that may be in flight. ``step`` is one iteration of the step loop.

    ``seconds`` replaces the measured durations of steps.

    After every iteration and command, the counts of its blocks are checked.
    """

    def __init__(
        self,
        num_blocks: int,
        depth: int,
        stages: int = 1,
        *,
        max_num_seqs: int = 8,
        full_step: int = 12,
        tile: int = 1,
        max_drafts: int = 0,
        planned_drafts: bool = False,
        always_draft: bool = True,
        batch_tokens: int = BATCH_TOKENS,
        itl_target: float | None = 0.0,
        ttft_target: float = 0.0,
        seconds: Callable[[StepPlan], float] | None = None,
        kv_checksum: bool = False,
        layered: bool = False,
        rank: type[ToyRank] = ToyRank,
        runner: type[ToyRunner] = ToyRunner,
        images: ImagesFactory = no_images,
        adapters: AdaptersFactory = no_adapters,
        whole_images: bool = False,
        connector: KVConnector | None = None,
        grammars: Callable[[Callable[[], None]], GrammarWorkers] | None = None,
        state_slots: int = 0,
        windows: tuple[int | None, ...] = (None,),
        latent: bool = False,
        heads: tuple[KVHeads, ...] = (),
        host: HostRoom | None = None,
        host_memory: Callable[..., HostMemory] = build_host_memory,
        disk: Callable[..., DiskKV] | None = None,
    ) -> None:
        """``disk`` makes files beside host memory, from that and what wakes the step loop."""
        batch_tokens = max(batch_tokens, max_num_seqs * (1 + max_drafts))
        self._batch_tokens = batch_tokens
        self._socket, theirs = socket.socketpair()
        self._socket.setblocking(False)
        self._frames: Frames[FromEngine] = Frames(FromEngine)
        self._channel = Channel(theirs)
        self.scheduler = Scheduler(
            SchedulerConfig(
                num_blocks=num_blocks,
                block_size=BLOCK,
                num_state_slots=state_slots,
                groups=KVCacheGroups(windows, tuple(range(len(windows))), heads),
                max_num_seqs=max_num_seqs,
                max_batch_tokens=batch_tokens,
                full_step=full_step,
                tile=tile,
                max_drafts=max_drafts,
                whole_images=whole_images,
                max_waiting=100,
                stages=stages,
                itl_target=itl_target,
                ttft_target=ttft_target,
                vocab_size=VOCAB,
            ),
            connector=self._connector_factory(kv_checksum, host, state_slots, disk is not None),
            drafting=self._drafting_factory(max_drafts, planned_drafts, always_draft),
            images=images,
            adapters=adapters,
            grammars=grammars(self._channel.wake) if grammars is not None else None,
        )
        self.epoch = f"toy-{next(_names)}"
        self.runner = runner(num_blocks, BLOCK, depth, stages, layered, state_slots, windows, latent, heads)
        setup = ConnectorSetup(self.epoch, states=self.runner.rank_states)
        wake = self._channel.wake
        self.connector = connector or LocalConnector(setup)
        region = self.runner.kv_region
        layout = self.runner.kv_layout
        self.kv: RankKV = self.connector.register(region, layout, wake)
        self.host_memory = None if host is None else host_memory(host, region, layout, setup, wake)
        self.disk = None if disk is None else disk(self.host_memory, wake)
        self.rank = rank(self.runner, self.connector, host_memory=self.host_memory, disk=self.disk, on_events=wake)
        self.engine = Engine(self.scheduler, self.rank, self._channel)
        if seconds is not None:
            self.engine._pipeline = ModelledPipeline(self.rank, seconds)
        self.tokens: dict[tuple[int, int], list[int]] = defaultdict(list)
        self.ranks: dict[int, list[int]] = {}  # ranks of prompt tokens, by rid
        self.finished: dict[tuple[int, int], FinishReason] = {}
        self.leased: dict[
            int, tuple[int, ...]
        ] = {}  # blocks, by rid; unused with digests, which may arrive after the lease's end
        self._pulls: set[int] = set()  # rids
        self._leased_slots: dict[int, set[Slot]] = {}  # by rid: slots of leased blocks that must not change

    # Extras are imported for nodes that have them: without an extra's folder, tests of the core still run.

    @staticmethod
    def _drafting_factory(max_drafts: int, planned: bool, always: bool) -> DraftingFactory:
        if not max_drafts:
            return no_drafting
        from engine.speculation.draft_planner import DraftOptions, DraftPlanner

        return partial(DraftPlanner, DraftOptions(ErringSource if planned else None, always))

    @staticmethod
    def _connector_factory(checksum: bool, host: HostRoom | None, state_slots: int, disk: bool) -> ConnectorFactory:
        def make(parts: CacheParts) -> KVConnectorScheduler:
            peers = ConnectedPeers(parts, checksum=checksum)
            if host is None:
                return KVConnectorScheduler(parts, peers)
            from engine.tiers.disk_tier import DiskTier
            from engine.tiers.host_tier import HostTier

            slot_blocks = 2.0 if state_slots else 0.0
            tier = HostTier(parts, host, checksum=checksum, store_blocks=5, slot_blocks=slot_blocks)
            if disk:
                DiskTier(parts, tier, write_blocks=5, slot_blocks=slot_blocks)
            return KVConnectorScheduler(parts, peers, tier)

        return make

    @property
    def peers(self) -> ConnectedPeers:
        peers = self.scheduler.connector.peers
        assert isinstance(peers, ConnectedPeers)
        return peers

    def submit(
        self,
        rid: int,
        prompt: list[int],
        sampling: SamplingParams,
        mode: Mode,
        skip: int = 0,
        priority: int = 0,
        resume: Mapping[int, list[int]] = MappingProxyType({}),
        decode_ahead: int = 0,
        client: int = 0,
    ) -> None:
        outputs = {choice: array("I", output).tobytes() for choice, output in resume.items()}
        tokens = array("I", prompt).tobytes()
        self.obey(Submit(rid, tokens, sampling, mode, "", priority, skip, decode_ahead, outputs, client))

    def obey(self, message: ToEngine) -> None:
        if isinstance(message, FreeLease):
            self.leased.pop(message.rid, None)
            self._leased_slots.pop(message.rid, None)
        self.engine.handle([message])
        if isinstance(message, LeaseCached):
            self._pulled(message.rid)
        self._check()

    def step(self) -> EventBatch:
        self.engine.step()
        batches = self.received()
        lists: dict[str, Any] = {
            name: list(chain.from_iterable(getattr(part, name) for part in batches))
            for name in EventBatch.__struct_fields__
            if name not in ("status", "outputs", "status_changed")
        }
        batch = EventBatch(self.scheduler.status(), outputs=_joined([part.outputs for part in batches]), **lists)
        for scored in batch.scored:
            ranks = self.ranks.setdefault(scored.rid, [])
            assert scored.logprobs.first == 1 + len(ranks), "log-probabilities of a prompt do not follow each other"
            assert not self.tokens[scored.rid, 0], "log-probabilities of a prompt came after its first token"
            ranks += [rank for _, rank in struct.iter_unpack("<fI", scored.logprobs.table)]
        for rid, choice, token_id, finish, _ in batch.outputs.rows():
            assert (rid, choice) not in self.finished, "a token after the end"
            self.tokens[rid, choice].append(token_id)
            if finish:
                self.finished[rid, choice] = finish
        for ended in batch.decode_ahead_ended:
            assert (ended.rid, 0) not in self.finished, "a second end"
            self.finished[ended.rid, 0] = FinishReason.LENGTH
        for leased in batch.leased:
            if leased.rid in self._pulls:
                assert leased.last
                if leased.rid in self.peers._leases and leased.rid not in self.leased:  # a tier has fetched them first
                    self._add_leased(leased.rid, leased.block_ids)
                assert self.leased.get(leased.rid, leased.block_ids) == leased.block_ids
                continue
            unused = -leased.num_tokens % BLOCK  # at the end of the prompt: the sequence may continue there
            self._add_leased(leased.rid, leased.block_ids, unused)
        self._check()
        return batch

    def run(self, steps: int = 2000) -> None:
        for _ in range(steps):
            if self.engine.idle:
                return
            self.step()
        raise AssertionError("the engine does not come to rest")

    def close(self) -> None:
        self.rank.close()
        self._channel.close()
        self._socket.close()

    def assert_all_free(self) -> None:
        status = self.scheduler.status()
        assert (status.free, status.waiting, status.reading, status.running) == (status.total, 0, 0, 0)
        states = self.scheduler.states
        assert states.pool.count(Use.FREE) == states.pool.total

    def kv_of(self, parts: Sequence[Leased]) -> list[int]:
        """Return the tokens in the blocks of a lease, which have one KV cache group."""
        cache = self.runner.cache
        tokens = list[int]()
        for part in parts:
            for block in part.block_ids:
                tokens += cache[block, 0, 0, 0, :, 0].tolist()
            del tokens[len(tokens) - -part.num_tokens % BLOCK :]
        return tokens

    def _add_leased(self, rid: int, blocks: tuple[int, ...], unused: int = 0) -> None:
        """Note leased blocks; the last one of each group has ``unused`` slots at its end."""
        self.leased[rid] = self.leased.get(rid, ()) + blocks
        last = blocks[-self.scheduler.pool.groups.num_groups :]
        slots = {(block, offset) for block in blocks for offset in range(BLOCK)}
        slots -= {(block, offset) for block in last for offset in range(BLOCK - unused, BLOCK)}
        self._leased_slots.setdefault(rid, set()).update(slots)

    def _pulled(self, rid: int) -> None:
        """Note the blocks of a pull: they are leased before they are announced, unless a tier fetches some."""
        self._pulls.add(rid)
        if (lease := self.peers._leases.get(rid)) is not None:
            self._add_leased(rid, tuple(lease.blocks))

    def _check(self) -> None:
        status = self.scheduler.status()
        assert status.free + status.held + status.leased + status.quarantined == status.total
        leased = {block for blocks in self.leased.values() for block in blocks}
        if self.host_memory is None:
            assert status.leased == len(leased)
        else:  # stores lease blocks, too
            assert status.leased >= len(leased)
        assert all(num_tokens(plan) <= self._batch_tokens for plan in self.runner.launched[-1:])
        blocks = self.runner.writing.keys()
        assert self.scheduler.pool.count_free(blocks) == 0, "a block is free that a step in flight writes to"
        for rid, slots in self._leased_slots.items():
            assert not self.runner.slots_writing & slots, f"a step in flight writes to what is leased for {rid}"

    # ------------------------------------------------------------ the frontend's end of the socket

    def send(self, message: ToEngine) -> None:
        """Send a command to an engine that runs in a thread."""
        self._socket.sendall(framed(message))

    def received(self) -> list[EventBatch]:
        """Return the batches that the engine has sent since the last call."""
        batches: list[EventBatch] = []
        with contextlib.suppress(BlockingIOError):
            while chunk := self._socket.recv(1 << 20):
                for message in self._frames.cut(chunk):
                    if isinstance(message, WeightsAnswer):
                        assert not message.kind, message
                        continue
                    assert isinstance(message, EventBatch)
                    batches.append(message)
        return batches


def _joined(parts: Sequence[OutputTokens]) -> OutputTokens:
    """Return the output tokens of several batches as one."""
    rows = [row for part in parts for row in part.rows()]
    rids, choices, token_ids, finish, logprobs = map(list, zip(*rows, strict=True)) if rows else ([] for _ in range(5))
    return OutputTokens(
        rids,
        choices,
        token_ids,
        {index: reason for index, reason in enumerate(finish) if reason is not None},
        {index: token_logprobs for index, token_logprobs in enumerate(logprobs) if token_logprobs is not None},
    )


def wait_until(condition: Callable[[], bool]) -> None:
    while not condition():
        time.sleep(0.001)


@contextlib.contextmanager
def long_step(node: Node) -> Iterator[None]:
    """Run the step loop of a node on a thread, in a step with a prompt that does not end while the context is open.

    The node has measured steps, which take long by its ``seconds``.
    """
    node.runner.busy = True
    loop = threading.Thread(target=node.engine.run)
    loop.start()
    try:
        prompt = array("I", [2] * 10).tobytes()
        node.send(Submit(2, prompt, SamplingParams(max_tokens=1), Mode.LOCAL))
        wait_until(lambda: any(plan.num_prompt_tokens for plan in node.runner.launched[-1:]))
        num_steps = len(node.runner.launched)
        yield
        assert len(node.runner.launched) == num_steps, "no step is planned before the one in flight ends"
    finally:
        node.runner.busy = False
        node.send(Shutdown())
        loop.join()


Make = Callable[..., Node]  # (num_blocks, **options of Node)
