"""Splits the prompts of a request into calls to prefill nodes. Pure."""

from __future__ import annotations

from collections.abc import Sequence

MAX_PROMPTS = 32  # prompts per call: their vectors stay far below ANSWER_LIMIT
MAX_TOKENS = 16_384  # tokens per call, unless a single prompt is longer
MIN_TOKENS = 1024  # tokens; a smaller step takes as long, as it reads all weights


def split(lengths: Sequence[int], num_nodes: int) -> list[range]:
    """Return consecutive prompts for each call; ``lengths`` are in tokens. All nodes get some if there are enough."""
    share = -(-sum(lengths) // max(1, num_nodes))
    most = min(MAX_TOKENS, max(MIN_TOKENS, share))
    batches: list[range] = []
    start = 0
    num_tokens = 0
    for index, length in enumerate(lengths):
        if index > start and (index - start == MAX_PROMPTS or num_tokens + length > most):
            batches.append(range(start, index))
            start = index
            num_tokens = 0
        num_tokens += length
    return [*batches, range(start, len(lengths))]
