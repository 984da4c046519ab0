"""/v1/models, /tokenize, /detokenize, /health, /version and /metrics."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import pytest
from router_process import MODEL
from scripted_node import Conversation, ScriptedNode

from router.text.chat.template import RenderRequest
from router.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


def test_models(client: httpx.Client) -> None:
    listed = client.get("/v1/models").json()
    assert listed["object"] == "list"
    assert [(card["id"], card["object"], card["max_model_len"]) for card in listed["data"]] == [(MODEL, "model", 1000)]
    assert client.get(f"/v1/models/{MODEL}").json() == listed["data"][0]


def test_health_and_version(client: httpx.Client) -> None:
    assert client.get("/health").status_code == client.get("/ping").status_code == 200
    assert client.get("/version").json() == {"version": version("pdserve")}


def test_tokenize_and_detokenize_are_inverse(client: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "naïve 日本 🙂"
    answer = client.post("/tokenize", json={"prompt": text, "return_token_strs": True}).json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["count"] == len(answer["tokens"]) == len(answer["token_strs"])
    assert answer["max_model_len"] == 1000
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}


def test_tokenize_messages(client: httpx.Client, tokenizer: Tokenizer) -> None:
    messages = [{"role": "user", "content": "hi"}]
    for generate in (True, False):
        body = {"model": MODEL, "messages": messages, "add_generation_prompt": generate}
        assert tokenizer.chat_template is not None
        expected = tokenizer.encode(
            tokenizer.chat_template.render(RenderRequest(messages, generate)), add_special_tokens=False
        )
        assert client.post("/tokenize", json=body).json()["tokens"] == expected


def test_tokenize_accepts_text_beyond_the_model_length(client: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "all work and no play " * 5000
    assert client.post("/tokenize", json={"prompt": text}).json()["tokens"] == tokenizer.encode(text)


@pytest.mark.parametrize(
    ("path", "body", "said"),
    [
        ("/tokenize", {}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "messages": []}, "either prompt or messages"),
        ("/tokenize", {"prompt": "a", "x": 1}, "unknown parameter x"),
        ("/detokenize", {}, "tokens is missing"),
        ("/detokenize", {"tokens": [506]}, "506 is outside"),
        ("/detokenize", {"tokens": "a"}, "tokens: expected array"),
    ],
)
def test_invalid_bodies_are_rejected(client: httpx.Client, path: str, body: dict[str, Any], said: str) -> None:
    response = client.post(path, json=body)
    assert response.status_code == 400
    assert said in response.json()["error"]["message"]


def metric(client: httpx.Client, name: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.split("{")[0].split(" ")[0] == name)


def test_metrics_count_requests_and_tokens(client: httpx.Client, scripted_node: ScriptedNode) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(65, cached_tokens=2)
        conversation.token(66)
        conversation.token(67, finish="length")

    scripted_node.scripts["metrics"] = script
    names = [
        "pdserve_requests_total",
        "pdserve_prompt_tokens_total",
        "pdserve_output_tokens_total",
        "pdserve_cached_prompt_tokens_total",
        "pdserve_time_to_first_token_seconds_count",
        "pdserve_inter_token_latency_seconds_count",
        "pdserve_request_duration_seconds_count",
    ]
    before = [metric(client, name) for name in names]
    usage = client.post("/v1/completions", json={"prompt": [1, 2, 3, 4], "cache_salt": "metrics"}).json()["usage"]
    assert usage == {
        "prompt_tokens": 4,
        "completion_tokens": 3,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    after = [metric(client, name) for name in names]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 4, 3, 2, 1, 2, 1]
    assert 'pdserve_nodes_ready{model="small",role="decode"} 1.0' in client.get("/metrics").text


def test_large_token_answers_equal_small_ones(client: httpx.Client, tokenizer: Tokenizer) -> None:
    """Beyond 64 KB an answer comes in pieces."""
    text = "naïve 日本 🙂 " * 10_000
    response = client.post("/tokenize", json={"prompt": text, "return_token_strs": True})
    assert "content-length" not in response.headers
    answer = response.json()
    assert answer["tokens"] == tokenizer.encode(text)
    assert answer["token_strs"] == [tokenizer.token(token_id) for token_id in answer["tokens"]]
    assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json() == {"prompt": text}
    error = client.post("/detokenize", json={"tokens": [*answer["tokens"], 506]}).json()["error"]
    assert "506 is outside" in error["message"]
