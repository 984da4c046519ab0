"""/v1/models, /tokenize, /detokenize, /health, /version, /metrics, /docs; what the server says of itself."""

from __future__ import annotations

import json
import re
from html import escape
from importlib.metadata import version
from pathlib import Path
from typing import Any

import httpx
import jsonschema  # type: ignore[import-untyped]
import pytest
from router_process import MODEL, router_process, wait_for
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


def test_rendered_completion_has_the_tokens_of_tokenize(client: httpx.Client) -> None:
    texts = ["naïve 日本 🙂", "all work and no play"]
    expected = [client.post("/tokenize", json={"prompt": text}).json()["tokens"] for text in texts]
    body = {"model": MODEL, "prompt": texts, "max_tokens": 5, "temperature": 0.5, "n": 2}
    rendered = client.post("/v1/completions/render", json=body).json()
    assert rendered == [{"model": MODEL, "token_ids": tokens, "features": None} for tokens in expected]
    body = {"prompt": expected[0], "truncate_prompt_tokens": 3}
    assert client.post("/v1/completions/render", json=body).json()[0]["token_ids"] == expected[0][-3:]


def test_rendered_chat_has_the_tokens_of_tokenize(client: httpx.Client) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    for fields in ({}, {"tools": [tool]}, {"add_generation_prompt": False}, {"chat_template_kwargs": {"x": 1}}):
        chat = {"model": MODEL, "messages": messages, **fields}
        expected = client.post("/tokenize", json=chat).json()["tokens"]
        rendered = client.post("/v1/chat/completions/render", json=chat | {"max_tokens": 3}).json()
        assert rendered == {"model": MODEL, "token_ids": expected, "features": None}


def test_render_refuses_what_the_endpoint_itself_refuses(client: httpx.Client) -> None:
    for body in ({}, {"prompt": [10**9]}, {"prompt": "x", "temperatur": 1}, {"prompt": "x", "model": "other"}):
        answers = [client.post(f"/v1/completions{path}", json=body) for path in ("", "/render")]
        assert answers[0].status_code == answers[1].status_code in (400, 404)
        assert answers[0].json()["error"] == answers[1].json()["error"]


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


# ---------------------------------------------------------------- the server itself


def test_load_counts_requests_in_progress(client: httpx.Client, scripted_node: ScriptedNode) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(65)
        await conversation.cancelled.wait()

    scripted_node.scripts["load"] = script
    wait_for(lambda: client.get("/load").json() == {"server_load": 0})  # requests of other tests may be ending
    with client.stream("POST", "/v1/completions", json={"prompt": "a", "stream": True, "cache_salt": "load"}):
        assert client.get("/load").json() == {"server_load": 1}


def test_server_info_has_no_path_and_no_address(client: httpx.Client, tokenizer_dir: Path) -> None:
    response = client.get("/server_info")
    info = response.json()
    assert info["version"] == version("pdserve")
    assert info["options"]["migrations"] == 0
    assert info["models"] == [{"names": [MODEL], "ready_nodes": {"decode": 1}, "generation_defaults": {}}]
    assert str(tokenizer_dir) not in response.text
    assert "127.0.0.1" not in response.text


def test_tokenizer_info_is_off_by_default(client: httpx.Client) -> None:
    response = client.get("/tokenizer_info")
    assert response.status_code == 404
    assert "--enable-tokenizer-info-endpoint" in response.json()["error"]["message"]


def test_several_served_names_and_tokenizer_info(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    async def script(conversation: Conversation) -> None:
        conversation.token(65, finish="length")

    scripted_node.scripts["names"] = script
    flags = ["--served-model-name", MODEL, "b", "c/d", "--enable-tokenizer-info-endpoint"]
    flags += ["--decode", scripted_node.address]
    with router_process(tokenizer_dir, flags) as process, httpx.Client(base_url=process.url, trust_env=False) as http:
        for name in (MODEL, "b", "c/d"):
            body = {"model": name, "prompt": [1], "cache_salt": "names"}
            assert http.post("/v1/completions", json=body).json()["model"] == MODEL
            assert http.get(f"/v1/models/{name}").json()["id"] == name
        assert [card["id"] for card in http.get("/v1/models").json()["data"]] == [MODEL, "b", "c/d"]
        assert http.post("/v1/completions", json={"prompt": [1], "cache_salt": "names"}).status_code == 200
        assert http.post("/v1/completions", json={"model": "d", "prompt": [1]}).status_code == 404
        info = http.get("/tokenizer_info", params={"model": "b"}).json()
        assert info["eos_token"] == "<|im_end|>"
        assert info["chat_template"] == Tokenizer.load(tokenizer_dir).chat_template.source  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("method", "path"),
    [("GET", "/health"), ("GET", "/nothing"), ("POST", "/tokenize"), ("POST", "/v1/messages/count_tokens")],
)
def test_every_answer_has_the_request_s_id(client: httpx.Client, method: str, path: str) -> None:
    answers = [client.request(method, path, headers={"X-Request-Id": given}, json={}) for given in ("a-1", "a b")]
    assert answers[0].headers["x-request-id"] == "a-1"
    assert len(answers[1].headers["x-request-id"]) == 32
    assert ("request-id" in answers[0].headers) == path.startswith("/v1/messages")


def test_docs_page_describes_every_path_without_scripts(client: httpx.Client) -> None:
    response = client.get("/docs")
    assert response.headers["content-security-policy"].startswith("default-src 'none'")
    assert "<script" not in response.text
    document = client.get("/openapi.json").json()
    names = set(re.findall(r"<a href=#(\w+)>", response.text))
    assert names <= document["components"]["schemas"].keys() == set(re.findall(r"<h3 id=(\w+)>", response.text))
    for path, methods in document["paths"].items():
        for method in methods:
            assert f"<b class={method}>{method.upper()}</b> <code>{path}</code>" in response.text
    assert "Lower values run earlier." in response.text
    assert "<code>starting_after</code></td><td data-title=In>query</td>" in response.text


def test_docs_page_has_an_example_of_each_operation_that_fits_its_schema(client: httpx.Client) -> None:
    page = client.get("/docs").text
    document = client.get("/openapi.json").json()
    for path, methods in document["paths"].items():
        assert f" http://127.0.0.1:8000{path.replace('{id}', 'ID')}" in page
        for operation in methods.values():
            if "requestBody" in operation:
                body = operation["requestBody"]["content"]["application/json"]
                jsonschema.validate(body["example"], body["schema"] | {"components": document["components"]})
                assert escape(json.dumps(body["example"], separators=(",", ":"))) in page
