"""The version of the weights of an answer: one for all tokens, and for all prompts of a request."""

from __future__ import annotations

from collections.abc import Callable

from pdserve.adapters.adapter import NO_ADAPTER
from router.fleet.policy import NodeView

_DIGITS = 12  # digits of an adapter's digest in the version of the weights


class AnswerWeights:
    """The weights of the first token, or of the first of several prompts. Only nodes with these weights continue."""

    def __init__(self, on_settled: Callable[[str], None], adapter: str = NO_ADAPTER) -> None:
        """``on_settled`` gets their version: the base's, then that of the ``adapter`` with this digest."""
        self._adapter = adapter
        self.settled = False
        self._on_settled = on_settled
        self._weights = ""

    def settle(self, node: NodeView) -> None:
        """Take the weights of this node, unless they are settled."""
        if not self.settled:
            self.settled = True
            self._weights = node.weights
            of_adapter = f"-{self._adapter[:_DIGITS]}" if self._adapter and node.weights else ""
            self._on_settled(node.weights + of_adapter)

    def accepting(self, accepts: Callable[[NodeView], bool] | None) -> Callable[[NodeView], bool] | None:
        """Return ``accepts``, or once settled also whether a node has the weights."""
        if not self.settled:
            return accepts
        return lambda node: node.weights == self._weights and (accepts is None or accepts(node))
