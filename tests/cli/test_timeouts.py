"""All timeouts for a silent peer follow from ``--peer-timeout``."""

from __future__ import annotations

import pytest

from pdserve.errors import ConfigError
from pdserve.rpc.timeouts import PeerTiming


@pytest.mark.parametrize("timeout", [1.0, 2.5, 4.0, 30.0, 600.0])
def test_every_failure_detection_fits_the_peer_timeout(timeout: float) -> None:
    timing = PeerTiming(timeout)
    assert timing.probe_after + timing.answer_timeout <= timeout, (
        "gRPC keepalive, Describe, and a frontend that reports a stuck engine"
    )
    assert timing.stall_timeout <= timeout
    ucx = {name.removeprefix("UCX_TCP_"): float(value.removesuffix("s")) for name, value in timing.ucx_settings.items()}
    assert ucx["USER_TIMEOUT"] <= timeout
    if timeout >= 4:  # TCP counts whole seconds
        assert ucx["KEEPIDLE"] + ucx["KEEPINTVL"] * ucx["KEEPCNT"] <= timeout
        assert 2 ** (ucx["SYN_CNT"] + 1) - 1 <= timeout


@pytest.mark.parametrize("timeout", [0.0, -1.0, 0.5, 601.0, float("inf"), float("nan")])
def test_invalid_peer_timeout_is_refused(timeout: float) -> None:
    with pytest.raises(ConfigError, match=r"--peer-timeout \S+ is not within 1 … 600 seconds"):
        PeerTiming(timeout)
