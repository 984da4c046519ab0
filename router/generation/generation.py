"""A running request: its calls to decode nodes, its choices and its end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from time import monotonic

import msgspec

from pdserve.errors import NodeError, PdserveError
from pdserve.hashing import root_hash
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import images_to_pb, pack_tokens, sampling_to_pb, unpack_tokens
from pdserve.tracing.spans import NO_SPAN, SpanKind
from router.errors import MalformedOutput
from router.fleet.fleet import Fleet, NodeCall
from router.fleet.policy import NodeView, Placement
from router.fleet.prefix_index import PromptPrefix
from router.generation.answer_weights import AnswerWeights
from router.generation.choice import Choice, Consumer
from router.generation.first_outputs import FirstOutputs
from router.generation.job import GenerationOptions, Job
from router.generation.migration import Accepts, Migration
from router.generation.output_checks import add_scores, check_output
from router.generation.prompt_scores import PromptScores
from router.generation.usage import Usage
from router.images.sending import ImageUpload
from router.metrics import ModelMetrics
from router.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

# Prompt tokens that a completion's detokenizer sees first: a character takes up to four tokens, and some decoders treat
# the beginning of a text specially.
_CONTEXT_TOKENS = 4
_SENT_AT_ONCE = 64  # prompts, each about 0.1 ms on the event loop
_MIN_LEFT = 16  # output tokens; a stream that ends sooner does not move


class RequestGeneration:
    """Runs jobs until all of their choices have ended, one job has failed, or ``cancel``."""

    def __init__(
        self,
        jobs: Sequence[Job],
        options: GenerationOptions,
        tokenizer: Tokenizer,
        consumer: Consumer,
        metrics: ModelMetrics,
    ) -> None:
        self.options = options
        self.usage = Usage.of_prompts([job.prompt for job in jobs])
        self.consumer = consumer
        self.metrics = metrics
        self.ttft: float | None = None  # seconds from the request's arrival to its first token
        self.nodes = ("", "")  # ids of P and D of the first token; no P: D has computed the prompt
        self.runs = [PromptRun(self, job, index * job.sampling.n, tokenizer) for index, job in enumerate(jobs)]
        self.paused = False
        self.weights = AnswerWeights(consumer.on_weights, jobs[0].sampling.adapter)
        self._unfinished = len(self.runs)
        self._ended = False

    async def prepare(self, fleet: Fleet) -> None:
        """Do the slow part of choosing nodes for long prompts."""
        for run in self.runs:
            await fleet.prepare(run.prefix)

    async def start(self, fleet: Fleet) -> None:
        """Send every prompt. An error ends the generation."""
        for index, run in enumerate(self.runs):
            if index % _SENT_AT_ONCE == _SENT_AT_ONCE - 1:
                await asyncio.sleep(0)
            if self._ended:
                return
            try:
                run.start(fleet)
            except PdserveError as exc:
                self.fail(exc)
                return
            self.metrics.prompt_tokens.inc(run.job.prompt.num_tokens)

    def set_paused(self, paused: bool) -> None:
        """Have the nodes produce no more tokens until this is called with False. Tokens under way still arrive."""
        self.paused = paused
        self.metrics.pauses.inc(paused)
        for run in self.runs:
            run.set_paused(paused)

    def fail(self, error: PdserveError) -> None:
        """End with an error and cancel the calls. Does nothing after the end."""
        if not self._ended:
            self.cancel()
            self.consumer.on_end(error)

    def cancel(self) -> None:
        """End without calling the consumer; the nodes abort at once. Idempotent."""
        self._ended = True
        for run in self.runs:
            run.cancel()

    def close(self) -> None:
        """Cancel, and break reference cycles: garbage collection of cycles would pause all streams. Called once."""
        self.cancel()
        self.runs.clear()
        del self.consumer, self.weights

    def run_finished(self) -> None:
        self._unfinished -= 1
        if self._unfinished == 0 and not self._ended:
            self._ended = True
            self.consumer.on_end(None)


class PromptRun:
    """One prompt with its n choices at a decode node, and at another one after a migration."""

    def __init__(self, generation: RequestGeneration, job: Job, first_index: int, tokenizer: Tokenizer) -> None:
        self.job = job
        self._generation = generation
        self._observe_itl = generation.metrics.itl.observe
        self._call: NodeCall | None = None
        self._prefill_node = ""  # P of the present call; D may still compute the prompt itself
        self._waiting = True  # until the first token of the present call
        self._started = False  # a token has arrived
        self._stopped_early = False  # a stop string ended a choice, unknown to the node
        self._accounted = False
        options = generation.options
        root = root_hash(options.cache_salt, job.sampling.adapter)
        self.prefix = PromptPrefix(job.prompt.token_ids, root, job.prompt.images)
        context = unpack_tokens(job.prompt.last(_CONTEXT_TOKENS)) if options.continues_prompt else ()
        self.choices = [
            Choice(
                index,
                tokenizer.detokenizer(context, options.visible_special_tokens),
                options.stops,
                job.sampling,
                options.new_reader() if options.new_reader else None,
            )
            for index in range(first_index, first_index + job.sampling.n)
        ]
        self.scores = PromptScores(job) if job.sampling.prompt_logprobs >= 0 else None
        self._unfinished = len(self.choices)
        self._span = NO_SPAN  # span of the present call
        self._migration = Migration(options, generation.metrics, self._send, generation.fail, len(self.choices))
        self._suspicion = self._migration.suspicion

    def start(self, fleet: Fleet) -> None:
        """Raises PdserveError when no node takes the prompt."""
        self._fleet = fleet
        self._send(None)

    def _send(self, to: Accepts | Placement | None, on_trial: bool = False) -> None:
        """Send the prompt with the tokens so far. Raises Overloaded when no accepted decode node is ready.

        ``on_trial``: the prompt is suspect, so no prefill node takes part.
        """
        generation = self._generation
        options = generation.options
        sampling = self.job.sampling
        if self._started:  # prompt log-probabilities arrive before the first token
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=-1)
        message = pb.Generate(
            request_id=options.request_id,
            token_ids=self.prefix.token_ids,
            sampling=sampling_to_pb(sampling),
            timeout_ms=max(1, int(options.remaining * 1000)),
            age_ms=int(options.age * 1000),
            cache_salt=options.cache_salt,
            priority=options.priority,
            client=options.client_tag,
            paused=generation.paused,
            images=images_to_pb(self.prefix.images),
        )
        for index, choice in enumerate(self.choices):
            if choice.token_ids and not choice.finish_reason:
                message.resume.add(choice=index, token_ids=pack_tokens(choice.token_ids))
        span = options.span.child("generate", kind=SpanKind.CLIENT)
        message.traceparent = span.traceparent
        message.tracestate = span.tracestate
        if isinstance(to, Placement):
            num_tokens = self.prefix.num_tokens + self._num_unfinished_tokens
            self._call = self._fleet.move(message, self, to, num_tokens)
        else:
            self._call = self._fleet.generate(
                message, self, self.prefix, accepts=generation.weights.accepting(to), alone=on_trial, hint=options.hint
            )
            if on_trial and not generation.paused:
                self._suspicion.begin_trial(self._call)
            if len(generation.runs) > 1:
                generation.weights.settle(self._call.node)
            if self.job.pictures:  # a move brings their KV
                upload = ImageUpload(self.job.pictures, self._call.computing, self._on_upload_failed)
                self._call.on_prefilled = upload.cancel
        self._first = FirstOutputs(0 if self._started else len(self.choices))
        self._prefill_node = message.prefill_node
        self._span = span  # a span without a call is dropped
        span.set(self._call.placed)
        self._waiting = True

    def cancel(self) -> None:
        self._migration.cancel()
        if self._call is not None:
            self._call.cancel()
            self._end_call()

    def set_paused(self, paused: bool) -> None:
        if paused:
            self._suspicion.end_trial()  # a pause may last
        if self._call is not None:
            self._call.set_paused(paused)
        for choice in self.choices:
            choice.last_token_at = monotonic()  # the metric of token gaps excludes pauses

    @property
    def movable_tokens(self) -> int:
        if self._waiting or self._generation.paused or len(self.choices) > 1 or not self._migration.may_move:
            return 0
        num_outputs = len(self.choices[0].token_ids)
        return self.prefix.num_tokens + num_outputs if self.job.sampling.max_tokens - num_outputs >= _MIN_LEFT else 0

    def move(self, to: Placement) -> None:
        if self.movable_tokens:
            self._migration.destination = to

    def on_failure(self, error: PdserveError) -> None:
        assert self._call is not None
        if isinstance(error, MalformedOutput):
            self._generation.metrics.refused_outputs.labels(error.field).inc()
            self._call.cancel()  # otherwise the node would go on
        else:
            self._call.finish()
        self._span.fail(error)
        self._span.end()
        self._migration.on_failure(error, self._call, self._num_unfinished_tokens)

    def _on_upload_failed(self, error: PdserveError) -> None:
        """The node that computes the prompt does not get its images."""
        assert self._call is not None
        self._span.fail(error)
        self._leave()
        self._migration.on_failure(error, self._call, self._num_unfinished_tokens)

    def on_stall(self) -> None:
        call = self._call
        num_tokens = self._num_unfinished_tokens
        assert call is not None
        if self._migration.may_leave(call.node, num_tokens, self._has_decode_node):
            self._migration.leave_stalled(self._leave(), num_tokens)

    def _has_decode_node(self, accepts: Accepts) -> bool:
        accepts = self._generation.weights.accepting(accepts) or accepts
        adapter = self.job.sampling.adapter
        return self._fleet.has_decode_node(self.job.length, lambda node: adapter in node.adapters and accepts(node))

    def _leave(self) -> NodeView:
        """Cancel the present call; return its node."""
        assert self._call is not None
        self._call.cancel()
        self._span.end()
        return self._call.node

    @property
    def _num_unfinished_tokens(self) -> int:
        """Output tokens of choices that have not ended."""
        return sum(len(choice.token_ids) for choice in self.choices if not choice.finish_reason)

    def on_output(self, output: pb.Output) -> None:
        try:
            self._on_output(output)
        except MalformedOutput as exc:
            self.on_failure(exc)
        except Exception:  # a bug in one response must not end the stream that all requests share
            options = self._generation.options
            logger.exception("request %s: output not handled", options.request_id, extra=options.log_fields)
            self._generation.fail(NodeError("the router could not handle an output of the decode node; see its log"))

    def _on_output(self, output: pb.Output) -> None:
        if output.HasField("prompt_logprobs"):
            add_scores(output, None if self._started else self.scores)
            return
        check_output(output, self.job, self.choices, self.scores)
        if self.scores is not None and self.job.silent:
            output = pb.Output(choice=output.choice, finish_reason="length")
        for ready in self._first.add(output):
            if not self._accounted:  # an earlier output may have ended the request
                self._take(ready)

    def _take(self, output: pb.Output) -> None:
        # Scores do not settle the weights: another node computes all scores again.
        if not self._generation.weights.settled and self._call is not None:
            self._generation.weights.settle(self._call.node)
        choice = self.choices[output.choice]
        if choice.finish_reason:  # a stop string has ended the choice; these tokens were under way
            return
        if output.has_token:
            self._count_token(choice, output)
        text = choice.feed(output)
        self._generation.consumer.on_delta(choice, text, output)
        if choice.finish_reason:
            self._stopped_early = self._stopped_early or not output.finish_reason
            self._unfinished -= 1
            if self._unfinished == 0:
                self._finish()
        elif self._migration.destination is not None:
            self._migration.move(self._leave(), self._num_unfinished_tokens)

    def _count_token(self, choice: Choice, output: pb.Output) -> None:
        generation = self._generation
        now = monotonic()
        if self._waiting:
            self._on_first_token(now, output)
        if choice.token_ids:
            self._observe_itl(now - choice.last_token_at)
        choice.last_token_at = now
        generation.usage.count_token(output.accepted_drafts, output.rejected_drafts)
        if self._suspicion.on_trial:
            self._suspicion.count_token()

    def _on_first_token(self, now: float, output: pb.Output) -> None:
        """Handle the first token of a call; TTFT and cached tokens count for the first call only."""
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
            generation.nodes = (self._prefill_node if output.handed_off else "", self._call.node.node_id)
            generation.options.span.event("first token")
        generation.usage.cached_tokens += output.cached_tokens
        generation.metrics.cached_tokens.inc(output.cached_tokens)

    def _finish(self) -> None:
        """End the prompt, whose choices have ended; abort choices at the node that only stop strings have ended."""
        assert self._call is not None
        self._suspicion.end_trial()
        end = self._call.cancel if self._stopped_early else self._call.finish
        end()
        self._end_call()
        self._generation.run_finished()

    def _end_call(self) -> None:
        """End the span and count the output tokens. Idempotent."""
        self._span.end()
        if not self._accounted:
            self._accounted = True
            self._generation.metrics.output_tokens.inc(sum(len(choice.token_ids) for choice in self.choices))
