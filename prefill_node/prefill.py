"""A prompt that P computes for a decode node, from its arrival until its lease ends.

    arrives ─► pulls a prefix ─► computed by parts ─► complete ─► decodes ahead ─┐
       │             │                   │               │                       ▼
       └─────────────┴─ fails, cancelled ┴───────────────┴──► only its lease ──► its end: the blocks are free

A prefix is pulled if the request names a node that has cached more of the prompt than P. A pull that fails changes
nothing: P computes these tokens, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from node.engine_client.request_events import Event
from node.image_uploads import NO_CLAIM, ImageUploads
from node.leasing.leases import LeaseId, LeaseState
from node.leasing.prompt_trace import PromptTrace
from node.leasing.prompts import LeasedPrompt, LeasedPrompts
from node.reading.pull_driver import PullDriver
from pdserve.errors import EngineCrashed, PdserveError
from pdserve.ipc.messages import (
    DecodeAheadEnded,
    LastChunk,
    Mode,
    Prefilled,
    ReadChecked,
    ReadEnded,
    Reserved,
    Submit,
)
from pdserve.logprobs import TokenLogprobs
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import FinishReason
from pdserve.rpc.protobuf import images_from_pb, logprobs_to_pb
from pdserve.sampling_params import SamplingParams

_MAX_STEP_SECONDS = 0.05  # bound on a step that only decodes


class Prefill(LeasedPrompt):
    def __init__(
        self, lease: LeaseId, prompts: LeasedPrompts, *, trace: PromptTrace, send: Callable[[pb.PrefillEvent], None]
    ) -> None:
        super().__init__(lease, prompts, trace=trace, send=send)
        self._num_choices = 1
        self._samples: list[pb.SampledToken] = []  # the first of each choice
        self._prefilled = Prefilled(self.rid, 0, 0.0)
        self._decodes_ahead = True  # decode-ahead runs or will run, until the engine reports its end
        self._deferred: Callable[[], None] | None = None  # runs once the step in flight has ended
        self._pull: PullDriver | None = None
        self._pixels = NO_CLAIM

    def submit(
        self,
        request: pb.PrefillRequest,
        sampling: SamplingParams,
        *,
        decode_ahead: int,
        pull: PullDriver | None,
        uploads: ImageUploads,
    ) -> None:
        """Send the prompt to the engine once its pixels are there, to decode at most ``decode_ahead`` tokens more.

        ``pull`` first reads a prefix; None: compute all tokens that are not cached here.
        """
        self._set_deadline(request.timeout_ms)
        self._num_choices = sampling.n
        self._pull = pull
        submit = Submit(
            rid=self.rid,
            token_ids=request.token_ids,
            sampling=sampling,
            mode=Mode.LEASE if pull is None else Mode.PULL_AND_LEASE,
            cache_salt=request.cache_salt,
            priority=request.priority,
            skip_tokens=request.skip_tokens,
            decode_ahead=decode_ahead,
            client=request.client,
            urgent=request.urgent,
            kv_layers=request.kv_layers,
            age=request.age_ms / 1000,
            images=images_from_pb(request.images),
        )
        self._pixels = uploads.when_ready(submit.images, partial(self._send_to_engine, submit), self.fail)

    def _send_to_engine(self, submit: Submit) -> None:
        if submit.images:
            self.trace.on_pixels(len(submit.images))
        self._prompts.engine.send(submit)

    def after_step(self, action: Callable[[], None]) -> None:
        """Run ``action`` after the next step decoded ahead, or at once if there will be none.

        That step began before D could begin its own. But a step with prompts is longer than D's. A stalled
        engine delays ``action`` by at most the length of a step.
        """
        self._run_deferred()
        if not (self.complete and self._decodes_ahead) or self._prompts.engine.status.backlog:
            action()
            return
        self._deferred = action
        self._timer = asyncio.get_running_loop().call_later(_MAX_STEP_SECONDS, self._run_deferred)

    def cancel(self) -> None:
        super().cancel()
        self._run_deferred()

    def on_lease_end(self, state: LeaseState) -> None:
        super().on_lease_end(state)
        self._run_deferred()

    # ------------------------------------------------------------ events of the engine

    def on_event(self, event: Event) -> None:
        match event:
            case Reserved() | ReadEnded() | ReadChecked():
                assert self._pull is not None, "only a pull reads"
                self._pull.on_engine_event(event)
            case Prefilled():
                self._prefilled = event
                self._pixels.release()
            case LastChunk():
                self._send(last_chunk=pb.LastChunk(ends_in_ms=round(event.seconds * 1000)))
            case DecodeAheadEnded():
                self._decodes_ahead = False
                self._run_deferred()
            case _:
                super().on_event(event)

    def on_token(self, choice: int, token_id: int, finish: FinishReason | None, logprobs: TokenLogprobs | None) -> None:
        sample = pb.SampledToken(token_id=token_id, logprobs=logprobs_to_pb(logprobs) if logprobs else None)
        self._decodes_ahead = finish is None
        if len(self._samples) == self._num_choices:
            self._send(next_token=sample)
        else:
            self._samples.append(sample)
            if len(self._samples) == self._num_choices:
                self._on_first_tokens()
        if self._deferred is not None:  # after the other tokens of this step
            asyncio.get_running_loop().call_soon(self._run_deferred)

    def _on_first_tokens(self) -> None:
        """Send the first token of each choice. The last part follows."""
        done = self._prefilled
        self.trace.on_computed(done.queued, done.cached_tokens, self._prompts.engine.status.costs)
        first = pb.FirstTokens(choices=self._samples, cached_tokens=done.cached_tokens, queued_ms=done.queued * 1000)
        self._send(first_tokens=first)

    def _on_refused(self, error: PdserveError) -> None:
        # Later, only tokens decoded ahead are missing. D needs none of them, but must know of a crash.
        if not self.complete or isinstance(error, EngineCrashed):
            self.fail(error)

    # ------------------------------------------------------------ helpers

    def _run_deferred(self) -> None:
        action = self._deferred
        self._deferred = None
        if action is not None:
            self._stop_timer()
            action()

    def _stop(self) -> None:
        super()._stop()
        self._pixels.release()
        self._decodes_ahead = False
        if self._pull is not None:
            self._pull.abandon()
