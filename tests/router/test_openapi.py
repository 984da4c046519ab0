"""Responses match the OpenAPI document for any request."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from fleet import Fleet
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from machine import patience
from router_process import MODEL, router_process
from vector_node import VectorNode

from pdserve.checkpoint.hub import EMBEDDED_MODEL

# What fits the schema may be refused all the same: a schema cannot say, for one, what fits the model.
FLAGS = ("--exclude-checks", "positive_data_acceptance", "--seed", "1", "--generation-database", "none")
SIMULATED = ("--engine", "simulated", "--sim-speed", "1000", "--max-model-len", "256")  # short answers


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    """A router that reads tool calls and reasoning, and simulated nodes, which answer at once."""
    with Fleet() as fleet:
        fleet.start_prefill(EMBEDDED_MODEL, SIMULATED)
        fleet.start_decode(EMBEDDED_MODEL, SIMULATED)
        flags = ("--tool-call-parser", "hermes", "--reasoning-parser", "think", "--request-timeout", "30")
        fleet.start_router(EMBEDDED_MODEL, (*flags, "--response-store", "memory"))
        fleet.wait_ready()
        yield fleet


@pytest.fixture(scope="module")
def http(fleet: Fleet) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=fleet.url, timeout=patience(20), trust_env=False) as client:
        yield client


def run_schemathesis(url: str, folder: Path, *flags: str) -> None:
    argv = [str(Path(sys.executable).parent / "schemathesis"), "run", f"{url}/openapi.json", *FLAGS, *flags]
    argv += ["--no-color", "--warnings", "off"]
    result = subprocess.run(argv, cwd=folder, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_schemathesis(fleet: Fleet, tmp_path: Path) -> None:
    run_schemathesis(fleet.url, tmp_path, "--phases", "examples,fuzzing", "--max-examples", "4")


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_schemathesis_at_length(fleet: Fleet, tmp_path: Path) -> None:
    run_schemathesis(fleet.url, tmp_path, "--max-examples", "300")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("task", ["embed", "classify"])
def test_schemathesis_of_pooling(tokenizer_dir: Path, task: str, tmp_path: Path) -> None:
    node = VectorNode(MODEL, task, 8 if task == "embed" else 1, "p0", matryoshka=task == "embed")
    try:
        with router_process(tokenizer_dir, ["--prefill", node.address]) as router:
            paths = ("--include-path-regex", "embeddings|score|rerank")
            run_schemathesis(router.url, tmp_path, "--max-examples", "100", *paths)
        assert node.calls
    finally:
        node.close()


# ---------------------------------------------------------------- bodies that no schema describes

BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "Hi", "max_tokens": 2},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/responses": {"input": [{"role": "user", "content": "Hi"}], "max_output_tokens": 2},
    "/v1/messages": {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2},
    "/v1/messages/count_tokens": {"messages": [{"role": "user", "content": "Hi"}]},
    "/tokenize": {"messages": [{"role": "user", "content": "Hi"}]},
    "/detokenize": {"tokens": [1, 2]},
}
FIELDS = sorted(
    {*("prompt", "messages", "input", "tools", "tool_choice", "stop", "logit_bias", "stream", "stream_options", "n")}
    | {*("seed", "temperature", "echo", "logprobs", "top_logprobs", "documents", "chat_template_kwargs", "text")}
    | {*("reasoning", "reasoning_effort", "response_format", "structured_outputs", "cache_salt", "priority", "user")}
    | {*("model", "continue_final_message", "instructions", "metadata", "include", "tokens", "min_tokens", "suffix")}
    | {*("system", "thinking", "stop_sequences", "tool_use_id", "input_schema", "output_config", "max_tokens")}
    | {*("role", "content", "type", "function", "name", "parameters", "arguments", "tool_calls", "json_schema")}
)
# JSON as text, so that there can be what no value of Python has.
ATOMS = [
    *("null", "true", "0", "-1", "1e400", "-1e-400", "9" * 400, "1.5", "NaN", "Infinity", '""', '"a"', '"text"', "{}"),
    *('"\\ud800"', '"\\udc00x"', '"\\u0000"', '"\\uffff"', '"<think>"', '"<tool_call>"', '"user"', '"function"', "[]"),
    *("[" * 600 + "]" * 600, '{"a":' * 600 + "1" + "}" * 600, '{"a": 1, "a": 2}', '"' + "\\ud83d\\ude42" * 50 + '"'),
]


def _object_of(members: list[tuple[str, str]]) -> str:
    return "{" + ", ".join(f"{json.dumps(name)}: {value}" for name, value in members) + "}"


json_texts = st.recursive(
    st.sampled_from(ATOMS),
    lambda inner: (
        st.lists(inner, max_size=3).map(lambda items: "[" + ", ".join(items) + "]")
        | st.lists(st.tuples(st.sampled_from(FIELDS), inner), max_size=3).map(_object_of)
    ),
    max_leaves=8,
)
changes = st.lists(st.tuples(st.sampled_from(FIELDS), json_texts), max_size=4)


@given(path=st.sampled_from(sorted(BODIES)), changed=changes, cut=st.integers(0, 60))
@settings(max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_json_is_served_or_rejected(
    http: httpx.Client, path: str, changed: list[tuple[str, str]], cut: int
) -> None:
    """Fields come twice where a change has the name of a field; a text may end early."""
    members = [(name, json.dumps(value)) for name, value in BODIES[path].items()]
    body = _object_of(members + changed)
    check(http, path, body.encode()[: len(body) - cut if cut < 10 else None])


@given(path=st.sampled_from(sorted(BODIES)), body=st.binary(max_size=60) | json_texts.map(str.encode))
@settings(max_examples=100, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_bytes_are_served_or_rejected(http: httpx.Client, path: str, body: bytes) -> None:
    check(http, path, body)


def check(http: httpx.Client, path: str, body: bytes) -> None:
    response = http.post(path, content=body)
    assert response.status_code in (200, 400, 404), response.text
    if response.status_code != 200:
        assert response.json()["error"]["message"]
    elif response.headers["content-type"].startswith("application/json"):
        json.loads(response.content)  # is UTF-8, whatever was echoed
