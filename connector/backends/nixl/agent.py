"""NIXL: an agent with typed calls and our errors. No other file imports NIXL.

All calls on one ``NixlAgent`` come from one thread. The bindings are used directly: their Python wrapper fixes the
progress thread's delay at 0, which uses a core on an idle node.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from connector.backends.nixl import ucx
from connector.planning.block_slicing import BlockRanges
from pdserve.errors import CapacityError, ConfigError, PeerError
from pdserve.kv.layout import KVRegion
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming

logger = logging.getLogger(__name__)

# The progress thread sleeps in poll() and wakes when data arrives; this only bounds a missed wake-up.
PROGRESS_DELAY_US = 10_000


class Disconnected(PeerError):
    """The endpoint is dead: no posted transfer of this peer can land any more."""


class NixlAgent:
    """A NIXL agent with the UCX back end. Raises ConfigError without NIXL, CapacityError if it cannot start."""

    def __init__(self, name: str, timing: PeerTiming = DEFAULT_TIMING) -> None:
        with ucx.settings(timing):
            self._lib = load_library()
            self._errors = errors_of(self._lib)
            config = self._lib.nixlAgentConfig()
            config.useProgThread = True
            config.pthrDelay = PROGRESS_DELAY_US
            config.syncMode = self._lib.NIXL_THREAD_SYNC_NONE
            try:
                self._agent = self._lib.nixlAgent(name, config)
                self._backend = self._agent.createBackend("UCX", {})
            except self._errors as error:
                raise CapacityError(f"NIXL agent {name} cannot start: {error}; check the UCX_… settings") from error
        self._registered: list[Any] = []

    def register(self, region: KVRegion) -> None:
        """Register memory that peers may read and transfers may write. Raises CapacityError."""
        entry = (region.address, region.num_bytes, region.device_id, "")
        descriptors = self._lib.nixlRegDList(self._memory_type(region), [entry])
        try:
            self._agent.registerMem(descriptors, [self._backend])
        except self._errors as error:
            raise CapacityError(
                f"NIXL cannot register {region.num_bytes} B of {region.device} memory ({error}); "
                "check the limit on locked memory (ulimit -l)"
            ) from error
        self._registered.append(descriptors)

    def metadata(self) -> bytes:
        """Return the addresses and keys of registered memory, which a peer needs to connect."""
        return bytes(self._agent.getLocalMD())

    def add(self, metadata: bytes) -> str:
        """Connect to the agent with this metadata and return its name. Blocks for seconds. Raises PeerError."""
        with self._translated("connecting"):
            return bytes(self._agent.loadRemoteMD(metadata)).decode(errors="replace")

    def remove(self, peer: str) -> None:
        """Forget a peer without transfers in flight: these would go on unseen. Holds the GIL."""
        with self._translated(f"removing {peer}"):
            self._agent.invalidateRemoteMD(peer)

    def prepare(self, peer: str | None, region: KVRegion, ranges: BlockRanges) -> int:
        """Prepare the descriptors of all blocks; ``peer`` None is our own memory. Raises PeerError."""
        strided = np.empty((len(ranges.offsets), 5), dtype=np.uint64)
        strided[:, 0] = np.uint64(region.address) + ranges.offsets.astype(np.uint64)
        strided[:, 1] = ranges.num_bytes
        strided[:, 2:] = region.device_id, ranges.block_bytes, ranges.num_blocks
        owner = self._lib.NIXL_INIT_AGENT if peer is None else peer
        with self._translated("preparing block descriptors"):
            return int(self._agent.prepXferDlist(owner, self._memory_type(region), strided, [self._backend]))

    def release(self, prepared: int) -> None:
        with self._translated("releasing block descriptors"):
            self._agent.releasedDlistH(prepared)

    def read(
        self, local: int, local_ids: NDArray[np.int32], remote: int, remote_ids: NDArray[np.int32]
    ) -> NixlTransfer:
        """Create a transfer between prepared descriptors; NIXL merges adjacent ones. Raises PeerError."""
        with self._translated("creating a transfer"):
            handle = self._agent.makeXferReq(
                self._lib.NIXL_READ, local, local_ids, remote, remote_ids, "", [self._backend], False
            )
        return NixlTransfer(self, handle)

    def close(self) -> None:
        """Destroy the agent and its connections. Holds the GIL. Idempotent."""
        while self._registered:
            with self._translated("deregistering memory"):
                self._agent.deregisterMem(self._registered.pop(), [self._backend])
        self._agent = None

    def _memory_type(self, region: KVRegion) -> Any:
        return self._lib.VRAM_SEG if region.device == "cuda" else self._lib.DRAM_SEG

    @contextmanager
    def _translated(self, doing: str) -> Iterator[None]:
        try:
            yield
        except self._lib.nixlRemoteDisconnectError as error:
            raise Disconnected(f"the connection broke while {doing}") from error
        except self._errors as error:
            raise PeerError(f"{doing} failed: {error}") from error


class NixlTransfer:
    """A transfer. Its local memory is in use until ``done`` returns True or raises Disconnected."""

    def __init__(self, agent: NixlAgent, handle: int) -> None:
        self._agent = agent
        self._handle = handle
        self._released = False

    def __repr__(self) -> str:
        return f"NixlTransfer({self._handle:#x}, released={self._released})"

    def post(self) -> bool:
        """Start, and return whether it is done: copies within a host happen in this call. Raises PeerError."""
        with self._agent._translated("posting a read"):
            return self._is_done(self._agent._agent.postXferReq(self._handle, ""))

    def done(self) -> bool:
        """Whether all bytes have arrived. Raises Disconnected, or PeerError if the state is unknown."""
        with self._agent._translated("reading"):
            return self._is_done(self._agent._agent.getXferStatus(self._handle))

    def release(self) -> None:
        """Free the handle of an ended transfer. Idempotent."""
        if not self._released:
            self._released = True
            with self._agent._translated("releasing a transfer"):
                self._agent._agent.releaseXferReq(self._handle)

    def _is_done(self, status: Any) -> bool:
        if status == self._agent._lib.NIXL_SUCCESS:
            return True
        if status == self._agent._lib.NIXL_IN_PROG:
            return False
        raise PeerError(f"reading failed: {status}")


def load_library() -> Any:
    """Import the bindings for the installed CUDA. The package ``nixl`` would import torch; these do not."""
    names = ["nixl_cu12", "nixl_cu13"]
    if ucx.cuda_driver_version() >= 13_000:
        names.reverse()
    reasons = []
    for name in names:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            bindings = importlib.import_module(f"{name}._bindings")
        except ImportError as error:  # its CUDA libraries are missing; the other build may work
            reasons.append(f"{name}: {error}")
            continue
        logger.debug("using %s", name)
        return bindings
    raise ConfigError(f"NIXL cannot be imported ({'; '.join(reasons) or 'not installed'}); pip install nixl-cu12")


def errors_of(bindings: Any) -> tuple[type[Exception], ...]:
    """Return NIXL's exceptions, which have no base class, and those the bindings make of C++ exceptions."""
    names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return (*(getattr(bindings, name) for name in names), RuntimeError, ValueError, MemoryError)
