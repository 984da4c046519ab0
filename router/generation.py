"""A request under way: its calls to decode nodes, its choices, and its one end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from time import perf_counter
from typing import Protocol

import msgspec

from pdserve.errors import NodeError, Overloaded, PdserveError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.wire import pack_tokens, sampling_to_pb
from router.choice import Choice
from router.fleet import Call, Fleet
from router.formats import Usage
from router.job import Job
from router.metrics import Metrics
from router.tokenizer import Tokenizer

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
    """What all prompts of a request have in common. ``arrived`` is of ``perf_counter``."""

    request_id: str
    arrived: float
    timeout: float  # seconds
    stops: tuple[str, ...] = ()
    cache_salt: str = ""
    priority: int = 0
    continues_prompt: bool = True  # a completion does, a chat message begins a new text
    shown_tokens: tuple[str, ...] | None = ()  # special tokens that have a text all the same; None: all

    @property
    def remaining(self) -> float:
        """Seconds of the timeout that are left."""
        return self.timeout - (perf_counter() - self.arrived)


class Generation:
    """Runs jobs until each of their choices has ended, one call has failed, or ``cancel``."""

    def __init__(
        self,
        jobs: Sequence[Job],
        options: GenerationOptions,
        tokenizer: Tokenizer,
        consumer: Consumer,
        metrics: Metrics,
    ) -> None:
        self.options = options
        self.usage = Usage(prompt_tokens=sum(len(job.prompt.token_ids) for job in jobs))
        self.consumer = consumer
        self.metrics = metrics
        self.runs: list[PromptRun] = []
        for index, job in enumerate(jobs):
            self.runs.append(PromptRun(self, job, index * job.sampling.n, tokenizer))
        self._unfinished = len(self.runs)
        self._ended = False

    def start(self, fleet: Fleet) -> None:
        """Send every prompt. What cannot be sent ends the generation with that error."""
        for run in self.runs:
            try:
                run.start(fleet)
            except PdserveError as exc:
                self.fail(exc)
                return
            self.metrics.prompt_tokens.inc(len(run.job.prompt.token_ids))

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

    def run_finished(self) -> None:
        self._unfinished -= 1
        if self._unfinished == 0 and not self._ended:
            self._ended = True
            self.consumer.on_end(None)


class PromptRun:
    """One prompt at its decode node, with its n choices."""

    def __init__(self, generation: Generation, job: Job, first_index: int, tokenizer: Tokenizer) -> None:
        self.job = job
        self._generation = generation
        self._observe_itl = generation.metrics.itl.observe
        self._fleet: Fleet | None = None
        self._call: Call | None = None
        self._moved = False  # from a node without room to another
        self._waiting = True  # for the first token
        self._cut = False  # a stop string ended a choice, of which the node knows nothing
        self._accounted = False
        options = generation.options
        context = job.prompt.token_ids[-_CONTEXT_TOKENS:] if options.continues_prompt else ()
        self.choices = [
            Choice(first_index + choice, tokenizer.detokenizer(context, options.shown_tokens), options.stops)
            for choice in range(job.sampling.n)
        ]
        self._unfinished = len(self.choices)

    def start(self, fleet: Fleet) -> None:
        """Raises PdserveError when no node takes it."""
        self._fleet = fleet
        self._call = fleet.generate(self._message(), self)

    def _message(self) -> pb.Generate:
        options = self._generation.options
        return pb.Generate(
            request_id=options.request_id,
            token_ids=pack_tokens(self.job.prompt.token_ids),
            sampling=sampling_to_pb(self.job.sampling),
            timeout_ms=max(1, int(options.remaining * 1000)),
            cache_salt=options.cache_salt,
            priority=options.priority,
        )

    def cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()
            self._account()

    def on_failure(self, error: PdserveError) -> None:
        assert self._call is not None
        self._call.finish()
        if not (isinstance(error, Overloaded) and self._waiting and self._try_another()):
            self._generation.fail(error)

    def _try_another(self) -> bool:
        """Ask another decode node, once, since this one has no room. Returns whether there is one that may have."""
        if self._moved:
            return False
        assert self._fleet is not None
        assert self._call is not None
        self._moved = True
        try:
            self._call = self._fleet.generate(self._message(), self, avoid={self._call.decode})
        except PdserveError:  # what the first one said is what counts
            return False
        return True

    def on_output(self, output: pb.Output) -> None:
        try:
            self._on_output(output)
        except Exception:  # a fault in one response must not end the stream that all share
            logger.exception("request %s: an output could not be handled", self._generation.options.request_id)
            self._generation.fail(NodeError("the router could not handle an output of the decode node; see its log"))

    def _on_output(self, output: pb.Output) -> None:
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
        now = perf_counter()
        if self._waiting:
            self._waiting = False
            assert self._call is not None
            self._call.prefilled()
            generation.metrics.ttft.observe(now - generation.options.arrived)
            generation.usage.cached_tokens += output.cached_tokens
            generation.metrics.cached_tokens.inc(output.cached_tokens)
        elif choice.num_tokens:
            self._observe_itl(now - choice.last_token_at)
        choice.last_token_at = now
        generation.usage.completion_tokens += 1

    def _finish(self) -> None:
        """All choices have ended; the node is told unless it ended all of them itself."""
        assert self._call is not None
        if self._cut:
            self._call.cancel()
        else:
            self._call.finish()
        self._account()
        self._generation.run_finished()

    def _account(self) -> None:
        if not self._accounted:
            self._accounted = True
            self._generation.metrics.output_tokens.inc(sum(choice.num_tokens for choice in self.choices))
