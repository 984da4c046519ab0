"""Client libraries of applications; the tests of each library are in programs/."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import PROGRAMS, Environment
from serving import Service

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

COMMANDS: dict[str, list[str | Path]] = {
    "anthropic": ["python", PROGRAMS / "anthropic_sdk.py"],
    "openai": ["python", PROGRAMS / "openai_sdk.py"],
    "openai-node": ["node", "--test", PROGRAMS / "openai_sdk.cjs"],
    "langchain": ["python", PROGRAMS / "langchain_chat.py"],
    "litellm": ["python", PROGRAMS / "litellm_chat.py"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_sdk_program_passes(name: str, service: Service) -> None:
    Environment(name).run(COMMANDS[name], service.variables)
