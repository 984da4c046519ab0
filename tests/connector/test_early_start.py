"""NIXL's start beside other work leaves nothing behind but a process whose next agent starts at once."""

from __future__ import annotations

import os

import connector
from connector.backends.nixl.agent import NixlAgent


def test_agents_start_after_an_early_start_and_the_environment_is_as_before() -> None:
    """There may be no GPU with this number: that is no error here."""
    before = dict(os.environ)
    starting = connector.start_early(0)
    agent = NixlAgent("an agent that starts at the same time")
    starting.join()
    assert dict(os.environ) == before
    assert agent.metadata()
    agent.close()
