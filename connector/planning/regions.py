"""Checks of memory that a rank announces to others."""

from __future__ import annotations

from pdserve.errors import PeerError
from pdserve.kv.layout import KVRegion

DEVICES = ("cpu", "cuda")
ADDRESS_SPACE = 2**64  # bytes


def check_region(region: KVRegion, num_bytes: int, what: str) -> None:
    """Raise PeerError unless ``num_bytes`` lie inside ``region`` and the region inside memory."""
    if region.device not in DEVICES:
        raise PeerError(f"KV memory on device {region.device!r}; known are {', '.join(DEVICES)}")
    if region.device_id < 0:
        raise PeerError(f"KV memory on device number {region.device_id}; it must be at least 0")
    if num_bytes < 1 or num_bytes > region.num_bytes:
        raise PeerError(f"{what} take {num_bytes} B, the region has {region.num_bytes} B")
    if region.address < 1 or region.address + region.num_bytes > ADDRESS_SPACE:
        raise PeerError(f"a region of {region.num_bytes} B at {region.address:#x} is outside of memory")
