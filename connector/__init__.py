"""Worker side of the KV connector, and its choice of back end.

The scheduler side is engine/kv_cache/connector_scheduler.py.

A connector back end is a class with the methods of ``pdserve.protocols.KVConnector``, built from a ConnectorSetup. The
flag ``--kv-connector`` names one of ``BACK_ENDS``, or the operator's own as ``module:Class``. A new one is a file and a
row here. A back end and its libraries are imported when it is built.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from threading import Thread
from typing import cast

import msgspec

from connector.setup import BackEnd, ConnectorSetup
from pdserve.errors import ConfigError
from pdserve.kv.host_copies import HostRoom
from pdserve.kv.layout import KVLayout, KVRegion
from pdserve.protocols import DiskKV, HostMemory, KVConnector, WeightReader, WeightSource
from pdserve.rpc.timeouts import DEFAULT_TIMING, PeerTiming
from pdserve.weights.sharing import OfferedMemory, WeightPeer

BACK_ENDS = {
    "nixl": "connector.backends.nixl.nixl_connector:NixlConnector",  # one-sided reads, between processes and hosts
    "simulated": "connector.backends.simulated:SimulatedConnector",  # moves nothing, takes the time of a cost model
    "none": "connector.backends.null:NullConnector",  # no peers
}
_METHODS = ("register", "connect", "disconnect", "read", "poll", "close")  # methods of KVConnector


def load(name: str) -> BackEnd:
    """Import the back end of a name in BACK_ENDS, or of ``module:Class``. Raises ConfigError."""
    module, colon, attribute = BACK_ENDS.get(name, name).partition(":")
    if not colon:
        raise ConfigError(f"--kv-connector {name!r} is not one of {', '.join(BACK_ENDS)}; name it, or module:Class")
    try:
        back_end = getattr(import_module(module), attribute, None)
    except Exception as exc:  # an operator's module may raise anything
        remedy = "install it, or put its folder into PYTHONPATH"
        problem = f"{type(exc).__name__}: {exc}"
        raise ConfigError(f"--kv-connector {name}: {module} cannot be imported: {problem}; {remedy}") from exc
    if not isinstance(back_end, type):
        raise ConfigError(f"--kv-connector {name}: {module} has no class {attribute!r}; correct the name")
    missing = [method for method in _METHODS if not callable(getattr(back_end, method, None))]
    if missing:
        remedy = "write the methods of pdserve.protocols.KVConnector"
        raise ConfigError(f"--kv-connector {name}: the class lacks {', '.join(missing)}; {remedy}")
    return cast(BackEnd, back_end)


def build(name: str, setup: ConnectorSetup) -> KVConnector:
    """Raises ConfigError for an unknown back end."""
    return load(name)(setup)


def host_memory(
    room: HostRoom, region: KVRegion, layout: KVLayout, setup: ConnectorSetup, on_progress: Callable[[], None]
) -> HostMemory:
    """Return host memory for the KV of one rank. ``on_progress`` is called from any thread."""
    from connector.backends.host_memory import build_host_memory

    return build_host_memory(room, region, layout, setup, on_progress)


def disk_kv(
    root: str,
    limit: int,
    memory: HostMemory,
    layout: KVLayout,
    setup: ConnectorSetup,
    on_progress: Callable[[], None],
) -> DiskKV:
    """Return the files of one rank's KV, up to ``limit`` bytes of all processes, beside its host memory."""
    from connector.backends.disk.disk_threads import DiskSetup, DiskThreads
    from connector.backends.host_memory import CopyingHostMemory

    assert isinstance(memory, CopyingHostMemory)
    part: list[object] = [msgspec.structs.replace(layout, num_blocks=0), setup.shares, setup.rank]
    if (states := setup.states) is not None:
        part += [msgspec.structs.replace(states.layout, num_slots=0), states.share]
    files = DiskSetup(Path(root), limit, setup.agent, repr(part), lists=not setup.rank)
    return DiskThreads(files, memory, on_progress)


def start_early(device_id: int, timing: PeerTiming = DEFAULT_TIMING) -> Thread:
    """Begin to start NIXL, for a rank that will use it on this GPU. Join the thread before using the GPU."""
    from connector.backends.nixl import early_start

    return early_start.start(device_id, timing)


def offer_weights(memory: OfferedMemory, timing: PeerTiming = DEFAULT_TIMING) -> WeightSource:
    """Register a rank's tensors so that peers can read them. Raises ConfigError or CapacityError."""
    from connector.backends.nixl.weight_transfer import NixlWeightSource

    return NixlWeightSource(memory, timing)


def weight_reader(peer: WeightPeer, timing: PeerTiming = DEFAULT_TIMING) -> WeightReader:
    """Return the reader of a peer's tensors; it connects at its first read."""
    from connector.backends.nixl.weight_transfer import NixlWeightReader

    return NixlWeightReader(peer, timing)
