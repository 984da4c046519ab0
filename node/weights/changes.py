"""Changes of the weights of a running node, its sleep and its wake-up: the service that takes orders.

    ready ──order──► draining ──no request, no lease──► loading ──new epoch──► ready
      │                                                    ├── failed, the old weights are in use: ready, the old epoch
      └── refused: nothing has changed                     └── failed half-way: no weights, until a reload succeeds

    ready ──sleep──► draining ──engine ends──► asleep ──wake──► loading ──new epoch──► ready
                                                 └────────failed───┘

Peers and routers see a node that drains and comes back, as at a restart: their streams end, and the new epoch and
compatibility hash keep KV and requests of one version from the other.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, BinaryIO

import grpc
import msgspec

from node.context import NodeContext
from node.health import NodeState
from node.weights.allowed_directory import AllowedDirectory
from pdserve.config.compatibility import weights_hash
from pdserve.config.config_with_weights import with_checkpoint, with_patch, with_reload, without_digests
from pdserve.config.node_config import NodeConfig
from pdserve.config.same_model import check_kv_scales, check_same_model
from pdserve.errors import CapacityError, ConfigError, NodeError, PdserveError, RequestError, cut
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.errors import abort
from pdserve.weights.change import WAIT, WHEN, WeightChange

CHANGES_SERVICE = "pdserve.v1.WeightChanges"

_log = logging.getLogger(__name__)

_MAX_PATCH = 64 << 30  # bytes

Context = grpc.aio.ServicerContext[Any, Any]


class Power(Enum):
    SLEEP = "sleep"
    WAKE = "wake"


@dataclass(frozen=True)
class WeightOrder:
    """A change that all ranks have checked, or another order, and the configuration of the node afterwards."""

    action: WeightChange | Power
    config: NodeConfig
    when: str
    done: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())

    def end(self, error: PdserveError | None = None) -> None:
        """Answer the caller, once."""
        if self.done.done():
            return
        if error is None:
            self.done.set_result(None)
        else:
            self.done.set_exception(error)


class WeightChanges:
    """The orders of one node, one at a time. ``next`` gives each to the node, which carries it out and ends it."""

    def __init__(self, node: NodeContext) -> None:
        self._node = node
        self._turn = asyncio.Lock()
        self._orders: asyncio.Queue[WeightOrder] = asyncio.Queue()

    async def next(self) -> WeightOrder:
        return await self._orders.get()

    async def run(self, change: WeightChange, when: str, changed: Callable[[NodeConfig], NodeConfig]) -> None:
        """Check a change and have it carried out. ``changed`` returns the configuration afterwards, on a thread.

        Raises PdserveError: the old weights are in use, unless the error says that there are none.
        """
        await self._have_done(self._check(change, when, changed))

    async def sleep(self, when: str) -> None:
        """End the engine. Raises PdserveError."""
        await self._have_done(self._check_sleep(when))

    async def wake(self, model_dir: str) -> None:
        """Start the engine again, with another checkpoint of the same model if ``model_dir`` is set.

        Raises PdserveError: the node is asleep still, or was not asleep and cannot load ``model_dir`` so.
        """
        await self._have_done(self._check_wake(model_dir))

    async def _have_done(self, check: Coroutine[Any, Any, WeightOrder | None]) -> None:
        """Hand over the order that ``check`` returns, if any, and wait until it is carried out."""
        if self._turn.locked():
            check.close()
            raise NodeError(f"{self._node.name} changes its weights already; try again when it has ended")
        async with self._turn:
            try:
                order = await check
            except PdserveError:
                self._node.weight_changes["refused"] += 1
                raise
            if order is None:
                return
            self._orders.put_nowait(order)
            try:
                await order.done
            except PdserveError:
                self._node.weight_changes["failed"] += 1
                raise
            self._node.weight_changes["done"] += 1

    async def _check(self, change: WeightChange, when: str, changed: Callable[[NodeConfig], NodeConfig]) -> WeightOrder:
        node = self._node
        self._check_state()
        if node.state is NodeState.UNLOADED and change.patch:
            raise NodeError(f"{node.name} has no weights that a patch could change; reload a checkpoint")
        config = await asyncio.to_thread(changed, node.config)
        if change.model_dir:
            change = msgspec.structs.replace(change, weight_files=config.weight_files)
            if node.engine.has_remote_ranks:
                change = msgspec.structs.replace(change, weights_hash=weights_hash(config.compat_fields))
        await node.engine.check_weights(change)
        return WeightOrder(change, config, when)

    async def _check_sleep(self, when: str) -> WeightOrder | None:
        node = self._node
        if node.state is NodeState.ASLEEP:
            return None
        self._check_state()
        if node.engine.has_remote_ranks:
            raise ConfigError("ranks on other hosts cannot be started again from here; stop the whole node instead")
        return WeightOrder(Power.SLEEP, node.config, when)

    async def _check_wake(self, model_dir: str) -> WeightOrder | None:
        node = self._node
        if node.state is not NodeState.ASLEEP:
            self._check_state()
            if model_dir:
                raise ConfigError(f"{node.name} is not asleep; reload {cut(model_dir)} instead")
            return None
        config = with_checkpoint(node.config, model_dir) if model_dir else without_digests(node.config)
        await asyncio.to_thread(_check_checkpoint, config)
        return WeightOrder(Power.WAKE, config, WAIT)

    def _check_state(self) -> None:
        if self._node.state not in (NodeState.READY, NodeState.UNLOADED):
            raise NodeError(f"{self._node.name} is {self._node.state}; try again when it is ready")


def _check_checkpoint(config: NodeConfig) -> None:
    """Raise CheckpointError unless the checkpoint is still, or as well, one of the node's model."""
    path = Path(config.model_dir)
    check_same_model(config, path)
    if config.compat_fields["weights"] == "checkpoint":
        check_kv_scales(config, path)


