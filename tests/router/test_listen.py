"""Addresses that an HTTP port listens on."""

from __future__ import annotations

import socket

import pytest

from pdserve.http.connections import listen


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
@pytest.mark.parametrize("host", ["::", "[::]"])
def test_host_of_two_colons_takes_ipv4_and_ipv6(host: str) -> None:
    with listen(host, 0, "--port") as listener:
        for address in ("127.0.0.1", "::1"):
            socket.create_connection((address, listener.getsockname()[1]), timeout=5.0).close()
