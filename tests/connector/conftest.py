"""What tests of connectors share beside the nodes of kv_nodes.py and kv_teams.py."""

from __future__ import annotations

import pytest


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """As between machines: the source's CPU takes part, so a source that hangs stalls a read."""
    monkeypatch.setenv("UCX_TLS", "tcp")
