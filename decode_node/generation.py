"""A request on D, from its submission to the engine to the last output."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from decode_node.request_trace import RequestOutcome, RequestTrace
from node.context import NodeContext
from node.engine_client.request_events import Event, error_of
from node.image_uploads import NO_CLAIM
from node.load_spans import prefill_attributes
from node.reading.handoff_executor import HandoffEvent
from node.streams.stream_writer import StreamWriter
from pdserve.errors import DeadlineExceeded, PdserveError
from pdserve.images import Images, choices_compute_images, first_needed
from pdserve.ipc.finish_reason import finish_reason
from pdserve.ipc.messages import (
    Cancel,
    Drafted,
    Fetched,
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
from pdserve.logprobs import TokenLogprobs
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import TOKEN_BYTES, FinishReason, Sample
from pdserve.rpc.errors import failure_to_pb
from pdserve.rpc.protobuf import logprobs_to_pb, prompt_logprobs_to_pb, sampling_to_pb
from pdserve.sampling_params import SamplingParams
from pdserve.tracing.spans import Span

_LOGPROBS_BYTES = 512 << 10  # most bytes of a prompt's log-probabilities in one output
_TOP_BYTES = 10  # bytes of one of the most likely tokens in an output


class NodeGeneration:
    """Forwards tokens to the router as they come. It ends exactly once, and emits nothing afterwards."""

    def __init__(
        self,
        message: pb.Generate,
        *,
        token_ids: bytes,
        sampling: SamplingParams,
        resume: Mapping[int, bytes],
        images: Images,
        node: NodeContext,
        writer: StreamWriter[pb.OutputBatch],
        trace: RequestTrace,
        on_end: Callable[[NodeGeneration], None],
    ) -> None:
        """``token_ids``, ``sampling``, ``resume`` and ``images`` come from the message. Outputs go to ``writer``."""
        self.message = message
        self.number = message.request  # the router's
        self.trace = trace
        self.token_ids = token_ids
        self.handoff_tokens = _handoff_tokens(token_ids, resume, message.pull)
        self.sampling = sampling
        self.resume = dict(resume)
        self.waits_since = time.monotonic()  # when the wait for the token after P's tokens began
        self.error: PdserveError | None = None
        self.images = images
        self.rid = node.engine.open(self)
        self._engine = node.engine
        self._uploads = node.images
        self._awaited = images if _computes(message) else ()  # images whose pixels the router sends here
        block_size = node.config.kv_layout.block_size
        num_tokens = len(token_ids) // TOKEN_BYTES
        self._keeps_pixels = choices_compute_images(images, sampling.n, num_tokens, block_size)  # until the end
        self._pixels = NO_CLAIM
        self._writer = writer
        self._on_end = on_end
        self._on_handoff_event: Callable[[HandoffEvent], None] = _ignore
        self._abandon_handoff: Callable[[], None] = _ignore
        self._has_output = False  # the engine has produced a token
        self._accepted_drafts = 0  # since the last output
        self._rejected_drafts = 0
        self._prefilled = Prefilled(self.rid, 0, 0.0)  # zeros unless the engine computes the prompt
        self._choices = set(self.resume or range(sampling.n))  # unfinished choices
        self._paused = message.paused
        self._timeout = message.timeout_ms / 1000
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(self._timeout, self._on_deadline) if self._timeout else None
        now = time.monotonic()
        self._deadline = now + self._timeout
        self._arrived = now - message.age_ms / 1000  # at the router

    @property
    def num_handoff_tokens(self) -> int:
        return len(self.handoff_tokens) // TOKEN_BYTES

    @property
    def prefill_sampling(self) -> SamplingParams:
        """Sampling parameters for P. A resumed request already has its tokens, and drops P's samples."""
        return self.sampling.for_kv(max(1, len(self.resume))) if self.resume or self.message.pull else self.sampling

    @property
    def ended(self) -> bool:
        return not self._choices

    @property
    def remaining(self) -> float | None:
        """Seconds until the deadline; None without one."""
        return max(0.0, self._deadline - time.monotonic()) if self._timeout else None

    @property
    def age(self) -> float:
        """Seconds since the router got the request."""
        return time.monotonic() - self._arrived

    def lacks_pixels(self, cached_tokens: int) -> bool:
        """Return whether an image behind the first ``cached_tokens`` tokens needs pixels, which are on another node."""
        return not self._awaited and first_needed(self.images, cached_tokens) is not None

    def submit_local(self) -> None:
        """Have the engine compute the prompt."""
        self._submit(Mode.LOCAL)

    def submit_handoff(self, on_event: Callable[[HandoffEvent], None], abandon: Callable[[], None]) -> None:
        """Have the engine reserve blocks for KV from P.

        ``on_event`` receives the engine's events of the handoff. ``abandon`` is called when the request ends.
        """
        self.trace.on_reserve()
        self._on_handoff_event = on_event
        self._abandon_handoff = abandon
        self._submit(Mode.HANDOFF)

    def prefill_request(self, span: Span) -> pb.PrefillRequest:
        """Return the message to P, but for what depends on the KV that this node has and on the connection to P."""
        request = self.message
        remaining = self.remaining
        return pb.PrefillRequest(
            request_id=request.request_id,
            token_ids=self.handoff_tokens,
            sampling=sampling_to_pb(self.prefill_sampling),
            cache_salt=request.cache_salt,
            priority=request.priority,
            timeout_ms=0 if remaining is None else max(1, int(remaining * 1000)),
            age_ms=int(self.age * 1000),
            traceparent=span.traceparent,
            tracestate=span.tracestate,
            client=request.client,
            urgent=bool(self.resume),
            prefix_node=request.prefix_node,
            prefix_tokens=request.prefix_tokens,
            images=request.images,
        )

    def emit_peer_token(
        self, choice: int, sample: Sample, number: int, *, eos_token_ids: Sequence[int], cached_tokens: int = 0
    ) -> None:
        """Forward the ``number``-th token of a choice, which P has sampled; end the choice if it is the last."""
        self.waits_since = time.monotonic()
        reason = finish_reason(sample.token_id, number, self.sampling, eos_token_ids)
        self._emit(
            choice,
            sample.token_id,
            sample.logprobs,
            finish=reason,
            cached_tokens=cached_tokens,
            handed_off=number == 1,
        )

    def fail(self, error: PdserveError) -> None:
        """End the request with an error, here and in the engine. Idempotent."""
        if self.ended:
            return
        self.error = error
        failure = failure_to_pb(error)
        self._output(failure.ByteSize()).failure.CopyFrom(failure)
        self.cancel()

    def cancel(self) -> None:
        """End the request without further output. Idempotent."""
        if not self.ended:
            self._choices.clear()
            self._engine.send(Cancel(self.rid))
            self._end(RequestOutcome.CANCELLED if self.error is None else RequestOutcome.FAILED)

    def set_paused(self, paused: bool) -> None:
        """Stop producing tokens, or continue. A paused handoff goes on until its KV is here."""
        self._paused = paused  # the engine may not know the request yet
        self._engine.send(Pause(self.rid) if paused else Resume(self.rid))

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        cached_tokens = 0
        if not self._has_output:
            self._has_output = True
            if not self._keeps_pixels:
                self._pixels.release()
            cached_tokens = self._prefilled.cached_tokens
            computed = prefill_attributes(self._engine.status.costs, self.num_handoff_tokens - cached_tokens)
            self.trace.on_output(self._prefilled.queued, computed)
        self._emit(choice, token_id, logprobs, finish=finish, cached_tokens=cached_tokens)

    def on_event(self, event: Event) -> None:
        match event:
            case Fetched():
                self.trace.on_fetched(event)
            case Prefilled():
                self._prefilled = event
            case Drafted(_, accepted, rejected):
                self._accepted_drafts += accepted
                self._rejected_drafts += rejected
            case Scored(_, scores):
                for part in scores.parts(_LOGPROBS_BYTES):
                    self._output(len(part.table)).prompt_logprobs.CopyFrom(prompt_logprobs_to_pb(part))
            case Reserved() | ReadEnded() | ReadChecked():
                self._on_handoff_event(event)
            case Refused():
                self.fail(error_of(event))

    def _submit(self, mode: Mode) -> None:
        """Send the request to the engine, once the pixels are there that come to this node.

        If the engine has to compute another image, it refuses the request.
        """
        self._pixels = self._uploads.when_ready(self._awaited, partial(self._send_to_engine, mode), self.fail)

    def _send_to_engine(self, mode: Mode) -> None:
        request = self.message
        if self._awaited:
            self.trace.on_pixels(len(self._awaited))
        submit = Submit(
            rid=self.rid,
            token_ids=self.token_ids,
            sampling=self.sampling,
            mode=mode,
            cache_salt=request.cache_salt,
            priority=request.priority,
            resume=self.resume,
            client=request.client,
            paused=self._paused,
            age=self.age,
            images=self.images,
        )
        self._engine.send(submit)

    def _output(self, num_bytes: int = 0) -> pb.Output:
        """Append an output, to be filled in at once; ``num_bytes``: size of its long fields."""
        output = self._writer.put(num_bytes).outputs.add()
        output.request = self.number
        return output

    def _emit(
        self,
        choice: int,
        token_id: int,
        logprobs: TokenLogprobs | None,
        *,
        finish: FinishReason | None,
        cached_tokens: int,
        handed_off: bool = False,
    ) -> None:
        if choice not in self._choices:
            return
        output = self._output(0 if logprobs is None else _TOP_BYTES * len(logprobs.top_ids))
        if choice:
            output.choice = choice
        output.token_id = token_id
        output.has_token = True
        if logprobs is not None:
            output.logprobs.CopyFrom(logprobs_to_pb(logprobs))
        if cached_tokens:
            output.cached_tokens = cached_tokens
        if handed_off:
            output.handed_off = True
        if self._accepted_drafts or self._rejected_drafts:
            output.accepted_drafts = self._accepted_drafts
            output.rejected_drafts = self._rejected_drafts
            self._accepted_drafts = 0
            self._rejected_drafts = 0
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
        self._abandon_handoff()
        self._pixels.release()
        self._engine.close(self.rid)
        self.trace.on_end(outcome, self.error)
        self._on_end(self)


def _handoff_tokens(token_ids: bytes, resume: Mapping[int, bytes], pull: bool) -> bytes:
    """Return the tokens whose KV comes from P: the prompt, or all but the last one of a single resumed choice.

    Matches ``Sequence.load_len`` in engine/request.py. In a pull of a new prompt, D samples the first token, so it
    computes the last one of the prompt.
    """
    if len(resume) != 1:
        return token_ids[:-TOKEN_BYTES] if pull and not resume else token_ids
    (output,) = resume.values()
    return token_ids + output[:-TOKEN_BYTES]


def _computes(message: pb.Generate) -> bool:
    """Return whether this node computes the prompt, or the rest of it behind a pulled prefix.

    A moved stream pulls all that there is. A prompt that goes to P may be computed here after all, without pixels.
    """
    return not message.prefill_node or (message.pull and message.prefix_tokens > 0)


def _ignore(*_: object) -> None:
    """Replaces the callbacks of a handoff while there is none."""
