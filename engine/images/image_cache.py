"""The embeddings on the devices of the first stage, as the scheduler counts them: vLLM's encoder cache manager.

An image has embeddings from the step that encodes it until a later plan drops them, least recently used first. The
embeddings of an image are in use while a step that needs them is in flight; they cannot be dropped then.

Routers learn which images have all of their embeddings, or soon will: those that a planned step completes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from pdserve.ipc.key_changes import KeyChanges


class _Entry:
    __slots__ = ("is_complete", "last_step", "num_bytes")

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.last_step = 0  # newest step that needs it
        self.is_complete = False  # a planned step ends its encoding


class ImageCache:
    """``num_bytes`` never exceeds ``capacity``, in bytes on each device.

    ``kept`` of its methods: digests that are not dropped, beside those in use.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.num_bytes = 0
        self._entries: dict[bytes, _Entry] = {}  # least recently used first
        self._applied = 0  # newest step that has ended
        self._dropped: list[bytes] = []  # since the last plan
        self._changes = KeyChanges[bytes]()  # complete images, since the last report

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._entries

    def fits(self, sizes: Mapping[bytes, int], kept: Collection[bytes]) -> bool:
        """Return whether the next step may use all these images: ``sizes`` in bytes, by digest."""
        others = sum(
            entry.num_bytes
            for digest, entry in self._entries.items()
            if digest not in sizes and self._stays(digest, entry, kept)
        )
        return others + sum(sizes.values()) <= self.capacity

    def use(self, digest: bytes, num_bytes: int, step: int, kept: Collection[bytes]) -> bool:
        """Have ``step``, which is being planned, use an image that fits. Return whether it has to encode it."""
        entry = self._entries.pop(digest, None)
        is_new = entry is None
        if entry is None:
            self._make_room(num_bytes, kept)
            entry = _Entry(num_bytes)
            self.num_bytes += num_bytes
        entry.last_step = step
        self._entries[digest] = entry  # now the most recently used one
        return is_new

    def completed(self, digest: bytes) -> None:
        """The step that is being planned ends the encoding of an image."""
        self._entries[digest].is_complete = True
        self._changes.add(digest)

    def take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Return the digests of images that became complete, and of complete ones that went, since the last call."""
        return self._changes.take()

    def applied(self, step: int) -> None:
        """``step`` has ended, and so have all before it."""
        self._applied = step

    def forget(self) -> None:
        """Drop all embeddings: other weights make others. No step is in flight."""
        for digest in tuple(self._entries):
            self.drop(digest)

    def drop(self, digest: bytes) -> None:
        """Drop the embeddings of an image with the next plan. No step in flight reads them."""
        entry = self._entries.pop(digest)
        self.num_bytes -= entry.num_bytes
        self._dropped.append(digest)
        if entry.is_complete:
            self._changes.remove(digest)

    def take_dropped(self) -> tuple[bytes, ...]:
        """Return the digests that the plan being made drops, before it encodes any."""
        dropped = tuple(self._dropped)
        self._dropped = []
        return dropped

    def _make_room(self, num_bytes: int, kept: Collection[bytes]) -> None:
        for digest, entry in tuple(self._entries.items()):
            if self.num_bytes + num_bytes <= self.capacity:
                return
            if not self._stays(digest, entry, kept):
                self.drop(digest)
        assert self.num_bytes + num_bytes <= self.capacity, "an image is encoded that does not fit"

    def _stays(self, digest: bytes, entry: _Entry, kept: Collection[bytes]) -> bool:
        return entry.last_step > self._applied or digest in kept
