"""Client libraries of applications; the tests of each library are in programs/."""

from __future__ import annotations

from pathlib import Path

import pytest
from environment import PROGRAMS, Environment
from serving import REAL_NODES, Service, serve

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

COMMANDS: dict[str, list[str | Path]] = {
    "anthropic": ["python", PROGRAMS / "anthropic_sdk.py"],
    "openai": ["python", PROGRAMS / "openai_sdk.py"],
    "openai-node": ["node", "--test", PROGRAMS / "openai_sdk.cjs"],
    "langchain": ["python", PROGRAMS / "langchain_chat.py"],
    "litellm": ["python", PROGRAMS / "litellm_chat.py"],
    "instructor": ["python", PROGRAMS / "instructor_sdk.py"],
    "openai-agents": ["python", PROGRAMS / "openai_agents.py"],
    "pydantic-ai": ["python", PROGRAMS / "pydantic_ai_agents.py"],
    "ai-sdk": ["node", "--test", PROGRAMS / "ai_sdk.cjs"],
}
#: Sessions with images, at a model that sees; by environment.
WITH_IMAGES = {
    "anthropic": "anthropic_images.py",
    "langchain": "langchain_images.py",
    "litellm": "litellm_images.py",
}
# The SDK keeps its connections, so all tests have one event loop. Our own conftest.py cannot be imported there.
STANDARD = ["pytest", "-c", "/dev/null", "--noconftest", "-p", "no:cacheprovider", "-o", "asyncio_mode=auto"]
STANDARD += [word for kind in ("test", "fixture") for word in ("-o", f"asyncio_default_{kind}_loop_scope=session")]


@pytest.mark.parametrize("name", COMMANDS)
def test_sdk_program_passes(name: str, service: Service) -> None:
    Environment(name).run(COMMANDS[name], service.variables)


@pytest.mark.parametrize("name", WITH_IMAGES)
def test_sdk_program_with_images_passes(name: str, seeing_service: Service) -> None:
    Environment(name).run(["python", PROGRAMS / WITH_IMAGES[name]], seeing_service.variables)


def test_standard_tests_of_langchain_pass(tmp_path: Path) -> None:
    with serve(tmp_path, (*REAL_NODES, "--load-format", "dummy")) as service:
        Environment("langchain").run([*STANDARD, PROGRAMS / "langchain_standard.py"], service.variables)
