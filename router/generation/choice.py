"""One choice of a response while it grows: tokens in, text out, until it ends."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from pdserve.pb import pdserve_pb2 as pb
from router.text.detokenizer import Detokenizer
from router.text.stop_strings import StopMatcher


class Choice:
    """``finish_reason`` is empty while the choice goes on; ``token_offset`` is where the newest token's text begins."""

    __slots__ = (
        "_decoder",
        "_stops",
        "finish_reason",
        "index",
        "last_token_at",
        "text_length",
        "token_ids",
        "token_offset",
    )

    def __init__(self, index: int, decoder: Detokenizer, stops: Sequence[str]) -> None:
        self.index = index
        self._decoder = decoder
        self._stops = StopMatcher(stops)
        self.token_ids = array("I")
        self.text_length = 0  # characters decoded so far, those held back included
        self.token_offset = 0
        self.finish_reason = ""
        self.last_token_at = 0.0  # seconds, perf_counter

    def feed(self, output: pb.Output) -> str:
        """The text that became safe to send; sets ``finish_reason`` when the choice ends with this output.

        A token that ended the choice by itself (end of sequence, a stop token id) has no text.
        """
        reason = output.finish_reason
        text = ""
        if output.has_token:
            self.token_ids.append(output.token_id)
            if reason != "stop":
                text = self._decoder.push(output.token_id)
        if reason:
            text += self._decoder.flush()
        self.token_offset = self.text_length
        self.text_length += len(text)
        text, stopped = self._stops.push(text)
        if stopped:
            self.finish_reason = "stop"
        elif reason:
            text += self._stops.flush()
            self.finish_reason = reason
        return text
