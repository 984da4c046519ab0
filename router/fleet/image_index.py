"""Which nodes have the embeddings of which images, and what that saves: the work of encoding, in tokens of a prompt.

    digest, cut to 64 bits ──► a node has the embeddings, under any prefix

A node computes the tokens behind its cached prefix. It encodes the images with tokens there that have no embeddings.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import msgspec

from pdserve.errors import PeerError
from pdserve.hashing import SHORT_HASH_BYTES, unpack_block_hashes
from pdserve.images import EncodingCost, ImageInput, Images, images_among
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.message_limits import MAX_REPORTED_IMAGES


class HeldImages:
    """The images whose embeddings a node has, as it reports them."""

    def __init__(self) -> None:
        self._keys = set[int]()
        self._digest = 0  # XOR of the keys

    def __len__(self) -> int:
        return len(self._keys)

    def change(self, change: pb.CacheChange) -> bool:
        """Return whether the images are now those of the node. Raises PeerError for parts of keys, and too many."""
        try:
            removed = unpack_block_hashes(change.removed)
            added = unpack_block_hashes(change.added)
        except ValueError as exc:
            raise PeerError(f"it sent a part of an image's digest: {exc}") from exc
        for key in removed:
            if key in self._keys:
                self._keys.remove(key)
                self._digest ^= key
        for key in added:
            if key not in self._keys:
                self._keys.add(key)
                self._digest ^= key
        if len(self._keys) > MAX_REPORTED_IMAGES:
            raise PeerError(f"it reports {len(self._keys)} images with embeddings, the limit is {MAX_REPORTED_IMAGES}")
        return not change.HasField("digest") or change.digest == self._digest

    def among(self, images: Images) -> frozenset[bytes]:
        """Return the digests of the images that the node has."""
        return frozenset(image.digest for image in images if _key(image.digest) in self._keys)


class ImageCosts(msgspec.Struct, frozen=True):
    """The costs of encoding images on a node."""

    accepted: ImageInput
    token_cost: EncodingCost

    def work(self, images: Images, held: frozenset[bytes], begin: int, end: int) -> int:
        """Return the work of encoding the images with tokens among ``begin`` … ``end`` - 1 that are not in ``held``."""
        missing = {image.digest: image for image in images_among(images, begin, end) if image.digest not in held}
        return sum(self.token_cost.work(self.accepted.num_embeddings(image)) for image in missing.values())


class PromptImages(msgspec.Struct, frozen=True):
    """The images of a prompt, and which of them have embeddings on which node."""

    images: Images = ()
    held: Mapping[str, frozenset[bytes]] = {}  # digests, by node id; nodes with none are left out

    @classmethod
    def of_nodes(cls, images: Images, nodes: Iterable[tuple[str, HeldImages]]) -> PromptImages:
        """Look the images up on nodes, which are given by their ids."""
        held = {node_id: found for node_id, node in nodes if (found := node.among(images))}
        return cls(images, held)

    def work(self, node_id: str, costs: ImageCosts | None, begin: int, end: int) -> int:
        """Return the work of encoding on a node that computes the tokens ``begin`` … ``end`` - 1."""
        if costs is None or not self.images:
            return 0
        return costs.work(self.images, self.held.get(node_id, frozenset()), begin, end)


NO_IMAGES = PromptImages()


def _key(digest: bytes) -> int:
    return int.from_bytes(digest[:SHORT_HASH_BYTES], "little")
