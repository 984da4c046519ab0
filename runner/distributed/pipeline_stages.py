"""Messages between pipeline stages: hidden states to the next stage, tokens from the last stage to the first.

    stage 0             stage 1            stage 2
    embedding, layers ─► layers ──────────► layers, head, sampler
        ▲                   hidden states            │
        └─────────────────── tokens ─────────────────┘

A shard exchanges messages with the same shard of other stages: the residual of each token after the layers of a stage,
[tokens, hidden_size], beside it the auxiliary hidden states so far if a head drafts from them, and the next token of
each sequence that samples, [rows] int32.

Between GPUs of one host, messages are copied into each other's memory (``peer_copies.py``). Elsewhere each channel has
a process group of its own, so messages never overtake each other. On GPUs they travel on streams of their own; events
order them behind the work that they need, and the host never waits.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.distributed import Work

from pdserve.config.node_config import NodeConfig
from pdserve.pausing import Pausing
from runner.distributed.parallel_state import ParallelState, PeerChannel
from runner.distributed.peer_copies import CopyChannel, CopyReceiver, CopySender

_ALIGNMENT = 128  # elements: kernels are compiled for aligned addresses, and again for others


class Beside(NamedTuple):
    """Values of a step's tokens that travel beside their hidden states, [tokens, …] each."""

    received: Tensor
    sent: Tensor


class TensorSender(Protocol):
    """Sends messages to one other rank."""

    def send(self, message: Tensor) -> None:
        """Send behind the work on the current stream; later work may change ``message``."""

    def close(self) -> None:
        """Free the memory. No message may be on its way."""


class TensorReceiver(Protocol):
    """Receives messages in the order of sending. The receiver knows the shape of each."""

    @property
    def capacity(self) -> int:
        """The number of messages that may be expected at once."""

    def expect(self, *shape: int) -> None:
        """Begin to receive the next message."""

    def take(self) -> AbstractContextManager[Tensor]:
        """Return the oldest expected message, which may be changed.

        On a GPU later work on the current stream finds it complete, on a CPU it is complete now. All work that reads it
        must have been launched when the context ends.
        """

    def close(self) -> None:
        """Free the memory. No message may be on its way."""


class GroupSender:
    """Sends through a process group, each message from one of a ring of buffers."""

    def __init__(self, channel: PeerChannel, buffers: Tensor) -> None:
        """``buffers`` are [number, elements of the longest message]."""
        self._channel = channel
        self._buffers = deque(buffers)
        self._sends: deque[Work] = deque()

    def send(self, message: Tensor) -> None:
        """Send without waiting; on a CPU, wait if all buffers are in use."""
        if len(self._sends) == len(self._buffers):
            self._sends.popleft().wait()
        buffer = self._buffers[0]
        self._buffers.rotate(-1)
        self._sends.append(self._channel.send(_view(buffer, message.shape).copy_(message)))

    def close(self) -> None:
        pass


class GroupReceiver:
    """Receives through a process group, each message into one of a ring of buffers."""

    def __init__(self, channel: PeerChannel, buffers: Tensor) -> None:
        """``buffers`` are [capacity, elements of the longest message]."""
        self._channel = channel
        self._expected: deque[tuple[int, Tensor, Work]] = deque()
        self._buffers = buffers
        self._next = 0
        self._stream: torch.cuda.Stream | None = None
        if buffers.is_cuda:
            self._stream = torch.cuda.Stream(buffers.device)
            self._read = [torch.cuda.Event() for _ in buffers]  # a buffer's last message was read

    @property
    def capacity(self) -> int:
        return len(self._buffers)

    def expect(self, *shape: int) -> None:
        assert len(self._expected) < len(self._buffers), "a message is expected and no buffer is free"
        at = self._next
        self._next = (self._next + 1) % len(self._buffers)
        message = _view(self._buffers[at], shape)
        if self._stream is None:
            transfer = self._channel.receive(message)
        else:
            self._stream.wait_event(self._read[at])
            with torch.cuda.stream(self._stream):
                transfer = self._channel.receive(message)
        self._expected.append((at, message, transfer))

    @contextmanager
    def take(self) -> Iterator[Tensor]:
        at, message, transfer = self._expected.popleft()
        transfer.wait()
        yield message
        if self._stream is not None:
            self._read[at].record()

    def close(self) -> None:
        pass


