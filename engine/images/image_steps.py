"""Images of prompts, as the scheduler sees them: which tokens of a prompt a step may compute, and what it encodes."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import NamedTuple

from engine.sequence import Sequence
from pdserve.images import EncodedImage, Images, images_among
from pdserve.ipc.messages import DropPixels, PutPixels, Totals
from pdserve.records import StepPlan


class ImageOrders(NamedTuple):
    """Orders of a plan: embeddings to drop, then images to encode."""

    dropped: tuple[bytes, ...] = ()
    encoded: tuple[EncodedImage, ...] = ()


NO_IMAGE_ORDERS = ImageOrders()


class ImageSteps:
    """The interface, and a node that encodes no images: it refuses a prompt that needs one."""

    # ------------------------------------------------------------ commands

    def take(self, pixels: PutPixels | DropPixels) -> None:
        """Take pixels from the frontend, or free some."""

    def forget(self) -> None:
        """Drop all embeddings with the next plan, since other weights make others. No step is in flight."""

    # ------------------------------------------------------------ requests

    def fault(self, images: Images) -> str:
        """Return why a prompt can never be computed, or an empty string."""
        return ""

    def missing(self, sequence: Sequence) -> str:
        """Return why its next tokens can never be computed here: pixels are missing. Empty if they can.

        Images whose tokens all have KV, or get it from a peer, need no pixels.
        """
        image = next(iter(self._to_compute(sequence)), None)
        if image is None:
            return ""
        return (
            f"this node encodes no images, and has to compute the one at token {image.start}: its KV is not cached "
            "here; put the pixels to a node that does, and send the request again"
        )

    def missing_work(self, sequence: Sequence, computed: int) -> int:
        """Return the tokens of a prompt behind the first ``computed`` that steps compute, with the work of images."""
        return max(0, sequence.end_here - computed)

    # ------------------------------------------------------------ a step

    def begin(self, step: int, prompts: Collection[Sequence]) -> None:
        """Begin to plan a step. ``prompts`` run already, first admitted first."""

    def limit(self, sequence: Sequence, num_tokens: int, room: int, held: int, paced: bool = False) -> int:
        """Return how many of its next ``num_tokens`` tokens the step may compute; 0: it has to wait for an image.

        ``room``: tokens that fit into the step, with the work of encoding. ``paced``: sequences decode beside it. Where
        an image has to be in one step, the chunk ends before it, or behind it if these are at most ``held`` tokens.
        """
        return num_tokens

    def cuts(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether a chunk of its next ``num_tokens`` tokens ends inside an image that has to be in one step."""
        return False

    def add(self, sequence: Sequence, num_tokens: int, room: int) -> int:
        """Order what its next ``num_tokens`` tokens need. Return the work of encoding, in tokens of a prompt.

        These are at most as many as ``limit`` allows, of the same ``room``.
        """
        return 0

    def add_piece(self, sequence: Sequence, room: int) -> int:
        """Order a piece of an image that has to be encoded before a sequence goes on. Return its work, as ``add``.

        ``limit`` lets the sequence wait. ``room``: work that fits into the step.
        """
        return 0

    def take_orders(self) -> ImageOrders:
        """Return what the planned step drops and encodes."""
        return NO_IMAGE_ORDERS

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the digests of images that have embeddings now, and of those that lost them, since the last call."""
        return [], []

    def work(self, plan: StepPlan) -> int:
        """Return the work of encoding in a step, in tokens of a prompt."""
        return 0

    def applied(self, step: int) -> None:
        """``step`` has ended."""

    @staticmethod
    def _to_compute(sequence: Sequence) -> Images:
        """Return the images with tokens that steps on this node have to compute."""
        return images_among(sequence.request.images, sequence.num_launched, sequence.end_here)


NO_IMAGES = ImageSteps()
ImagesFactory = Callable[[Totals], ImageSteps]


def no_images(totals: Totals) -> ImageSteps:
    """Return the object of a node that encodes no images."""
    return NO_IMAGES