class WeightChangesService(pb_grpc.WeightChangesServicer):
    """Takes orders of callers that ``--allow-weight-changes`` admits, for checkpoints below its directory."""

    def __init__(self, node: NodeContext, changes: WeightChanges, root: str) -> None:
        """Without ``root``, all orders are refused."""
        self._node = node
        self._changes = changes
        self._allowed = AllowedDirectory(node.name, root)

    async def Reload(self, request: pb.ReloadRequest, context: Context) -> pb.WeightsChanged:
        async def reload() -> None:
            model_dir = self._allowed.find(request.model_dir)
            change = WeightChange(model_dir=model_dir)
            await self._changes.run(change, self._when(request.when), lambda config: with_reload(config, model_dir))

        return await self._answer(reload, context)

    async def Patch(self, request_iterator: AsyncIterator[pb.PatchPiece], context: Context) -> pb.WeightsChanged:
        async def patch() -> None:
            self._allowed.check()
            if self._node.engine.has_remote_ranks:
                raise ConfigError("a patch reaches the ranks of one host only; reload a checkpoint on all hosts")
            with tempfile.TemporaryDirectory(prefix="pdserve-patch-") as folder:
                path = Path(folder, "patch.safetensors")
                when, digest = await _receive(request_iterator, path)
                change = WeightChange(patch=str(path))
                await self._changes.run(change, self._when(when), lambda config: with_patch(config, digest))

        return await self._answer(patch, context)

    async def Sleep(self, request: pb.SleepRequest, context: Context) -> pb.WeightsChanged:
        async def sleep() -> None:
            self._allowed.check()
            await self._changes.sleep(self._when(request.when))

        return await self._answer(sleep, context)

    async def Wake(self, request: pb.WakeRequest, context: Context) -> pb.WeightsChanged:
        async def wake() -> None:
            self._allowed.check()
            await self._changes.wake(self._allowed.find(request.model_dir) if request.model_dir else "")

        return await self._answer(wake, context)

    async def _answer(self, work: Callable[[], Awaitable[None]], context: Context) -> pb.WeightsChanged:
        task = asyncio.ensure_future(work())  # goes on if the caller leaves
        task.add_done_callback(_log_outcome)
        try:
            await asyncio.shield(task)
        except PdserveError as exc:
            await abort(context, exc)
        node = self._node
        return pb.WeightsChanged(epoch=node.epoch, weights=node.weights, state=node.state)

    def _when(self, when: str) -> str:
        if (when or WAIT) not in WHEN:
            raise RequestError(f"when {cut(when)!r} is none of {', '.join(WHEN)}", "when")
        return when or WAIT


def _log_outcome(task: asyncio.Future[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        _log.warning("an order was not carried out: %s", error)


async def _receive(pieces: AsyncIterator[pb.PatchPiece], path: Path) -> tuple[str, str]:
    """Write a patch to a file. Return ``when`` of the first piece, and the hex SHA-256 of the file."""
    when = ""
    digest = hashlib.sha256()
    size = 0
    with _reporting_full_disk(path), path.open("wb") as file:
        async for piece in pieces:
            when = when or piece.when
            size += len(piece.data)
            if size > _MAX_PATCH:
                raise RequestError(f"the patch has more than {_MAX_PATCH} bytes, which is the limit; send several")
            await asyncio.to_thread(_add, piece.data, file, digest)  # a disk may take long: tokens pass this event loop
    return when, digest.hexdigest()


def _add(data: bytes, file: BinaryIO, digest: hashlib._Hash) -> None:
    digest.update(data)
    file.write(data)


@contextmanager
def _reporting_full_disk(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        raise CapacityError(f"the patch cannot be written to {path.parent}: {exc.strerror}; set TMPDIR") from exc
