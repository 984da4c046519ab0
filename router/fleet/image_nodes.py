"""Which nodes compute prompts with images: those that encode them, as their descriptions say, all in one way.

A decode node that encodes none continues such prompts: a prefill node that does must compute them, at any length.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from pdserve.errors import Overloaded, RequestError
from pdserve.images import ImageInput, choices_compute_images
from router.fleet.policy import FleetSnapshot, NodeView, Placement
from router.fleet.prefix_index import PromptPrefix

logger = logging.getLogger(__name__)


class ImageNodes:
    """The nodes of a model that encode images. Nodes whose processors differ from ``accepted`` get none."""

    def __init__(self, model: str) -> None:
        self.accepted: ImageInput | None = None  # None: no node that takes images has been ready yet
        self._model = model
        self._warned = False

    def update(self, ready: Mapping[str, ImageInput]) -> None:
        """Take the inputs of the ready nodes by their ids. ``accepted`` stays while one of them, or none, is ready."""
        inputs = [ready[node_id] for node_id in sorted(ready)]
        if inputs and self.accepted not in inputs:
            self.accepted = inputs[0]
        others = sorted(node_id for node_id, accepted in ready.items() if accepted != self.accepted)
        if others and not self._warned:
            self._warned = True
            logger.warning(
                "nodes of model %r process images in different ways: %s get none; serve the same checkpoint on all",
                self._model,
                ", ".join(others),
            )

    def choose(
        self, views: Sequence[NodeView], prefix: PromptPrefix, n: int, *, worth: bool, alone: bool
    ) -> tuple[tuple[NodeView, ...], bool]:
        """Return the nodes for a prompt with images and ``n`` choices, and whether a prefill node may compute it.

        ``worth``: the prompt may be handed off. ``alone``: if possible, no prefill node takes part; nor does any if
        the decode node needs the pixels itself, for choices that compute an image again.
        Raises Overloaded without such nodes, and RequestError if the prompt may not be handed off but has to be.
        """
        views = [view for view in views if view.model == self._model]
        encoders = [view for view in views if view.images is not None and view.images == self.accepted]
        decodes = [view for view in encoders if view.decodes]
        peers = [view for view in encoders if view.prefills]
        if not worth and peers and not decodes:
            raise RequestError(
                "prompt_logprobs of a prompt with images need a decode node that encodes images; leave them out",
                "prompt_logprobs",
            )
        length = prefix.num_tokens
        repeats = any(choices_compute_images(prefix.images, n, length, view.load.block_size) for view in decodes)
        if not worth or repeats or (alone and any(view.ready for view in decodes)):
            return self._checked(decodes), False
        usable = FleetSnapshot(self._model, tuple(peers)).usable("prefill")
        readers = [
            replace(view, role="decode", hands_off_all=True)
            for view in views
            if view.decodes and view not in encoders and any(view.reads_from(peer) for peer in usable)
        ]
        return self._checked([*encoders, *readers]), True

    def check(self, placement: Placement, views: Sequence[NodeView]) -> None:
        """Raise Overloaded if a decode node that encodes no images would compute the prompt."""
        if placement.prefill is None:
            self._checked([view for view in views if view.node_id == placement.decode and view.images is not None])

    def _checked(self, views: Sequence[NodeView]) -> tuple[NodeView, ...]:
        """Return the nodes. Raises Overloaded if none of them decodes, or none is ready."""
        if not any(view.decodes and view.ready for view in views):
            raise Overloaded(f"no node of model {self._model!r} that encodes images is ready; try again shortly")
        return tuple(views)
