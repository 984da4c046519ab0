from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import small_tokenizers
from hypothesis import settings
from router_process import MODEL, RouterProcess, router_process
from scripted_node import ScriptedNode

settings.register_profile("no deadline", deadline=None)  # two cores serve the whole suite
settings.load_profile("no deadline")


@pytest.fixture(scope="session")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a chat template."""
    config = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "chat_template": small_tokenizers.CHATML}
    return small_tokenizers.write(tmp_path_factory.mktemp("small"), small_tokenizers.byte_level(), **config)


@pytest.fixture(scope="session")
def scripted_node() -> Iterator[ScriptedNode]:
    node = ScriptedNode(MODEL)
    yield node
    node.close()


@pytest.fixture(scope="session")
def router(tokenizer_dir: Path, scripted_node: ScriptedNode) -> Iterator[RouterProcess]:
    """A router in front of the scripted node. There is no other one that requests could go on at."""
    flags = ["--decode", scripted_node.address, "--request-timeout", "20", "--migrations", "0"]
    with router_process(tokenizer_dir, flags) as process:
        yield process


@pytest.fixture(scope="session")
def client(router: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=20, trust_env=False) as client:
        yield client
