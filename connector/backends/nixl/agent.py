"""NIXL, and the only place that imports it: an agent with typed calls, our errors, and memory checked beforehand.

All calls on one ``Agent`` are made from one thread. The bindings are used directly: the Python wrapper around them
fixes the progress thread's delay at 0, which burns a core on an idle node.
"""

from __future__ import annotations

import ctypes
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
from pdserve.records import KVRegion
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming

logger = logging.getLogger(__name__)

# The progress thread sleeps in poll() and wakes when something arrives; this only bounds a wake-up that was missed.
PROGRESS_DELAY_US = 10_000


class Disconnected(PeerError):
    """The endpoint is dead: nothing that was posted to this peer can land any more."""


class NixlAgent:
    """A NIXL agent with the UCX back end. Raises ConfigError without NIXL, CapacityError when it cannot start."""

    def __init__(self, name: str, timing: PeerTiming = DEFAULT_TIMING) -> None:
        with ucx.settings(timing):
            self._lib = _library()
            self._errors = _errors(self._lib)
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
        """Let peers read, and transfers write, this memory. Raises CapacityError."""
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
        """What a peer needs to connect: addresses and the keys of registered memory."""
        return bytes(self._agent.getLocalMD())

    def add(self, metadata: bytes) -> str:
        """Connect to the agent described by ``metadata``; returns its name. Blocks for seconds. Raises PeerError."""
        with self._translated("connecting"):
            return bytes(self._agent.loadRemoteMD(metadata)).decode(errors="replace")

    def remove(self, peer: str) -> None:
        """Forget a peer. Transfers in flight would go on unseen, so none may be. Holds the GIL."""
        with self._translated(f"removing {peer}"):
            self._agent.invalidateRemoteMD(peer)

    def prepare(self, peer: str | None, region: KVRegion, side: BlockRanges) -> int:
        """Descriptors of one side of a cut; ``peer`` None for our own memory. Raises PeerError."""
        strided = np.empty((len(side.offsets), 5), dtype=np.uint64)
        strided[:, 0] = np.uint64(region.address) + side.offsets.astype(np.uint64)
        strided[:, 1] = side.num_bytes
        strided[:, 2:] = region.device_id, side.block_bytes, side.num_blocks
        owner = self._lib.NIXL_INIT_AGENT if peer is None else peer
        with self._translated("preparing block descriptors"):
            return int(self._agent.prepXferDlist(owner, self._memory_type(region), strided, [self._backend]))

    def release(self, prepared: int) -> None:
        """Give back what ``prepare`` returned."""
        with self._translated("releasing block descriptors"):
            self._agent.releasedDlistH(prepared)

    def read(
        self, local: int, local_ids: NDArray[np.int32], remote: int, remote_ids: NDArray[np.int32]
    ) -> NixlTransfer:
        """A transfer, not yet posted, between prepared descriptors. NIXL merges adjacent ones. Raises PeerError."""
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
    """One posted piece of a read. Its memory is in use until ``done`` says so or Disconnected is raised."""

    def __init__(self, agent: NixlAgent, handle: int) -> None:
        self._agent = agent
        self._handle = handle
        self._released = False

    def __repr__(self) -> str:
        return f"Transfer({self._handle:#x}, released={self._released})"

    def post(self) -> bool:
        """Start. True when it is done already: copies within a host happen in this call. Raises PeerError."""
        with self._agent._translated("posting a read"):
            return self._is_done(self._agent._agent.postXferReq(self._handle, ""))

    def done(self) -> bool:
        """Whether all bytes have arrived. Raises Disconnected, or PeerError when that is not to be known."""
        with self._agent._translated("reading"):
            return self._is_done(self._agent._agent.getXferStatus(self._handle))

    def release(self) -> None:
        """Give the handle back, once the transfer has ended. Idempotent."""
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


def _library() -> Any:
    """The bindings for the CUDA at hand. The package ``nixl`` would import torch; these do not."""
    names = ["nixl_cu12", "nixl_cu13"]
    if _cuda_driver() >= 13_000:
        names.reverse()
    reasons = []
    for name in names:
        if importlib.util.find_spec(name) is None:
            continue
        try:
            bindings = importlib.import_module(f"{name}._bindings")
        except ImportError as error:  # its CUDA libraries are missing; the other build may do
            reasons.append(f"{name}: {error}")
            continue
        logger.debug("using %s", name)
        return bindings
    raise ConfigError(f"NIXL cannot be imported ({'; '.join(reasons) or 'not installed'}); pip install nixl-cu12")


def _errors(bindings: Any) -> tuple[type[Exception], ...]:
    """NIXL's exceptions, which have no base class, and what the bindings make of C++ exceptions."""
    names = [name for name in dir(bindings) if name.startswith("nixl") and name.endswith("Error")]
    return (*(getattr(bindings, name) for name in names), RuntimeError, ValueError, MemoryError)


def _cuda_driver() -> int:
    """Version of the newest CUDA the driver supports, 12080 for 12.8; 0 without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:  # no GPU driver on this machine
        return 0
    version = ctypes.c_int(0)
    return version.value if driver.cuDriverGetVersion(ctypes.byref(version)) == 0 else 0
