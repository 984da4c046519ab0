"""The pixels of a prompt's images, as the prompt waits for them on the node that computes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from pdserve.errors import PdserveError
from pdserve.images import ImageInput, Images

OUTCOMES = ("stored", "known", "refused")


class PixelClaim:
    """The pixels that one prompt needs in the engine. This one needs none."""

    def release(self) -> None:
        """Let the engine drop the pixels that no other prompt needs: this one is computed, or has ended. Idempotent."""


NO_CLAIM = PixelClaim()


class ImageUploads:
    """The interface, and a node that encodes no images. node/images/ takes uploads of routers."""

    services: tuple[str, ...] = ()  # full names of the gRPC services that bring pixels
    accepted: ImageInput | None = None  # images that routers may send; None: none

    @property
    def num_bytes(self) -> int:
        """Memory of uploads, in bytes."""
        return 0

    @property
    def counts(self) -> Mapping[str, int]:
        """Uploads that have ended, by outcome."""
        return dict.fromkeys(OUTCOMES, 0)

    def when_ready(
        self, images: Images, then: Callable[[], None], failed: Callable[[PdserveError], None]
    ) -> PixelClaim:
        """Call ``then`` once the engine has the pixels of all ``images``, which may be at once.

        Call ``failed`` instead, later, with ImagesMissing if they do not come in time, or with RequestError if they can
        never come. Neither is called once the claim is released.
        """
        then()
        return NO_CLAIM

    def clear(self) -> None:
        """Forget all uploads: the node begins an epoch. No prompt is open."""

    def close(self) -> None:
        """The node ends. Idempotent."""


NO_UPLOADS = ImageUploads()
