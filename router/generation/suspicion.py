"""A request whose node's engine ended in a step with it is suspect: it goes on once, apart from other suspects.

    runs ──engine ends──► suspect: waits for a node without one ──► on trial there ──8 tokens──► cleared
                                                                          │                         │ engine ends
                                                                          ▼ engine ends             ▼
                                                                    CrashingRequest            CrashingRequest

A trial is on a decode node that has no other suspect of this router, and no P takes part. So the end of its engine has
one cause, the suspect: other requests there go on as if their node had been lost, and are no suspects by it. Fresh and
cleared requests may run beside a suspect.

A node tells which requests were in the step that ended its engine. The end of a node as a whole, by SIGKILL or with its
network, and that of an engine that another process kills, make no suspects; --migrations limits them.
"""

from __future__ import annotations

from pdserve.errors import EngineCrashed, PrefillCrashed
from router.errors import CrashingRequest
from router.fleet.fleet import NodeCall
from router.fleet.policy import NodeView

_CLEARED_TOKENS = 8  # per choice: more than the outputs of a dead engine that the router has not received


class Suspicion:
    """The suspicion against one prompt with its choices, and its trial."""

    def __init__(self, num_choices: int) -> None:
        self.pending = False  # suspected and not cleared
        self._crashed = False
        self._call: NodeCall | None = None  # call of the trial; None: not on trial
        self._trial_tokens = _CLEARED_TOKENS * num_choices
        self._tokens_left = 0

    @property
    def on_trial(self) -> bool:
        return self._call is not None

    @property
    def crashed(self) -> bool:
        """Whether an engine has ended with the request, also after it was cleared."""
        return self._crashed

    def accepts(self, node: NodeView) -> bool:
        """Return whether the request may run on a node now."""
        return not (self.pending and node.has_suspect)

    def begin_trial(self, call: NodeCall) -> None:
        self._call = call
        self._tokens_left = self._trial_tokens
        call.suspect = self

    def count_token(self) -> None:
        """Count a token of the trial; enough of them clear the request."""
        self._tokens_left -= 1
        if not self._tokens_left:
            self.pending = False
            self.end_trial()

    def end_trial(self) -> None:
        """Leave the node of the trial to other suspects. Does nothing without a trial."""
        call = self._call
        self._call = None
        if call is not None:
            call.suspect = None

    def add_crash(self, call: NodeCall, error: EngineCrashed) -> None:
        """Note an engine's end, unless another suspect, on trial there, explains it.

        Raises CrashingRequest for the second one.
        """
        if call.suspect not in (None, self) and not isinstance(error, PrefillCrashed):
            return
        self._call = None  # the node keeps its suspect: other requests do not know of the crash yet
        if self._crashed:
            text = "the engines of two decode nodes have ended while they computed this request, so it is not tried"
            raise CrashingRequest(f"{text} again; the last one: {error}; report it with the nodes' logs")
        self._crashed = self.pending = True
