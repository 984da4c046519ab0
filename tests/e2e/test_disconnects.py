"""Requests of disconnected clients free all blocks at every stage."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from disconnects_fleet import STAGES, DisconnectFleet, start_disconnect_fleet

from pdserve.checkpoint.hub import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def fleet() -> Iterator[DisconnectFleet]:
    with start_disconnect_fleet(EMBEDDED_MODEL) as fleet:
        yield fleet


@pytest.mark.parametrize("stage", STAGES)
def test_request_ends_everywhere_when_its_client_disconnects(stage: str, fleet: DisconnectFleet) -> None:
    """Other requests continue; no request would end by itself within the time that the test waits."""
    with fleet.held_at(STAGES[stage]) as disconnect:
        disconnect()
        fleet.wait_until(STAGES[stage].gone, seconds=5.0)
