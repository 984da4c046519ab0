"""One choice of a response: output tokens in, text out."""

from __future__ import annotations

from array import array

from pdserve.pb import pdserve_pb2 as pb
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopMatcher, StopStrings


class Choice:
    """``finish_reason`` is empty while the choice runs; ``token_offset`` is where the latest token's text begins.

    ``stop_string`` is the stop string that ended the choice; empty if another reason did.
    """

    __slots__ = (
        "_detokenizer",
        "_stop_included",
        "_stops",
        "finish_reason",
        "index",
        "last_token_at",
        "stop_string",
        "text_length",
        "token_ids",
        "token_offset",
    )

    def __init__(self, index: int, detokenizer: Detokenizer, stops: StopStrings) -> None:
        self.index = index
        self._detokenizer = detokenizer
        self._stops = StopMatcher(stops)
        self._stop_included = stops.included
        self.token_ids = array("I")
        self.text_length = 0  # characters, including those held back
        self.token_offset = 0
        self.finish_reason = ""
        self.stop_string = ""
        self.last_token_at = 0.0  # time.monotonic

    def feed(self, output: pb.Output) -> str:
        """Return the text that is safe to send; set ``finish_reason`` when the choice ends.

        An EOS or stop token that ends the choice has no text, unless ``StopStrings.included``.
        """
        reason = output.finish_reason
        text = ""
        if output.has_token:
            self.token_ids.append(output.token_id)
            if reason != "stop" or self._stop_included:
                text = self._detokenizer.push(output.token_id)
        if reason:
            text += self._detokenizer.flush()
        self.token_offset = self.text_length
        self.text_length += len(text)
        text, stopped = self._stops.push(text)
        if stopped:
            self.finish_reason = "stop"
            self.stop_string = self._stops.found
        elif reason:
            text += self._stops.flush()
            self.finish_reason = reason
        return text
