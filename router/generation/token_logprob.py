"""The log-probability of one token with its best alternatives."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pdserve.pb import pdserve_pb2 as pb

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


class TokenLogprob(msgspec.Struct, frozen=True):
    """``offset`` is where the token's text begins, in characters. The first prompt token has no log-probability."""

    token_id: int
    offset: int
    logprob: float | None
    alternatives: Sequence[tuple[int, float]]

    @classmethod
    def of_output(cls, output: pb.Output, offset: int) -> TokenLogprob:
        logprobs = output.logprobs
        top = zip(logprobs.top_ids, logprobs.top_logprobs, strict=True)
        alternatives = [(token_id, max(logprob, LOWEST)) for token_id, logprob in top]
        return cls(output.token_id, offset, max(logprobs.logprob, LOWEST), alternatives)
