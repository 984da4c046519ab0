"""One choice of a response: output tokens in, text out; and the consumer of the text."""

from __future__ import annotations

from array import array
from typing import Protocol

from pdserve.errors import PdserveError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.records import FinishReason
from pdserve.sampling_params import SamplingParams
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import LateStopMatcher, Reasoned, StopMatcher, StopStrings

_REASONS = frozenset(("", *FinishReason))  # reasons that this release knows; empty: the choice goes on


class Choice:
    """``finish_reason`` is empty while the choice runs; ``token_offset`` is where the latest token's text begins.

    ``stop_string`` is the stop string that ended the choice; empty if another reason did. ``matched_stop`` is SGLang's:
    that string, or the id of the EOS or stop token; None if neither ended it. ``stop_reason`` is vLLM's, without EOS.
    """

    __slots__ = (
        "_detokenizer",
        "_min_tokens",
        "_stop_included",
        "_stops",
        "finish_reason",
        "index",
        "last_token_at",
        "matched_stop",
        "stop_string",
        "stop_token_ids",
        "text_length",
        "token_ids",
        "token_offset",
    )

    def __init__(
        self,
        index: int,
        detokenizer: Detokenizer,
        stops: StopStrings,
        sampling: SamplingParams,
        reader: Reasoned | None = None,
    ) -> None:
        """``reader``: stop strings match behind the reasoning that it finds."""
        self.index = index
        self.stop_token_ids = sampling.stop_token_ids
        self._min_tokens = sampling.min_tokens
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops) if reader is None else LateStopMatcher(stops, reader)
        self._stop_included = stops.included
        self.token_ids = array("I")
        self.text_length = 0  # characters, including held-back ones
        self.token_offset = 0
        self.finish_reason = ""
        self.stop_string = ""
        self.matched_stop: str | int | None = None
        self.last_token_at = 0.0  # time.monotonic

    def feed(self, output: pb.Output) -> str:
        """Return the text that is safe to send; set ``finish_reason`` when the choice ends.

        An EOS or stop token that ends the choice has no text, unless ``StopStrings.included``. A stop string counts if
        its last character comes with token ``min_tokens`` or later. A reason of a newer release is "length": clients
        do not know it either, and the node has cut the answer off.
        """
        reason = output.finish_reason if output.finish_reason in _REASONS else FinishReason.LENGTH
        text = ""
        if output.has_token:
            self.token_ids.append(output.token_id)
            if reason != "stop" or self._stop_included:
                text = self._detokenizer.push(output.token_id)
        if reason:
            text += self._detokenizer.flush()
        self.token_offset = self.text_length
        self.text_length += len(text)
        text, stopped = self._stops.push(text, len(self.token_ids) >= self._min_tokens)
        if stopped:
            self.finish_reason = "stop"
            self.matched_stop = self.stop_string = self._stops.found
        elif reason:
            text += self._stops.flush()
            self.finish_reason = reason
            if reason == "stop" and output.has_token:
                self.matched_stop = output.token_id
        return text

    @property
    def stop_reason(self) -> str | int | None:
        return self.stop_string or (self.matched_stop if self.matched_stop in self.stop_token_ids else None)


class Consumer(Protocol):
    """Writes a response from the outputs. Called on the event loop; must not block."""

    def on_delta(self, choice: Choice, text: str, output: pb.Output) -> None:
        """Handle a token, the end of the choice (``choice.finish_reason``), or both."""

    def on_weights(self, weights: str) -> None:
        """Note the weights of the whole answer. Called once, before any other method."""

    def on_end(self, error: PdserveError | None) -> None:
        """Handle the end. Without an error every choice has a finish reason."""
