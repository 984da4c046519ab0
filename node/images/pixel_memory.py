"""The memory of pixels on a node, in bytes: of those that arrive, and of those that the engine keeps."""

from __future__ import annotations

from pdserve.errors import Overloaded, RequestError


class PixelMemory:
    """``num_bytes`` never exceeds ``budget``."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> ReservedPixels:
        """Reserve memory of an image. Raises Overloaded if it does not fit now, RequestError if it never does."""
        self.check(num_bytes, "an image")
        if self.num_bytes + num_bytes > self.budget:
            raise Overloaded(
                f"the pixels of an image take {num_bytes} bytes; of the {self.budget} of --image-memory, "
                f"{self.budget - self.num_bytes} are free; send it again later"
            )
        self.num_bytes += num_bytes
        return ReservedPixels(self, num_bytes)

    def check(self, num_bytes: int, owner: str) -> None:
        """Raise RequestError if the pixels of ``owner`` can never be here at once."""
        if num_bytes > self.budget:
            raise RequestError(
                f"the pixels of {owner} take {num_bytes} bytes, more than the {self.budget} of this node's "
                "--image-memory; send fewer or smaller images",
                "images",
            )


class ReservedPixels:
    """A part of the memory, reserved until ``free``."""

    def __init__(self, memory: PixelMemory, num_bytes: int) -> None:
        self._memory = memory
        self._num_bytes = num_bytes

    def hand_over(self) -> ReservedPixels:
        """Return a reservation in place of this one."""
        heir = ReservedPixels(self._memory, self._num_bytes)
        self._num_bytes = 0
        return heir

    def free(self) -> None:
        """Idempotent."""
        self._memory.num_bytes -= self._num_bytes
        self._num_bytes = 0
