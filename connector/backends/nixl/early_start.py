"""NIXL's start beside other work: on a host with GPUs the first agent of a process takes 1.2 s, later ones 0.02 s.

An agent that does nothing is started and closed on a thread while the engine imports torch. Errors do not count here:
the agents that are used meet them again.
"""

from __future__ import annotations

import ctypes
import secrets
import threading
from contextlib import suppress

from connector.backends.nixl import ucx
from pdserve.errors import PdserveError
from pdserve.rpc.timeouts import PeerTiming


def start(device_id: int, timing: PeerTiming) -> threading.Thread:
    """Begin, with a context on this GPU as the agents that follow have one.

    The caller joins the thread before it uses the GPU: UCX replaces functions of the CUDA driver while it starts.
    """
    environment_set = threading.Event()
    args = (device_id, timing, environment_set)
    thread = threading.Thread(target=_run, args=args, name="nixl-start", daemon=True)
    thread.start()
    environment_set.wait()  # before the caller loads libraries that read it
    return thread


def _run(device_id: int, timing: PeerTiming, environment_set: threading.Event) -> None:
    with ucx.settings(timing):
        environment_set.set()
        _open_context(device_id)
        from connector.backends.nixl.agent import NixlAgent  # imports numpy, as the caller's thread does meanwhile

        with suppress(PdserveError):
            NixlAgent(f"start-{secrets.token_hex(8)}", timing).close()


def _open_context(device_id: int) -> None:
    """Make the GPU's primary context, which torch uses too, the thread's."""
    with suppress(OSError):  # no GPU driver on this machine
        driver = ctypes.CDLL("libcuda.so.1")
        device = ctypes.c_int(0)
        context = ctypes.c_void_p()
        if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(device), device_id):
            return
        if not driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), device):
            driver.cuCtxSetCurrent(context)
