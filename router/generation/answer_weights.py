"""The version of the weights that make an answer: one for all of its tokens, and for all prompts of a request.

A node that changes its weights may go on with its requests. Their answers name the versions in order, joined by "+".
"""

from __future__ import annotations

from collections.abc import Callable

from router.fleet.policy import NodeView


class AnswerWeights:
    """Settled by the first token, or by the first of several prompts. Then only nodes with these weights continue."""

    def __init__(self, on_settled: Callable[[str], None]) -> None:
        self.settled = False
        self.mixed = False  # its KV is of several versions
        self._on_settled = on_settled
        self._versions: list[str] = []  # the last one is in use

    def settle(self, node: NodeView) -> None:
        """Take the weights of this node, unless they are settled."""
        if not self.settled:
            self._use(node)

    def change(self, node: NodeView) -> None:
        """The node has changed its weights and continues with these. Nothing happens unless weights are settled."""
        if self.settled and self._versions[-1] != node.weights:
            self._use(node)

    def accepting(self, accepts: Callable[[NodeView], bool] | None) -> Callable[[NodeView], bool] | None:
        """Return ``accepts``, or once settled also whether a node has the weights."""
        if not self.settled:
            return accepts
        return lambda node: node.weights == self._versions[-1] and (accepts is None or accepts(node))

    def _use(self, node: NodeView) -> None:
        self.settled, self.mixed = True, self.settled
        self._versions.append(node.weights)
        self._on_settled("+".join(self._versions))
