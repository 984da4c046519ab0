"""Decides which prompts D hands off, and whether to recompute after a failed handoff. Counts both."""

from __future__ import annotations

from decode_node.decode_flags import FailurePolicy
from decode_node.decode_metrics import DecodeMetrics
from node.reading.peer import KVPeer
from node.reading.peers import KVPeers
from pdserve.errors import ImagesMissing, Overloaded, PdserveError, PrefillCrashed
from pdserve.request_cost import worth_handoff


def named_peer(peers: KVPeers, prefill_node: str, *, only: bool) -> KVPeer:
    """Return the node that the router has named, or another one if it drains, unless ``only`` it has the pixels.

    Raises PdserveError.
    """
    peer = peers.get(prefill_node)
    if only and peer.node_id != prefill_node:
        raise ImagesMissing(
            f"prefill node {prefill_node} is draining, and the pixels of the prompt are there; put them to another "
            "one, and send the request again"
        )
    return peer


class HandoffPolicy:
    def __init__(self, metrics: DecodeMetrics, min_tokens: int, failure_policy: FailurePolicy) -> None:
        """Prompts that lack KV of fewer than ``min_tokens`` tokens are prefilled on D."""
        self._metrics = metrics
        self._min_tokens = min_tokens
        self._failure_policy = failure_policy

    def choose_handoff(self, uncached_tokens: int, prompt_logprobs: int, *, lacks_pixels: bool = False) -> bool:
        """Return whether to hand off a prompt; if not, count a local prefill.

        ``lacks_pixels``: this node cannot compute the prompt, however short it is.
        """
        worth = worth_handoff(uncached_tokens, prompt_logprobs, 0 if lacks_pixels else self._min_tokens)
        if not worth:
            self._metrics.local_prefills.inc()
        return worth

    def recompute_after(self, error: PdserveError, uncached_tokens: int, *, pull: bool = False) -> bool:
        """Count a failed or refused handoff; return whether to prefill its prompt on D: always, after a pull."""
        refused = isinstance(error, Overloaded)
        (self._metrics.handoff_refusals if refused else self._metrics.handoff_failures).inc()
        if isinstance(error, PrefillCrashed | ImagesMissing):
            return False  # the prompt that ended P's engine may end this one, too; this node lacks the pixels, too
        if self._failure_policy is FailurePolicy.FAIL and not pull:
            return False
        if not refused:
            self._metrics.recomputes.inc()
            self._metrics.recomputed_tokens.inc(uncached_tokens)
        return True
