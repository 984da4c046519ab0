"""Checks of ``pdserve doctor`` that need neither NIXL nor a device."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import resource
import socket
import struct
import time
from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path

from cli.doctor.findings import Finding, fail, note, ok, warn
from cli.variables import describe_unread, unread_variables
from pdserve.checkpoint.hub import is_hub_id, resolve_model
from pdserve.checkpoint.weight_files import weight_files
from pdserve.config.device import node_devices
from pdserve.config.kernels.flashinfer_hosts import compiler_problem, describe_missing
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.errors import CheckpointError
from pdserve.flags.sources import VARIABLE_PREFIX
from pdserve.host.bytecode import torch_bytecode
from pdserve.kv.transports import Connected
from pdserve.rpc.address import is_loopback, probe_port
from pdserve.rpc.tls import PeerTls

_MIB = 1 << 20
_SHARED_PER_RANK = 1024 * _MIB  # bytes of /dev/shm that suffice for NCCL and UCX; tests of ranks need far less
_FEW_PORTS = 16  # UCX takes one port per rank, network address and peer
_UNSYNCHRONISED = 0x40  # STA_UNSYNC of adjtimex(2)
_NVIDIA = "0x10de"  # vendor of PCI devices
_ACCELERATORS = ("0x03", "0x12")  # classes of PCI devices
_EARLIEST = datetime(2025, 1, 1, tzinfo=UTC)  # an earlier clock was never set: pdserve is younger


def check_device(options: NodeOptions, ranks: int) -> Finding:
    if options.simulated:
        return ok("not needed: the node is simulated")
    devices = node_devices(options, ranks)
    if devices[0].kind == "cuda":
        return ok(f"{len(devices)} × {devices[0].name}, {devices[0].memory / 2**30:.0f} GiB")
    if options.device != "auto":
        return ok("the CPU, as --device says")
    if _has_nvidia_card():
        return warn("no GPU can be used: the CPU is", "check the driver (nvidia-smi), or give --device cpu")
    return ok("the CPU: this machine shows no NVIDIA GPU")


def _has_nvidia_card() -> bool:
    """Return whether the PCI bus has a display device or accelerator of NVIDIA, with a driver or without."""
    devices = Path("/sys/bus/pci/devices")
    return any(
        (device / "vendor").read_text().strip() == _NVIDIA and (device / "class").read_text().startswith(_ACCELERATORS)
        for device in (devices.iterdir() if devices.is_dir() else ())
    )


def check_checkpoint(options: NodeOptions, config: NodeConfig, local: bool) -> Finding:
    """``local``: the weights are on this machine. Raises CheckpointError or OSError."""
    if not local:
        text = f"{config.model.architecture}; the weights of {options.model} are not on this machine"
        return warn(text, "they are downloaded at the start, and were not checked")
    if not options.reads_weights:
        return ok(f"{config.model.architecture}; its weights are not read")
    files = weight_files(resolve_model(options.model))
    for file in files:
        with file.open("rb") as opened:
            opened.read(1)
    size = sum(file.stat().st_size for file in files)
    return ok(f"{config.model.architecture}, {size / 2**30:.2f} GiB in {len(files)} files")


def check_runner(resolved: Callable[[], NodeConfig]) -> Finding:
    """Check which runner a node gets, with the variable that forces one. Raises ConfigError."""
    config = resolved()
    decision = config.decision
    text = f"{decision.runner}: {'; '.join(decision.reasons)}"
    if decision.fallback and config.device.kind == "cuda":
        return warn(text, "V2 is this model's default on a GPU; remove what keeps it from running")
    return ok(text)


def check_attention(config: NodeConfig) -> Finding:
    """Check whether the first start on this machine lacks FlashInfer's kernels."""
    if config.flashinfer_problem:
        return note(*describe_missing(compiler_problem()))
    return ok(config.attention_backend)


def check_variables(parser: ArgumentParser) -> Finding:
    """Check for variables that are misspelled."""
    unread = unread_variables(parser)
    if unread:
        return warn("; ".join(describe_unread(*variable) for variable in unread.items()), "unset or rename it")
    return ok(f"every {VARIABLE_PREFIX}… that is set is read")


def check_bytecode() -> Finding:
    """Check that processes find torch compiled: without bytecode, each start compiles more than a thousand modules."""
    bytecode = torch_bytecode()
    if bytecode.problem:
        return note(bytecode.problem, bytecode.remedy)
    return ok("torch is compiled" if bytecode.is_stored else "the first start compiles torch")


def is_local(options: NodeOptions) -> bool:
    """Return whether the checkpoint can be checked without a download of weights."""
    if not options.reads_weights or not is_hub_id(options.model):
        return True
    try:
        return bool(weight_files(resolve_model(options.model, cached=True)))
    except CheckpointError:
        return False


def check_port(host: str, port: int) -> Finding:
    if port == 0:
        return ok("any free port")
    try:
        probe_port(host, port)
    except OSError as exc:
        return fail(f"{host}:{port}: {(exc.strerror or str(exc)).lower()}", "choose another --port or --host")
    return ok(f"{host}:{port} is free")


