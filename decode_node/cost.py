"""Whether a prompt is worth a handoff. Pure."""

from __future__ import annotations


def worth_handoff(uncached_tokens: int, min_tokens: int) -> bool:
    """Whether to prefill on P a prompt of which D lacks the KV of ``uncached_tokens`` tokens, if any.

    A handoff costs a round trip, a read and a confirmation whatever the length, and a short prompt hardly delays the
    decodes that it shares a step with. ``min_tokens`` 0 hands everything off.
    """
    return uncached_tokens >= max(min_tokens, 1)