class PipelineStages:
    """A rank's senders and receivers; each is None if the rank has no such neighbour, all with a single stage."""

    def __init__(self, parallel: ParallelState, config: NodeConfig, dtype: torch.dtype, max_in_flight: int) -> None:
        """Open all channels. All ranks do this at the same time."""
        self.hidden_in: TensorReceiver | None = None
        self.hidden_out: TensorSender | None = None
        self.tokens_in: TensorReceiver | None = None
        self.tokens_out: TensorSender | None = None
        self._hidden_size = config.model.hidden_size
        head = config.model.draft_head
        most = 1 + (0 if head is None else len(head.layers))  # hidden states of a token in a message
        pp = config.parallel.pp
        tp = config.parallel.tp
        if pp == 1:
            return
        hidden = _aligned(config.max_batch_tokens * most * self._hidden_size)
        tokens = _aligned(config.max_num_seqs)
        for source in range(pp):
            target = (source + 1) % pp
            for shard in range(tp):
                channel = parallel.channel(source * tp + shard, target * tp + shard)
                if channel is None:
                    continue
                messages = (max_in_flight + 1, hidden, dtype) if target else (max_in_flight + 1, tokens, torch.int32)
                if channel.sends and target:
                    self.hidden_out = _sender(channel, *messages)
                elif channel.sends:
                    self.tokens_out = _sender(channel, *messages)
                elif target:
                    self.hidden_in = _receiver(channel, *messages)
                else:
                    self.tokens_in = _receiver(channel, *messages)

    def close(self) -> None:
        """Free the memory that other stages can write to. On GPUs no work may be running. Idempotent."""
        for end in (self.hidden_in, self.hidden_out, self.tokens_in, self.tokens_out):
            if end is not None:
                end.close()

    def compute(
        self,
        layers: Callable[[Tensor], Pausing[Tensor]],
        input_ids: Tensor,
        beside: Beside | None = None,
    ) -> Pausing[Tensor]:
        """Run ``layers`` on input_ids [tokens], on later stages on the hidden states of the stage before.

        Pause where ``layers`` does. The result is sent to the next stage and returned: [tokens, hidden_size], on the
        last stage of wanted tokens only. ``beside`` is received before ``layers`` runs, and sent after it.
        """
        tokens = len(input_ids)
        with ExitStack() as received:
            start = input_ids
            if self.hidden_in is not None:
                width = 0 if beside is None else beside.received.shape[1]
                self.hidden_in.expect(tokens, self._hidden_size + width)
                start = received.enter_context(self.hidden_in.take())
                if beside is not None and width:
                    beside.received.copy_(start[:, self._hidden_size :])
                    start = start[:, : self._hidden_size].contiguous()
            result = yield from layers(start)
            if self.hidden_out is not None:
                sends = beside is not None and beside.sent.shape[1]
                self.hidden_out.send(torch.cat((result, beside.sent), dim=1) if beside and sends else result)
        return result


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _sender(channel: PeerChannel, capacity: int, size: int, dtype: torch.dtype) -> TensorSender:
    buffers = torch.empty(capacity, size, dtype=dtype, device=channel.device)
    copies = CopyChannel.open(channel, capacity, size, dtype)
    return GroupSender(channel, buffers) if copies is None else CopySender(copies, buffers)


def _receiver(channel: PeerChannel, capacity: int, size: int, dtype: torch.dtype) -> TensorReceiver:
    copies = CopyChannel.open(channel, capacity, size, dtype)
    if copies is not None:
        return CopyReceiver(copies)
    return GroupReceiver(channel, torch.empty(capacity, size, dtype=dtype, device=channel.device))


def _view(buffer: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Return the beginning of a buffer in that shape."""
    return buffer[: math.prod(shape)].view(shape)
