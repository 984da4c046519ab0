"""A router's stream on D, and each of its requests from the submission to the engine to the last output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from decode_node.request_trace import RequestOutcome, RequestTrace
from node.engine_client import EngineClient
from node.request_events import Event, error_of
from node.stream_writer import StreamWriter
from pdserve.errors import DeadlineExceeded, PdserveError, RequestError
from pdserve.ipc.finish_reason import finish_reason
from pdserve.ipc.messages import (
    Cancel,
    Mode,
    Pause,
    Prefilled,
    ReadChecked,
    ReadEnded,
    Refused,
    Reserved,
    Resume,
    Scored,
    Submit,
)
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import TOKEN_BYTES, FinishReason, Sample, SamplingParams, TokenLogprobs
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.protobuf import logprobs_to_pb, prompt_logprobs_to_pb

_LOGPROBS_BYTES = 512 << 10  # of a prompt's log-probabilities in an output
_TOP_BYTES = 10  # of one of the most likely tokens in an output
_ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)


class RouterStream:
    """The requests of one router. All outputs of a step travel in one message."""

    def __init__(self) -> None:
        self.generations: dict[int, NodeGeneration] = {}
        self.largest = -1  # the router's largest number of a request so far
        self.writer = StreamWriter(pb.OutputBatch)
        self._resumed = pb.ResumedChoices()  # of a request that follows

    def is_idle(self) -> bool:
        return not self.generations and self.writer.empty

    def add_resumed(self, resumed: pb.ResumedChoices, max_tokens: int) -> None:
        """Keep choices of the next request. Raises RequestError for several requests or over ``max_tokens`` tokens."""
        kept = self._resumed
        if kept.choices and kept.request != resumed.request:
            raise RequestError(f"choices of request {resumed.request} came before request {kept.request} itself")
        kept.MergeFrom(resumed)
        if (size := kept.ByteSize()) > max_tokens * TOKEN_BYTES:
            raise RequestError(f"resumed choices take {size} bytes, the limit is {max_tokens} tokens; resume fewer")

    def take_resumed(self, request: int) -> Iterable[pb.ResumedChoice]:
        """Return the choices that came before the request."""
        kept, self._resumed = self._resumed, pb.ResumedChoices()
        return kept.choices if kept.request == request else ()

    def add(self, request: int, num_bytes: int = 0) -> pb.Output:
        """Append an output, to be filled in at once; ``num_bytes`` are those of its long fields."""
        output = self.writer.put(num_bytes).outputs.add()
        output.request = request
        return output

    def find(self, number: int) -> NodeGeneration | None:
        """Return a request, None if it has ended. Raises RequestError if it was never sent on this stream."""
        if number > self.largest:
            raise RequestError(f"request {number} was never sent on this stream; only its own stream can change it")
        return self.generations.get(number)

    def forget(self, generation: NodeGeneration) -> None:
        self.generations.pop(generation.number, None)
        self.writer.wake()


class HandoffEvents(Protocol):
    """Receives the engine's events of a request's handoff."""

    def on_reserved(self, cached_tokens: int) -> None: ...

    def on_event(self, event: ReadEnded | ReadChecked) -> None: ...

    def abandon(self) -> None:
        """The request has ended. Idempotent."""


class NodeGeneration:
    """Forwards tokens to the router as they come. It ends exactly once, and emits nothing afterwards."""

    def __init__(
        self,
        message: pb.Generate,
        sampling: SamplingParams,
        engine: EngineClient,
        stream: RouterStream,
        on_end: Callable[[NodeGeneration], None],
        trace: RequestTrace,
    ) -> None:
        self.message = message
        self.number = message.request  # the router's
        self.trace = trace
        self.handoff_tokens = _handoff_tokens(message)
        self.sampling = sampling
        self.resume = {choice.choice: choice.token_ids for choice in message.resume}
        self.error: PdserveError | None = None
        self.handoff: HandoffEvents | None = None  # set before ``submit(Mode.HANDOFF)``
        self.rid = engine.open(self)
        self._engine = engine
        self._stream = stream
        self._on_end = on_end
        self._has_output = False  # of the engine
        self._prefilled = Prefilled(self.rid, 0, 0.0)  # zeros unless the engine computes the prompt
        self._choices = set(self.resume or range(sampling.n))  # unfinished
        self._timeout = message.timeout_ms / 1000
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout, self._on_deadline) if self._timeout else None
        self._deadline = time.monotonic() + self._timeout

    @property
    def num_handoff_tokens(self) -> int:
        return len(self.handoff_tokens) // TOKEN_BYTES

    @property
    def prefill_sampling(self) -> SamplingParams:
        """Sampling parameters for P. A resumed request has its tokens, and drops the one that P must sample."""
        return _ONE_TOKEN if self.resume else self.sampling

    @property
    def ended(self) -> bool:
        return not self._choices

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return max(0.0, self._deadline - time.monotonic()) if self._timeout else None

    def submit(self, mode: Mode) -> None:
        if mode is Mode.HANDOFF:
            self.trace.on_reserve()
        request = self.message
        self._engine.send(
            Submit(
                *(self.rid, request.token_ids, self.sampling, mode, request.cache_salt, request.priority),
                resume=self.resume,
                client=request.client,
                paused=request.paused,
            )
        )

    def emit_peer_token(
        self, choice: int, sample: Sample, number: int, eos_token_ids: Sequence[int], cached_tokens: int = 0
    ) -> None:
        """Forward the ``number``-th token of a choice, which P has sampled; end the choice if it is the last."""
        reason = finish_reason(sample.token_id, number, self.sampling, eos_token_ids)
        self._emit(choice, sample.token_id, sample.logprobs, reason, cached_tokens, number == 1)

    def fail(self, error: PdserveError) -> None:
        """End the request with an error, here and in the engine. Idempotent."""
        if self.ended:
            return
        self.error = error
        failure = failure_to_pb(error)
        self._stream.add(self.number, failure.ByteSize()).failure.CopyFrom(failure)
        self.cancel()

    def cancel(self) -> None:
        """End the request without further output. Idempotent."""
        if not self.ended:
            self._choices.clear()
            self._engine.send(Cancel(self.rid))
            self._end(RequestOutcome.CANCELLED if self.error is None else RequestOutcome.FAILED)

    def set_paused(self, paused: bool) -> None:
        """Stop producing tokens, or continue. A paused handoff goes on until its KV is here."""
        self._engine.send(Pause(self.rid) if paused else Resume(self.rid))

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        cached_tokens = 0
        if not self._has_output:
            self._has_output = True
            self.trace.on_output(self._prefilled.queued)
            cached_tokens = self._prefilled.cached_tokens
        self._emit(choice, token_id, logprobs, finish, cached_tokens)

    def on_event(self, event: Event) -> None:
        match event:
            case Prefilled():
                self._prefilled = event
            case Scored(_, found):
                for part in found.parts(_LOGPROBS_BYTES):
                    output = self._stream.add(self.number, len(part.table))
                    output.prompt_logprobs.CopyFrom(prompt_logprobs_to_pb(part))
            case Reserved(_, cached_tokens) if self.handoff is not None:
                self.handoff.on_reserved(cached_tokens)
            case ReadEnded() | ReadChecked() if self.handoff is not None:
                self.handoff.on_event(event)
            case Refused():
                self.fail(error_of(event))

    def _emit(
        self,
        choice: int,
        token_id: int,
        logprobs: TokenLogprobs | None,
        finish: FinishReason | None,
        cached_tokens: int,
        handed_off: bool = False,
    ) -> None:
        if choice not in self._choices:
            return
        output = self._stream.add(self.number, 0 if logprobs is None else _TOP_BYTES * len(logprobs.top_ids))
        if choice:
            output.choice = choice
        output.token_id, output.has_token = token_id, True
        if logprobs is not None:
            output.logprobs.CopyFrom(logprobs_to_pb(logprobs))
        if cached_tokens:
            output.cached_tokens = cached_tokens
        if handed_off:
            output.handed_off = True
        if finish is not None:
            output.finish_reason = finish
            self._choices.remove(choice)
            if self.ended:
                self._end(RequestOutcome.DONE)

    def _on_deadline(self) -> None:
        waiting_for = self._engine.monitor.waiting_for
        reason = f" ({waiting_for})" if waiting_for else ""
        text = f"the request was not finished within its {self._timeout:.3g} s{reason}; allow more time"
        self.fail(DeadlineExceeded(text))

    def _end(self, outcome: RequestOutcome) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self.handoff is not None:
            self.handoff.abandon()
        self._engine.close(self.rid)
        self.trace.on_end(outcome, self.error)
        self._stream.forget(self)
        self._on_end(self)


def _handoff_tokens(message: pb.Generate) -> bytes:
    """Return the tokens whose KV comes from P: the prompt, or all but the last one of a single resumed choice.

    As ``Sequence.load_len`` in engine/request.py.
    """
    if len(message.resume) != 1:
        return message.token_ids
    return message.token_ids + message.resume[0].token_ids[:-TOKEN_BYTES]
