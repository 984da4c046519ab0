"""Clients that go away leave nothing behind, at whatever stage their requests are. How soon: bench/disconnects.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from disconnects_fleet import STAGES, DisconnectFleet, start_disconnect_fleet

from pdserve.config.embedded import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def fleet() -> Iterator[DisconnectFleet]:
    with start_disconnect_fleet(EMBEDDED_MODEL) as fleet:
        yield fleet


@pytest.mark.parametrize("stage", STAGES)
def test_request_ends_everywhere_when_its_client_disconnects(stage: str, fleet: DisconnectFleet) -> None:
    """Others go on: nothing here would end by itself within the seconds that are waited."""
    with fleet.held_at(STAGES[stage]) as leave:
        leave()
        fleet.wait_until(STAGES[stage].gone, seconds=5.0)
