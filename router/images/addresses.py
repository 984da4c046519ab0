"""Which addresses the router may fetch an image from: those of the public internet, in every notation of IPv6."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
Network = IPv4Network | IPv6Network

_GLOBAL_UNICAST = IPv6Network("2000::/3")  # IANA assigns no other addresses to hosts of the internet
_SPECIAL = (  # registered since, or not in the lists of each Python
    IPv4Network("192.0.0.0/24"),  # RFC 6890: protocol assignments
    IPv4Network("192.88.99.0/24"),  # RFC 7526: relays of 6to4
    IPv6Network("2001::/23"),  # RFC 2928: protocol assignments, Teredo among them
    IPv6Network("3fff::/20"),  # RFC 9637: documentation
)
_NAT64 = IPv6Network("64:ff9b::/96")  # RFC 6052: the last 32 bits are an IPv4 address


def is_public(text: str, allowed: Sequence[str] = ()) -> bool:
    """Return whether an address is one of a host of the public internet, or in an ``allowed`` network.

    An IPv6 address that stands for an IPv4 address is as public as that.
    """
    try:
        address = ip_address(text)
    except ValueError:
        return False
    if any(address in network for network in map(ip_network, allowed)):
        return True
    return _is_public(address)


def _is_public(address: Address) -> bool:
    if any(address in network for network in _SPECIAL):
        return False
    if isinstance(address, IPv4Address):
        return address.is_global and not address.is_multicast
    inner = _embedded(address)
    if inner is not None:
        return _is_public(inner)
    return address in _GLOBAL_UNICAST and address.is_global and address.scope_id is None


def _embedded(address: IPv6Address) -> IPv4Address | None:
    """Return the IPv4 address to which a mapped, NAT64 or 6to4 address leads."""
    if address in _NAT64:
        return IPv4Address(int(address) & 0xFFFF_FFFF)
    return address.ipv4_mapped or address.sixtofour
