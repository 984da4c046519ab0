"""Fixtures of connector tests. Nodes are in kv_nodes.py and kv_rank_groups.py."""

from __future__ import annotations

import pytest


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    """UCX over TCP only, as between hosts: the source's CPU takes part, so a hung source stalls a read."""
    monkeypatch.setenv("UCX_TLS", "tcp")