def check_ucx_ports(ranks: int, host: str) -> Finding:
    """Check that UCX listens on ports that a firewall can name."""
    text = os.environ.get("UCX_TCP_PORT_RANGE", "")
    if text in ("", "0"):
        if os.environ.get("UCX_NET_DEVICES") == "lo":
            return ok("any, on loopback alone")
        what = "UCX listens on any port, and every host that reaches it can read and write this node's memory"
        if is_loopback(host):
            return note(what, "set UCX_NET_DEVICES=lo, or a firewall, if other hosts reach this machine")
        return warn(what, "set UCX_TCP_PORT_RANGE=20000-20255 and open it to peers alone in the firewall")
    match = re.fullmatch(r"(\d+)-(\d+)", text)
    if match is None or not 0 < int(match[1]) <= int(match[2]) <= 65535:
        return fail(f"UCX_TCP_PORT_RANGE={text} is not a range of ports", "write it like 20000-20255")
    ports = range(int(match[1]), int(match[2]) + 1)
    needed = ranks * _FEW_PORTS
    free = sum(map(_is_free, ports))
    if free < needed:
        return fail(f"{free} of {text} are free; {ranks} ranks may need {needed}", "widen UCX_TCP_PORT_RANGE")
    return ok(f"{free} of {text} are free")


def _is_free(port: int) -> bool:
    with socket.socket() as probe, contextlib.suppress(OSError):
        probe.bind(("", port))
        return True
    return False


def check_clock(tls: bool) -> Finding:
    """Nodes never compare clocks, but certificates and logs depend on them. ``tls``: nodes have certificates."""
    now = datetime.now(UTC)
    if now < _EARLIEST:
        return fail(f"the date is {now:%Y-%m-%d}", "set the clock: certificates are not valid otherwise")
    wall = time.time()
    steady = time.monotonic()
    time.sleep(0.05)
    if abs((time.time() - wall) - (time.monotonic() - steady)) > 0.05:
        return warn("the clock changed during this check", "check chronyd or ntpd")
    if _clock_status() & _UNSYNCHRONISED:
        severity = warn if tls else note
        return severity(f"{now:%Y-%m-%d %H:%M:%S} UTC, not synchronised", "run chronyd or ntpd on this machine")
    return ok(f"{now:%Y-%m-%d %H:%M:%S} UTC, synchronised")


def _clock_status() -> int:
    """Return ``status`` of adjtimex(2), 0 if it cannot be read."""
    timex = ctypes.create_string_buffer(512)  # larger than struct timex; modes 0: read only
    if ctypes.CDLL(None).adjtimex(timex) < 0:
        return 0
    (status,) = struct.unpack_from("I4l i", timex)[-1:]  # after modes, offset, freq, maxerror and esterror
    return int(status)


def check_shared_memory(ranks: int, on_gpu: bool) -> Finding:
    file_system = os.statvfs("/dev/shm")
    size = file_system.f_frsize * file_system.f_blocks
    wanted = _SHARED_PER_RANK * ranks if on_gpu else 64 * _MIB
    text = f"/dev/shm has {size / 2**30:.2f} GiB"
    if size < wanted:
        return warn(
            f"{text}, {wanted / 2**30:.2f} are recommended",
            "mount a larger one: an emptyDir with medium: Memory, or --shm-size",
        )
    return ok(text)


def check_locked_memory(options: NodeOptions, required: str, on_gpu: bool) -> Finding:
    """Check the limit of locked memory, which RDMA needs."""
    limit, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit == resource.RLIM_INFINITY:
        return ok("unlimited")
    text = f"at most {limit / 2**20:.0f} MiB may be locked"
    remedy = "raise the limit (ulimit -l, LimitMEMLOCK of the container runtime) to unlimited"
    if required == "rdma" and limit < (options.kv_cache_memory or 1 << 30) and not on_gpu:
        return fail(text, remedy)
    if on_gpu or required == "rdma":
        return warn(text, remedy)
    return ok(f"{text}; only RDMA needs more")


def check_tls(directory: str | None, host: str) -> Finding:
    if directory is None:
        text = "gRPC is neither encrypted nor authenticated"
        remedy = "give --grpc-tls DIR"
        if is_loopback(host):
            return note(f"{text}, on {host} only", f"{remedy} with a --host that others reach")
        return warn(text, f"{remedy}, or use a network that only nodes can reach")
    PeerTls(directory)
    return ok(f"ca.pem, cert.pem and key.pem in {directory} match")


def check_agents(warnings: Sequence[str]) -> Finding:
    """``warnings`` are UCX's while two agents of NIXL connected."""
    text = "two agents have connected"
    if warnings:
        return warn(f"{text}; UCX says: {'; '.join(warnings)}", "correct or unset these UCX_… variables")
    return ok(text)


def check_requirement(required: str, kind: str, lanes: str) -> Finding:
    """``kind`` is the transport that UCX chooses on this machine among TCP and the required one."""
    if not lanes:
        return warn("UCX does not report its lanes", "unset UCX_LOG_LEVEL and UCX_LOG_FILE")
    text = f"{kind} ({lanes})"
    if required and not Connected("", kind).meets(required):
        remedy = "check UCX_TLS, UCX_NET_DEVICES, and that this container has the device"
        return fail(f"{required} is required, UCX falls back to {text}", remedy)
    if kind == "tcp":
        return warn(text, "give --require-transport rdma or nvlink if this machine has it")
    return ok(text)
