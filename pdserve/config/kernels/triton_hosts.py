"""Whether Triton kernels run on the hosts of a node. It is tried, as an installed package may lack a compiler."""

from __future__ import annotations

import functools
import hashlib
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import msgspec

from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.runner_oracle import VARIABLE, Decision
from pdserve.errors import ConfigError

_SECONDS = 120.0  # a first start compiles and reads much from a cold disk
_MAX_ERROR = 200  # characters
_MARKER = "triton-"


@functools.cache
def try_triton(device: DeviceInfo, interpreted: bool) -> str:
    """Compile and run a kernel on this host; return why that fails, "" if it succeeds.

    A process of its own tries it, as this one never imports torch. Success is remembered on disk for this host, these
    versions and this device, because the trial takes seconds; until ``forget_success``.
    """
    success = _marker(device, interpreted)
    if success.exists():
        return ""
    where = f"cuda:{device.index}" if device.kind == "cuda" else "cpu"
    environ = os.environ | {"TRITON_INTERPRET": "1" if interpreted else "0"}
    command = [sys.executable, "-P", "-m", "runner.kernels.probe", where]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False, env=environ
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        return f"a Triton kernel cannot be tried: {str(exc)[:_MAX_ERROR]}"
    if done.returncode:
        lines = done.stderr.strip().splitlines() or [f"exit status {done.returncode}"]
        return f"a tiny Triton kernel does not run: {lines[-1][:_MAX_ERROR]}"
    with suppress(OSError):
        success.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        success.touch()
    return ""


def forget_success() -> None:
    """Have the next start try a kernel again. A node has failed: perhaps a compiler or a library has gone."""
    for marker in _folder().glob(f"{_MARKER}*"):
        with suppress(OSError):
            marker.unlink()


def _marker(device: DeviceInfo, interpreted: bool) -> Path:
    """Return the file that remembers a success. Hosts may share the folder, but not their compilers and libraries."""
    host = socket.gethostname()
    parts = (host, version("triton"), version("torch"), sys.version, sys.prefix, device.name, device.index, interpreted)
    return _folder() / f"{_MARKER}{hashlib.sha256(repr(parts).encode()).hexdigest()[:32]}"


def _folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "pdserve")


def without_triton(config: NodeConfig, problems: Mapping[str, str]) -> NodeConfig:
    """Return the configuration for a node with hosts that cannot run Triton; ``problems`` says why, by rank and host.

    Raises ConfigError if V2 is forced.
    """
    if not problems or config.attention_backend == "torch":
        return config
    reason = "Triton kernels: " + "; ".join(f"{where}: {problem}" for where, problem in problems.items())
    decision = config.decision
    if decision.runner == "V2":
        if decision.forced:
            raise ConfigError(f"{VARIABLE}=1, but V2 cannot run on all hosts. {reason}. Change that or unset it")
        decision = Decision("V1", (reason,), fallback=True)
    return msgspec.structs.replace(config, decision=decision, attention_backend="torch", cuda_graphs=False)
