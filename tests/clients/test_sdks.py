"""Libraries that applications are written with. What each of them does is in programs/."""

from __future__ import annotations

import pytest
from environment import PROGRAMS, Environment
from serving import Service

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("openai", ["python", PROGRAMS / "openai_sdk.py"]),
        ("openai-node", ["node", "--test", PROGRAMS / "openai_sdk.cjs"]),
        ("langchain", ["python", PROGRAMS / "langchain_chat.py"]),
        ("litellm", ["python", PROGRAMS / "litellm_chat.py"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_sdk(name: str, command: list[str], request: pytest.FixtureRequest) -> None:
    environment = Environment(name)
    service: Service = request.getfixturevalue("service")
    environment.run(command, service.variables)
