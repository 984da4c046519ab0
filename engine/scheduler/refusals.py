"""Requests that a node does not serve: which ones, and what their routers are told."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from engine.adapters.adapters import Adapters
from engine.images.image_steps import ImageSteps
from engine.request import Request
from engine.scheduler.live_sequences import LiveSequences
from engine.sequence import Sequence
from pdserve.errors import AdapterMissing, ImagesMissing, Overloaded, PdserveError, RequestError, RequestTooLong
from pdserve.ipc.messages import EventBatch, Refused


class Refusals:
    """``cancel`` ends a request. ``max_waiting`` requests without output may wait."""

    def __init__(
        self,
        live: LiveSequences,
        images: ImageSteps,
        adapters: Adapters,
        events: EventBatch,
        max_waiting: int,
        cancel: Callable[[int], None],
    ) -> None:
        self._live = live
        self._images = images
        self._adapters = adapters
        self._events = events
        self._max_waiting = max_waiting
        self._cancel = cancel
        self._unseen: list[Sequence] = []  # prompts that the step being planned leaves out: they lack pixels

    def never_fits(self, request: Request, num_blocks: int, total: int) -> bool:
        """Refuse a request that can never be served. Return whether it was; it needs ``num_blocks`` of ``total``."""
        if num_blocks > total:
            text = f"a prompt of {request.prompt_len} tokens needs {num_blocks} KV blocks, this node has {total}"
            self._refuse(request.rid, RequestTooLong(text))
            return True
        fault = self._images.fault(request.images)
        if fault:
            self._refuse(request.rid, RequestError(fault))
        return bool(fault)

    def lacks_adapter(self, request: Request) -> bool:
        """Refuse a request whose adapter is not on this node. Return whether it was."""
        digest = request.sampling.adapter
        is_here = self._adapters.has(digest, begun=bool(request.branches))
        if not is_here:
            text = f"this node does not have adapter {digest[:12]}…; send the request to a node that lists it"
            self._refuse(request.rid, AdapterMissing(text))
        return not is_here

    def overloaded(self, request: Request, num_waiting: int) -> bool:
        """Refuse a new request if the queue is full, or a waiting one if that is fairer. Return whether it was ours."""
        if num_waiting < self._max_waiting:
            return False
        text = f"{num_waiting} requests are waiting, the limit is {self._max_waiting}; come back later"
        sequence = self._live.waiting.to_refuse(request)
        self._refuse(request.rid if sequence is None else sequence.rid, Overloaded(text))
        if sequence is not None:
            self._cancel(sequence.rid)
        return sequence is None

    def failed(self, rid: int, error: PdserveError) -> None:
        """Refuse a request whose grammar failed."""
        self._refuse(rid, error)
        self._cancel(rid)

    def for_peers(self, sequences: Iterable[Sequence]) -> None:
        """Refuse prompts for peers, which have blocks for them and compute them, as this node lacks room.

        They might wait forever: the peers for prompts of this node, and growing windows for windows of other prompts.
        """
        text = "no room for prompts of peers while other prompts hold blocks or slots; compute the prompt yourself"
        for sequence in list(sequences):
            self._refuse(sequence.rid, Overloaded(text))
            self._cancel(sequence.rid)

    def without_slots(self) -> None:
        """Refuse prompts for peers that lack a slot, while streams load: two nodes might hold slots for each other."""
        if self._live.streams_loading and self._live.for_peers:
            waiting = [sequence for sequence in self._live.waiting if sequence.for_peer]
            self.for_peers(filter(self._adapters.lacking(), waiting))

    def leaves_out(self, sequence: Sequence) -> bool:
        """Return whether the step being planned cannot include a prompt, as pixels are not here: refuse it later."""
        is_unseen = bool(self._images.missing(sequence))
        if is_unseen:
            self._unseen.append(sequence)
        return is_unseen

    def end_plan(self) -> None:
        """Refuse what the step leaves out, once it is planned: it may decode other choices of the same requests."""
        for sequence in self._unseen:
            if not sequence.ended:
                self._refuse(sequence.rid, ImagesMissing(self._images.missing(sequence)))
                self._cancel(sequence.rid)
        self._unseen = []

    def _refuse(self, rid: int, error: PdserveError) -> None:
        self._events.refused.append(Refused(rid, type(error).__name__, str(error)))
