"""Clients that go away leave nothing behind, at whatever stage their requests are. How soon: bench/disconnects.py."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from departures import STAGES, Place, start_place

from pdserve.config.embedded import EMBEDDED_MODEL


@pytest.fixture(scope="module")
def place() -> Iterator[Place]:
    with start_place(EMBEDDED_MODEL) as place:
        yield place


@pytest.mark.parametrize("stage", STAGES)
def test_request_ends_everywhere_when_its_client_disconnects(stage: str, place: Place) -> None:
    """Others go on: nothing here would end by itself within the seconds that are waited."""
    with place.held_at(STAGES[stage]) as leave:
        leave()
        place.wait_until(STAGES[stage].gone, seconds=5.0)
