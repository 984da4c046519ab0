"""A request under way: its calls to decode nodes, its choices, and its one end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import monotonic
from typing import Protocol

import msgspec

from pdserve.errors import NodeError, PdserveError
from pdserve.logs import request_fields
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens, prompt_logprobs_from_pb, sampling_to_pb, unpack_tokens
from pdserve.tracing.spans import NO_SPAN, Span, SpanKind
from router.fleet.fleet import Fleet, NodePair
from router.fleet.prefix_index import PromptPrefix
from router.generation.choice import Choice
from router.generation.job import Job
from router.generation.migration import Accepts, Migration
from router.generation.prompt_scores import PromptScores
from router.generation.usage import Usage
from router.metrics import RouterMetrics
from router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Tokens of the prompt that a completion's detokenizer sees first: a character can take up to four of them, and
# decoders that treat the beginning of a text specially must not take the output for one.
_CONTEXT_TOKENS = 4


class Consumer(Protocol):
    """Makes a response out of what comes. Called on the event loop; must not block."""

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        """A token, the end of the choice (``choice.finish_reason``), or both."""

    def on_end(self, error: PdserveError | None) -> None:
        """Nothing follows. Without an error every choice has ended by itself."""


class GenerationOptions(msgspec.Struct, frozen=True):
    """What all prompts of a request have in common. ``arrived`` is of ``time.monotonic``."""

    request_id: str
    arrived: float
    timeout: float  # seconds
    migrations: int = 0  # how often a prompt may go on at another decode node
    stops: tuple[str, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    continues_prompt: bool = True  # a completion does, a chat message begins a new text
    shown_tokens: tuple[str, ...] | None = ()  # special tokens that have a text all the same; None: all
    span: Span = NO_SPAN  # the request's

    @property
    def remaining(self) -> float:
        """Seconds of the timeout that are left."""
        return self.timeout - (monotonic() - self.arrived)

    @property
    def about(self) -> dict[str, object]:
        """What lines in the log say besides their message."""
        return request_fields(self.request_id, self.span.trace_id)


class RequestGeneration:
    """Runs jobs until each of their choices has ended, one of them has failed, or ``cancel``."""

    def __init__(
        self,
        jobs: Sequence[Job],
        options: GenerationOptions,
        tokenizer: Tokenizer,
        consumer: Consumer,
        metrics: RouterMetrics,
    ) -> None:
        self.options = options
        self.usage = Usage(prompt_tokens=sum(job.prompt.num_tokens for job in jobs))
        self.consumer = consumer
        self.metrics = metrics
        self.ttft: float | None = None  # seconds from the request's arrival to its first token
        self.runs: list[PromptRun] = []
        for index, job in enumerate(jobs):
            self.runs.append(PromptRun(self, job, index * job.sampling.n, tokenizer))
        self._unfinished = len(self.runs)
        self._ended = False

    async def prepare(self, fleet: Fleet) -> None:
        """What takes time of choosing nodes for long prompts."""
        for run in self.runs:
            await fleet.prepare(run.prefix)

    def start(self, fleet: Fleet) -> None:
        """Send every prompt. What cannot be sent ends the generation with that error."""
        for run in self.runs:
            try:
                run.start(fleet)
            except PdserveError as exc:
                self.fail(exc)
                return
            self.metrics.prompt_tokens.inc(run.job.prompt.num_tokens)

    def fail(self, error: PdserveError) -> None:
        """End with an error; calls under way are cancelled. Does nothing after the end."""
        if not self._ended:
            self.cancel()
            self.consumer.on_end(error)

    def cancel(self) -> None:
        """End quietly: the nodes are told at once. Idempotent."""
        self._ended = True
        for run in self.runs:
            run.cancel()

    def close(self) -> None:
        """Let go of everything, once: what refers to each other would be left to the garbage collector, whose pauses
        all streams feel."""
        self.cancel()
        self.runs.clear()
        del self.consumer

    def run_finished(self) -> None:
        self._unfinished -= 1
        if self._unfinished == 0 and not self._ended:
            self._ended = True
            self.consumer.on_end(None)


class PromptRun:
    """One prompt at its decode node, with its n choices; at another one when that fails."""

    def __init__(self, generation: RequestGeneration, job: Job, first_index: int, tokenizer: Tokenizer) -> None:
        self.job = job
        self._generation = generation
        self._observe_itl = generation.metrics.itl.observe
        self._call: NodePair | None = None
        self._waiting = True  # for a token from the node
        self._started = False  # there has been a token
        self._cut = False  # a stop string ended a choice, of which the node knows nothing
        self._accounted = False
        options = generation.options
        self.prefix = PromptPrefix(job.prompt.token_ids, options.cache_salt)
        context = unpack_tokens(job.prompt.last(_CONTEXT_TOKENS)) if options.continues_prompt else ()
        self.choices = [
            Choice(first_index + choice, tokenizer.detokenizer(context, options.shown_tokens), options.stops)
            for choice in range(job.sampling.n)
        ]
        self.scores = PromptScores(job.prompt.unpacked()) if job.sampling.prompt_logprobs >= 0 else None
        self._unfinished = len(self.choices)
        self._span = NO_SPAN  # of the present attempt at a node
        self._migration = Migration(
            options.request_id, options.span, options.migrations, generation.metrics, self._send, generation.fail
        )

    def start(self, fleet: Fleet) -> None:
        """Raises PdserveError when no node takes it."""
        self._fleet = fleet
        self._send(None)

    def _send(self, accepts: Accepts | None) -> None:
        """Have a decode node compute what is missing. Raises Overloaded when none is there."""
        options, sampling = self._generation.options, self.job.sampling
        if self._started:  # what there is to say of the prompt has been said
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        message = pb.Generate(
            request_id=options.request_id,
            token_ids=self.prefix.token_ids,
            sampling=sampling_to_pb(sampling),
            timeout_ms=max(1, int(options.remaining * 1000)),
            cache_salt=options.cache_salt,
            priority=options.priority,
        )
        for index, choice in enumerate(self.choices):
            if choice.token_ids and not choice.finish_reason:
                message.resume.add(choice=index, token_ids=pack_tokens(choice.token_ids))
        span = options.span.child("generate", kind=SpanKind.CLIENT)
        message.traceparent, message.tracestate = span.traceparent, span.tracestate
        self._call = self._fleet.generate(message, self, accepts, self.prefix)
        self._span = span  # that of an attempt for which there was no node is forgotten
        span.set({"pdserve.decode_node": self._call.node.node_id, "pdserve.prefill_node": message.prefill_node})
        self._waiting = True

    def cancel(self) -> None:
        self._migration.cancel()
        if self._call is not None:
            self._call.cancel()
            self._span.end()
            self._account()

    def on_failure(self, error: PdserveError) -> None:
        assert self._call is not None
        self._call.finish()
        self._span.fail(error)
        self._span.end()
        num_tokens = sum(len(choice.token_ids) for choice in self.choices if not choice.finish_reason)
        self._migration.on_failure(error, self._call, num_tokens)

    def on_output(self, output: pb.Output) -> None:
        try:
            self._on_output(output)
        except Exception:  # a fault in one response must not end the stream that all share
            options = self._generation.options
            logger.exception("request %s: an output could not be handled", options.request_id, extra=options.about)
            self._generation.fail(NodeError("the router could not handle an output of the decode node; see its log"))

    def _on_output(self, output: pb.Output) -> None:
        if self.scores is not None:
            if output.HasField("prompt_logprobs"):
                self.scores.add(prompt_logprobs_from_pb(output.prompt_logprobs))
                return
            if not self.scores.complete:
                raise NodeError("the decode node sent a token before all log-probabilities of the prompt")
            if self.job.silent:
                output = pb.Output(choice=output.choice, finish_reason="length")
        choice = self.choices[output.choice]
        if choice.finish_reason:  # it met a stop string; these tokens were on their way
            return
        if output.has_token:
            self._count(choice, output)
        text = choice.feed(output)
        self._generation.consumer.on_delta(choice, text, output)
        if choice.finish_reason:
            self._cut = self._cut or not output.finish_reason
            self._unfinished -= 1
            if self._unfinished == 0:
                self._finish()

    def _count(self, choice: Choice, output: pb.Output) -> None:
        generation = self._generation
        now = monotonic()
        if self._waiting:
            self._on_first_of_node(now, output)
        if choice.token_ids:
            self._observe_itl(now - choice.last_token_at)
        choice.last_token_at = now
        generation.usage.completion_tokens += 1

    def _on_first_of_node(self, now: float, output: pb.Output) -> None:
        self._waiting = False
        assert self._call is not None
        self._call.prefilled()
        if self._started:
            return
        self._started = True
        generation = self._generation
        ttft = now - generation.options.arrived
        generation.metrics.ttft.observe(ttft)
        if generation.ttft is None:
            generation.ttft = ttft
            generation.options.span.event("first token")
        generation.usage.cached_tokens += output.cached_tokens
        generation.metrics.cached_tokens.inc(output.cached_tokens)

    def _finish(self) -> None:
        """All choices have ended; the node is told unless it ended all of them itself."""
        assert self._call is not None
        if self._cut:
            self._call.cancel()
        else:
            self._call.finish()
        self._span.end()
        self._account()
        self._generation.run_finished()

    def _account(self) -> None:
        if not self._accounted:
            self._accounted = True
            self._generation.metrics.output_tokens.inc(sum(len(choice.token_ids) for choice in self.choices))
