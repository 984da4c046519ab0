"""Weights from a peer: the service that offers this node's tensors, and the search for a peer when a node starts.

starting node ──Offer(hash of its own digests)──► peer         another hash: refused, with both hashes
              ◄──names, addresses, NIXL metadata── its frontend
              ──NIXL reads──────────────────────► memory of its ranks; no step takes part
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, AsyncIterator, Mapping
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import grpc
import msgspec

from node.context import NodeContext
from node.health import NodeState
from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.compatibility import weights_hash
from pdserve.config.config_with_weights import with_known_digests
from pdserve.config.node_config import NodeConfig
from pdserve.discovery.sources import source_addresses
from pdserve.errors import ConfigError, NodeError, PeerError, shown
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.channel import open_channel
from pdserve.rpc.errors import abort, error_from_rpc
from pdserve.rpc.field_ranges import check_answer
from pdserve.weights.sharing import RankWeights, StoredSize, TensorPart, WeightPeer, check_rank

WEIGHTS_SERVICE = "pdserve.v1.Weights"

_log = logging.getLogger(__name__)

_TENSORS = 4096  # tensors in a message: about 400 KB
_MAX_TENSORS = 1 << 20  # most tensors of a peer, on all ranks; they take 300 MB here
_MAX_RANKS = 1024  # most ranks of a peer
_MAX_OFFER = 256 << 20  # most bytes of a peer's messages
_ASKED = 8  # peers at a time
_SOURCE_SECONDS = 2.0  # time for the first answer of a source
_OFFER_SECONDS = 10.0
_WAIT_SECONDS = 120.0  # time to wait for a peer, with --load-from peer
_PAUSE_SECONDS = 1.0  # time between two rounds of asking


# ---------------------------------------------------------------- the peer


class WeightsService(pb_grpc.WeightsServicer):
    """Answers from the frontend's state, without a round trip to the engine."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node

    async def Offer(
        self, request: pb.OfferRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[pb.OfferedWeights]:
        try:
            self._check(request.weights_hash)
        except PeerError as exc:
            await abort(context, exc)
        _log.info("weights are offered to %s", context.peer())
        for rank in self._node.engine.weights:
            for message in _messages(rank):
                yield message

    def _check(self, theirs: str) -> None:
        node = self._node
        if node.config.options.load_from == "disk":
            raise PeerError(f"{node.name} offers no weights; start it with --load-from auto")
        if node.state is not NodeState.READY:
            raise PeerError(f"{node.name} is {node.state}")
        mine = weights_hash(node.config.compat_fields)
        if theirs != mine:
            raise PeerError(f"{node.name} has another checkpoint: weights {mine[:16]} there, {theirs[:16]} here")
        if not node.engine.weights:
            raise PeerError(f"{node.name} has no tensor in memory as the checkpoint stores it")


def _messages(rank: RankWeights) -> list[pb.OfferedWeights]:
    fields = TensorPart.__struct_fields__
    messages = []
    for first in range(0, len(rank.parts), _TENSORS):
        tensors = [
            pb.OfferedTensor(**{name: getattr(part, name) for name in fields})
            for part in rank.parts[first : first + _TENSORS]
        ]
        metadata = b"" if first else rank.metadata
        messages.append(
            pb.OfferedWeights(
                agent=rank.agent, metadata=metadata, device=rank.device, device_id=rank.device_id, tensors=tensors
            )
        )
    return messages


# ---------------------------------------------------------------- the node that starts


async def find_weights(node: NodeContext, config: NodeConfig) -> WeightPeer | None:
    """Return a peer that has the checkpoint of ``config`` in memory; None: read the disk.

    Raises NodeError or ConfigError with ``--load-from peer``, if there is no such peer.
    """
    must = config.options.load_from == "peer"
    if not config.options.weight_peers:
        return None
    config_with_digests = await asyncio.to_thread(with_known_digests, config)
    if config_with_digests is None:
        reason = f"the digests of {config.model_dir} are not cached yet, so tensors of a peer could not be checked"
        if must:
            raise ConfigError(f"load_from peer: {reason}; start once with --load-from auto")
        _log.info("weights come from the disk: %s", reason)
        return None
    sizes = await asyncio.to_thread(_stored_sizes, Path(config.model_dir))
    search = _Search(node, weights_hash(config_with_digests.compat_fields), sizes)
    end = asyncio.get_running_loop().time() + (_WAIT_SECONDS if must else 0.0)
    while (peer := await search.ask_all()) is None:
        if asyncio.get_running_loop().time() >= end:
            if must:
                raise NodeError(f"no peer offers weights: {search.reasons}; start one, or give --load-from auto")
            _log.info("weights come from the disk: %s", search.reasons)
            return None
        await asyncio.sleep(_PAUSE_SECONDS)
    return peer


class _Search:
    """Asks the peers of all sources for weights with this hash."""

    def __init__(self, node: NodeContext, weights: str, sizes: Mapping[str, StoredSize]) -> None:
        self.reasons = ""  # refusals in the last round
        self._node = node
        self._weights = weights
        self._sizes = sizes

    async def ask_all(self) -> WeightPeer | None:
        """Return the first of some peers, drawn at random, that offers its weights."""
        sources = self._node.config.options.weight_peers
        answers = await asyncio.gather(*(_first(source_addresses(text)) for text in sources))
        addresses = sorted(frozenset[str]().union(*answers))
        asked = random.sample(addresses, min(_ASKED, len(addresses)))
        calls = [asyncio.create_task(self._ask(address)) for address in asked]
        refusals = []
        try:
            for call in asyncio.as_completed(calls):
                try:
                    return await call
                except PeerError as exc:
                    refusals.append(str(exc))
        finally:
            for task in calls:
                task.cancel()
            await asyncio.gather(*calls, return_exceptions=True)
        self.reasons = "; ".join(refusals) or f"no address at {', '.join(sources)}"
        return None

    async def _ask(self, address: str) -> WeightPeer:
        offer = ReceivedOffer(address, self._sizes)
        async with open_channel(address, self._node.config.options.peer_timing, self._node.tls) as channel:
            request = pb.OfferRequest(weights_hash=self._weights)
            try:
                async for message in pb_grpc.WeightsStub(channel).Offer(request, timeout=_OFFER_SECONDS):
                    offer.add(message)
            except grpc.aio.AioRpcError as exc:
                raise PeerError(str(error_from_rpc(exc, address))) from exc
        return offer.peer()


class ReceivedOffer:
    """Collects a peer's messages, which are not trusted: their number, bytes and places are checked."""

    def __init__(self, address: str, sizes: Mapping[str, StoredSize]) -> None:
        self._address = address
        self._sizes = sizes
        self._ranks: dict[str, list[RankWeights]] = {}
        self._offered: set[tuple[str, str, int, int]] = set()  # rank, tensor, dimension and start of a part
        self._num_bytes = self._num_tensors = 0

    def add(self, message: pb.OfferedWeights) -> None:
        """Add a message. Raises PeerError if it cannot be part of an offer of this checkpoint."""
        check_answer(message, self._address)
        self._num_bytes += message.ByteSize()
        self._num_tensors += len(message.tensors)
        pieces = self._ranks.setdefault(message.agent, [])
        for what, offered, limit in (
            ("bytes", self._num_bytes, _MAX_OFFER),
            ("tensors", self._num_tensors, _MAX_TENSORS),
            ("ranks", len(self._ranks), _MAX_RANKS),
        ):
            if offered > limit:
                raise PeerError(f"{self._address} offers {offered} {what}, the limit is {limit}")
        piece = _rank(message, b"" if pieces else message.metadata)
        try:
            check_rank(piece, self._sizes)
        except PeerError as exc:
            raise PeerError(f"{self._address}: {exc}") from exc
        parts = {(piece.agent, part.name, part.dim, part.start) for part in piece.parts}
        if not parts or len(parts) < len(piece.parts) or not self._offered.isdisjoint(parts):
            raise PeerError(f"{self._address}: rank {shown(piece.agent)} offers nothing, or a part of a tensor twice")
        self._offered |= parts
        pieces.append(piece)

    def peer(self) -> WeightPeer:
        ranks = (
            msgspec.structs.replace(pieces[0], parts=tuple(chain.from_iterable(piece.parts for piece in pieces)))
            for pieces in self._ranks.values()
        )
        return WeightPeer(self._address, tuple(ranks))


def _rank(message: pb.OfferedWeights, metadata: bytes) -> RankWeights:
    fields = TensorPart.__struct_fields__
    parts = tuple(TensorPart(*(getattr(tensor, name) for name in fields)) for tensor in message.tensors)
    return RankWeights(message.agent, metadata, message.device, message.device_id, parts)


def _stored_sizes(model_dir: Path) -> dict[str, StoredSize]:
    """Return the size of each tensor in the checkpoint. Raises CheckpointError."""
    return {
        name: StoredSize(tensor.shape, tensor.end - tensor.begin)
        for tensors in read_headers(model_dir).values()
        for name, tensor in tensors.items()
    }


async def _first(source: AsyncGenerator[frozenset[str], None]) -> frozenset[str]:
    """Return the addresses of a source; none if it does not answer."""
    with suppress(TimeoutError):
        async with asyncio.timeout(_SOURCE_SECONDS):
            return await anext(source)
    return frozenset()
