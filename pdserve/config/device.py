"""Find the devices of this machine without torch, through the CUDA driver API."""

from __future__ import annotations

import ctypes
import os
from importlib.util import find_spec

from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.errors import CapacityError, ConfigError
from pdserve.host import memory_limits

#: Packages that no node with a model can do without; the distribution pdserve-router (deploy/router) lacks them.
_PACKAGES = ("torch", "safetensors")
_MAJOR = 75  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR
_MINOR = 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR
_SIMULATED = DeviceInfo(kind="simulated", index=0, name="simulated", memory=0)


def detect_devices(spec: str, count: int) -> tuple[DeviceInfo, ...]:
    """Return a device for each of ``count`` ranks on this host: ``count`` GPUs from cuda:N on, or the CPU for all.

    ``spec`` is "auto", "cpu", "cuda" or "cuda:N"; "auto" takes GPUs if there are any. Raises ConfigError for any other
    word and CapacityError for a missing GPU.
    """
    kind, _, index_text = spec.partition(":")
    if kind not in ("auto", "cpu", "cuda") or (index_text and (kind != "cuda" or not index_text.isdecimal())):
        raise ConfigError(f"device {spec!r} is not one of auto, cpu, cuda, cuda:N")
    if kind == "cpu":
        return (_cpu(),) * count
    gpus = find_gpus()
    first = int(index_text or 0)
    if first + count <= len(gpus):
        return tuple(gpus[first : first + count])
    if kind == "auto" and not gpus:
        return (_cpu(),) * count
    wanted = f"{count} ranks need {count} GPUs from cuda:{first} on, but " if count > 1 else ""
    raise CapacityError(f"device {spec}: {wanted}{len(gpus)} CUDA devices found; use --device cpu or check the driver")


def node_devices(options: NodeOptions, count: int) -> tuple[DeviceInfo, ...]:
    """Return the devices for ``count`` ranks of a node on this host. Raises ConfigError if it could not use them."""
    if options.simulated:
        return (_SIMULATED,) * count
    missing = [name for name in _PACKAGES if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"{' and '.join(missing)} not installed, which nodes with a model need; install pdserve in place of "
            "pdserve-router, or give --engine simulated"
        )
    return detect_devices(options.device, count)


def _cpu() -> DeviceInfo:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return DeviceInfo(kind="cpu", index=0, name="CPU", memory=memory)


def find_gpus() -> list[DeviceInfo]:
    """Return all GPUs of the CUDA driver; none without a driver."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return []
    count = ctypes.c_int(0)
    if driver.cuInit(0) or driver.cuDeviceGetCount(ctypes.byref(count)):
        return []
    devices = []
    for index in range(count.value):
        handle = ctypes.c_int(0)
        memory = ctypes.c_size_t(0)
        name = ctypes.create_string_buffer(128)
        if driver.cuDeviceGet(ctypes.byref(handle), index):
            continue
        driver.cuDeviceTotalMem_v2(ctypes.byref(memory), handle)
        driver.cuDeviceGetName(name, len(name), handle)
        capability = _attribute(driver, handle, _MAJOR), _attribute(driver, handle, _MINOR)
        devices.append(DeviceInfo("cuda", index, name.value.decode(), memory.value, capability))
    return devices


def free_memory(device: DeviceInfo) -> int | None:
    """Return the bytes that can still be allocated on a device; None if unknown."""
    return _free_gpu_memory(device.index) if device.kind == "cuda" else memory_limits.free_memory()


def _free_gpu_memory(index: int) -> int | None:
    """Ask the driver, which needs the GPU's primary context for it; this context ends with the question."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    handle = ctypes.c_int(0)
    context = ctypes.c_void_p()
    if driver.cuInit(0) or driver.cuDeviceGet(ctypes.byref(handle), index):
        return None
    if driver.cuDevicePrimaryCtxRetain(ctypes.byref(context), handle):
        return None
    try:
        if driver.cuCtxPushCurrent_v2(context):
            return None
        free = ctypes.c_size_t(0)
        total = ctypes.c_size_t(0)
        failed = driver.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total))
        driver.cuCtxPopCurrent_v2(ctypes.byref(context))
        return None if failed else free.value
    finally:
        driver.cuDevicePrimaryCtxRelease_v2(handle)


def _attribute(driver: ctypes.CDLL, handle: ctypes.c_int, attribute: int) -> int:
    value = ctypes.c_int(0)
    driver.cuDeviceGetAttribute(ctypes.byref(value), attribute, handle)
    return value.value
