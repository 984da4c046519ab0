"""Pipeline stages among themselves: hidden states go from each to the next, tokens from the last back to the first.

    stage 0             stage 1            stage 2
    embedding, layers ─► layers ──────────► layers, head, sampler
        ▲                   hidden states            │
        └─────────────────── tokens ─────────────────┘

A shard talks to the same shard of the other stages. What is handed on is the residual of each token after the layers of
a stage, [tokens, hidden_size], and of each sequence that samples the token with which it goes on, [rows] int32.

Between GPUs of one host messages are copied into each other's memory (``peer_copies.py``). Elsewhere each lane has a
process group of its own, so that messages never overtake each other. On GPUs they travel beside the computing, on
streams of their own; events order them behind what they need, and the host waits for nothing.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Protocol

import torch
from torch import Tensor

from pdserve.config.node_config import NodeConfig
from pdserve.config.parallel import NO_LATE_MLPS, LateMLPs
from runner.distributed.parallel_state import Lane, ParallelState, TensorTransfer
from runner.distributed.peer_copies import CopyInlet, CopyLane, CopyOutlet

_STEP_OF_PROMPTS = 1024  # tokens
_ALIGNMENT = 128  # elements: kernels are compiled for addresses that are aligned, and would be anew for others


class Outlet(Protocol):
    """Where messages leave."""

    def send(self, message: Tensor) -> None:
        """Behind what is on the current stream; ``message`` may be changed by what comes after that."""

    def close(self) -> None:
        """Nothing may be on its way."""


class Inlet(Protocol):
    """Where messages arrive, in the order in which they were sent; the receiver knows how large each is."""

    @property
    def capacity(self) -> int:
        """Messages that may be expected at once."""

    def expect(self, *shape: int) -> None:
        """Begin to receive the next message."""

    def take(self) -> AbstractContextManager[Tensor]:
        """The oldest message that is expected. On a GPU it is there for later work on the current stream, on a CPU now.

        It may be changed. When the context ends all work that reads it must have been ordered.
        """

    def close(self) -> None:
        """Nothing may be on its way."""


class GroupOutlet:
    """By a process group: each message is copied to one of a few buffers, and sent from there."""

    def __init__(self, lane: Lane, buffers: Tensor) -> None:
        """``buffers`` are [number, elements of the longest message]."""
        self._lane = lane
        self._buffers = deque(buffers)
        self._sends: deque[TensorTransfer] = deque()

    def send(self, message: Tensor) -> None:
        """Without waiting, on a CPU unless all buffers are on their way."""
        if len(self._sends) == len(self._buffers):
            self._sends.popleft().wait()
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        self._sends.append(self._lane.send(_shaped(buffer, message.shape).copy_(message)))

    def close(self) -> None:
        pass


class GroupInlet:
    """By a process group."""

    def __init__(self, lane: Lane, buffers: Tensor) -> None:
        """``buffers`` are [number, elements of the longest message]: so many messages may be awaited."""
        self._lane = lane
        self._expected: deque[tuple[int, Tensor, TensorTransfer]] = deque()
        self._buffers = buffers
        self._next = 0
        self._stream: torch.cuda.Stream | None = None
        if buffers.is_cuda:
            self._stream = torch.cuda.Stream(buffers.device)
            self._used = [torch.cuda.Event() for _ in buffers]  # a buffer's last message has been

    @property
    def capacity(self) -> int:
        return len(self._buffers)

    def expect(self, *shape: int) -> None:
        assert len(self._expected) < len(self._buffers), "a message is expected and no buffer is free"
        at, self._next = self._next, (self._next + 1) % len(self._buffers)
        message = _shaped(self._buffers[at], shape)
        if self._stream is None:
            transfer = self._lane.receive(message)
        else:
            self._stream.wait_event(self._used[at])
            with torch.cuda.stream(self._stream):
                transfer = self._lane.receive(message)
        self._expected.append((at, message, transfer))

    @contextmanager
    def take(self) -> Iterator[Tensor]:
        at, message, transfer = self._expected.popleft()
        transfer.wait()
        yield message
        if self._stream is not None:
            self._used[at].record()

    def close(self) -> None:
        pass


class PipelineStages:
    """A rank's lanes to and from the stages beside it; None where there is nobody, as with a single stage."""

    def __init__(self, world: ParallelState, config: NodeConfig, dtype: torch.dtype, max_in_flight: int) -> None:
        """All ranks do this at the same time."""
        self.hidden_in: Inlet | None = None
        self.hidden_out: Outlet | None = None
        self.tokens_in: Inlet | None = None
        self.tokens_out: Outlet | None = None
        self._hidden_size = config.model.hidden_size
        self._place = config.place
        self._fewest_late = fewest_late_tokens(config)
        pp, tp = config.split.pp, config.split.tp
        if pp == 1:
            return
        hidden, tokens = _aligned(config.max_batch_tokens * self._hidden_size), _aligned(config.max_num_seqs)
        for source in range(pp):
            target = (source + 1) % pp
            for shard in range(tp):
                lane = world.lane(source * tp + shard, target * tp + shard)
                if lane is None:
                    continue
                what = (hidden, dtype) if target else (tokens, torch.int32)
                if lane.outward and target:
                    self.hidden_out = _outlet(lane, max_in_flight + 1, *what)
                elif lane.outward:
                    self.tokens_out = _outlet(lane, max_in_flight + 1, *what)
                elif target:
                    self.hidden_in = _inlet(lane, max_in_flight + 1, *what)
                else:
                    self.tokens_in = _inlet(lane, max_in_flight + 1, *what)

    def close(self) -> None:
        """Give memory back that other stages can write to. On GPUs nothing may be running. Idempotent."""
        for end in (self.hidden_in, self.hidden_out, self.tokens_in, self.tokens_out):
            if end is not None:
                end.close()

    def late_mlps(self, step: int, num_tokens: int) -> LateMLPs:
        """What this rank does of the MLPs at its boundaries; all ranks know the step alike."""
        return self._place.late_mlps(step) if num_tokens >= self._fewest_late else NO_LATE_MLPS

    def compute(self, layers: Callable[[Tensor], Tensor], input_ids: Tensor) -> Tensor:
        """What ``layers`` makes of input_ids [tokens], but for the first stage of what the stage before made of them.

        It is handed on and returned: [tokens, hidden_size], on the last stage only of tokens that are wanted.
        """
        with ExitStack() as received:
            start = input_ids
            if self.hidden_in is not None:
                self.hidden_in.expect(len(input_ids), self._hidden_size)
                start = received.enter_context(self.hidden_in.take())
            result = layers(start)
            if self.hidden_out is not None:
                self.hidden_out.send(result)
        return result


def fewest_late_tokens(config: NodeConfig) -> int:
    """Of steps in which MLPs may be late: more than are ever captured into a graph, which is the same in every step."""
    return max(_STEP_OF_PROMPTS, config.max_num_seqs + 1) if config.cuda_graphs else 2


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _outlet(lane: Lane, capacity: int, size: int, dtype: torch.dtype) -> Outlet:
    buffers = torch.empty(capacity, size, dtype=dtype, device=lane.device)
    copies = CopyLane.open(lane, capacity, size, dtype)
    return GroupOutlet(lane, buffers) if copies is None else CopyOutlet(copies, buffers)


def _inlet(lane: Lane, capacity: int, size: int, dtype: torch.dtype) -> Inlet:
    copies = CopyLane.open(lane, capacity, size, dtype)
    if copies is not None:
        return CopyInlet(copies)
    return GroupInlet(lane, torch.empty(capacity, size, dtype=dtype, device=lane.device))


def _shaped(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The beginning of a buffer."""
    return buffer[: math.prod(shape)].view(shape)
