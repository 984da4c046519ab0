"""Sampling parameters that a request leaves out are those of the model's generation_config.json."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_process import router_process
from scripted_node import Conversation, ScriptedNode

from pdserve.errors import CheckpointError
from pdserve.model.generation_defaults import load_generation_defaults

MODEL_DEFAULTS = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": 0.05, "repetition_penalty": 1.1}
OTHERS = {"max_new_tokens": 32, "do_sample": True, "eos_token_id": 1, "transformers_version": "5.0.0"}
NO_DEFAULTS = {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "min_p": 0.0, "repetition_penalty": 1.0}
CHAT = {"messages": [{"role": "user", "content": "Hello"}]}


@pytest.fixture(scope="module")
def model_dir(tokenizer_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("defaults") / "model"
    shutil.copytree(tokenizer_dir, directory)
    (directory / "generation_config.json").write_text(json.dumps(MODEL_DEFAULTS | OTHERS))
    return directory


@pytest.fixture(scope="module", params=["auto", "none"])
def served(
    request: pytest.FixtureRequest, model_dir: Path, scripted_node: ScriptedNode
) -> Iterator[tuple[str, httpx.Client]]:
    """``--generation-config`` and a client of a router with it."""
    flags = ["--decode", scripted_node.address, "--generation-config", request.param]
    with router_process(model_dir, flags) as router, httpx.Client(base_url=router.url, trust_env=False) as client:
        yield request.param, client


def sampled(scripted_node: ScriptedNode, client: httpx.Client, path: str, body: dict[str, Any]) -> dict[str, float]:
    """Send a request; return the parameters that reached the node."""

    async def end(conversation: Conversation) -> None:
        conversation.token(5, finish="stop")

    scripted_node.scripts["defaults"] = end
    answer = client.post(path, json={**body, "cache_salt": "defaults"})
    assert answer.status_code == 200, answer.text
    sampling = scripted_node.seen["defaults"].message.sampling
    values = {name: getattr(sampling, name) for name in (*NO_DEFAULTS, "max_tokens")}
    if path == "/v1/responses":
        assert answer.json()["temperature"] == values["temperature"]
        assert answer.json()["top_p"] == values["top_p"]
    return values


@pytest.mark.parametrize(
    ("path", "body", "usual_length"),
    [
        ("/v1/completions", {"prompt": "Hello"}, 16),
        ("/v1/chat/completions", CHAT, None),
        ("/v1/responses", {"input": "Hello"}, None),
    ],
)
def test_absent_parameters_are_the_models(
    served: tuple[str, httpx.Client],
    scripted_node: ScriptedNode,
    path: str,
    body: dict[str, Any],
    usual_length: int | None,
) -> None:
    source, client = served
    values = sampled(scripted_node, client, path, body)
    length = values.pop("max_tokens")
    if source == "auto":
        assert values == MODEL_DEFAULTS
        assert length == 32
    else:
        assert values == NO_DEFAULTS
        assert length == usual_length if usual_length else length > 900  # the rest of the context of 1,000


def test_a_request_overrides_each_default(served: tuple[str, httpx.Client], scripted_node: ScriptedNode) -> None:
    given = {"temperature": 0, "top_p": 1, "top_k": -1, "min_p": 0, "repetition_penalty": 1, "max_tokens": 40}
    values = sampled(scripted_node, served[1], "/v1/chat/completions", {**CHAT, **given})
    assert values == {**given, "top_k": 0}


def test_max_length_counts_the_prompt(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"max_length": 100}')
    defaults = load_generation_defaults(tmp_path)
    assert [defaults.max_tokens(length) for length in (10, 99, 100, 5000)] == [90, 1, 1, 1]


def test_without_the_file_nothing_changes(tmp_path: Path) -> None:
    assert str(load_generation_defaults(tmp_path)) == "none"


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("temperature", 3, "from 0 to 2"),
        ("temperature", "hot", "must be a number"),
        ("top_p", 0, "from 0.000001 to 1"),
        ("top_k", 2.5, "whole number"),
        ("max_new_tokens", True, "must be a number"),
    ],
)
def test_value_that_no_request_may_have_is_refused(tmp_path: Path, field: str, value: Any, words: str) -> None:
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(CheckpointError, match=words):
        load_generation_defaults(tmp_path)
