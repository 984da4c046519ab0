"""The log-probability of one token with its best alternatives."""

from __future__ import annotations

from collections.abc import Sequence

from pdserve.pb import pdserve_pb2 as pb

LOWEST = -9999.0  # OpenAI's stand-in for minus infinity, which JSON lacks


class TokenLogprob:
    """``offset`` is where the token's text begins, in characters. The first prompt token has no log-probability."""

    __slots__ = ("alternatives", "logprob", "offset", "token_id")

    def __init__(
        self, token_id: int, offset: int, logprob: float | None, alternatives: Sequence[tuple[int, float]]
    ) -> None:
        self.token_id = token_id
        self.offset = offset
        self.logprob = logprob
        self.alternatives = alternatives

    @classmethod
    def of_output(cls, output: pb.Output, offset: int) -> TokenLogprob:
        found = output.logprobs
        alternatives = [
            (token_id, max(logprob, LOWEST))
            for token_id, logprob in zip(found.top_ids, found.top_logprobs, strict=True)
        ]
        return cls(output.token_id, offset, max(found.logprob, LOWEST), alternatives)
