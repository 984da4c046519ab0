"""/v1/embeddings, /v1/score and /v1/rerank: a real router in front of prefill nodes that pool."""

from __future__ import annotations

import base64
import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import httpx
import numpy as np
import openai
import pytest
from machine import patience
from router_process import MODEL, RouterProcess, router_process, wait_for
from vector_node import VectorNode, vector_of

from router.gate.api_keys import key_entry, new_key
from router.gate.keys import Client
from router.pooling.batches import MAX_PROMPTS, split
from router.pooling.prompts import DEFAULT_INSTRUCTION, RERANKER_PROMPT
from router.pooling.request_bodies import MAX_INPUTS
from router.text.tokenizer import Tokenizer

SIZE = 1024


@pytest.fixture(scope="module")
def tokenizer(tokenizer_dir: Path) -> Tokenizer:
    return Tokenizer.load(tokenizer_dir)


@pytest.fixture(scope="module")
def nodes() -> Iterator[list[VectorNode]]:
    nodes = [VectorNode(MODEL, "embed", SIZE, name, matryoshka=True) for name in ("p0", "p1")]
    yield nodes
    for node in nodes:
        node.close()


@pytest.fixture(scope="module")
def embedder(tokenizer_dir: Path, nodes: list[VectorNode]) -> Iterator[RouterProcess]:
    flags = ["--prefill", nodes[0].address, "--prefill", nodes[1].address]
    with router_process(tokenizer_dir, flags) as process:
        yield process


@pytest.fixture(scope="module")
def http(embedder: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=embedder.url, timeout=patience(30), trust_env=False) as client:
        wait_for(lambda: num_ready(client) == 2)
        yield client


@pytest.fixture(scope="module")
def classifier() -> Iterator[VectorNode]:
    node = VectorNode(MODEL, "classify", 1, "c0", yes_or_no=True)
    yield node
    node.close()


@pytest.fixture(scope="module")
def scorer(tokenizer_dir: Path, classifier: VectorNode) -> Iterator[httpx.Client]:
    with (
        router_process(tokenizer_dir, ["--prefill", classifier.address]) as process,
        httpx.Client(base_url=process.url, timeout=patience(30), trust_env=False) as client,
    ):
        yield client


def metric(client: httpx.Client, series: str) -> float:
    lines = client.get("/metrics").text.splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))


def num_ready(client: httpx.Client) -> float:
    return metric(client, 'pdserve_nodes_ready{model="small",role="prefill"}')


def post(client: httpx.Client, path: str, **body: Any) -> Any:
    response = client.post(path, json=body)
    assert response.status_code == 200, response.text
    return response.json()


def refused(client: httpx.Client, path: str, status: int = 400, **body: Any) -> tuple[str, str]:
    """Return the message and the field of an error."""
    response = client.post(path, json=body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    return error["message"], error["param"]


def expected(tokenizer: Tokenizer, text: str, size: int = SIZE, weights: str = "") -> list[float]:
    values: list[float] = vector_of(tokenizer.encode(text), SIZE, weights)[:size].tolist()
    return values


# ------------------------------------------------------------ embeddings


def test_router_is_ready_with_prefill_nodes_alone(http: httpx.Client) -> None:
    assert http.get("/health").status_code == 200
    assert http.get("/v1/models").json()["data"][0]["max_model_len"] == 1000


def test_text_has_its_vector_and_usage(http: httpx.Client, tokenizer: Tokenizer) -> None:
    answer = post(http, "/v1/embeddings", input="hello", user="u")
    count = len(tokenizer.encode("hello"))
    assert answer["data"] == [{"index": 0, "embedding": expected(tokenizer, "hello"), "object": "embedding"}]
    assert (answer["object"], answer["model"]) == ("list", MODEL)
    details = {"cached_tokens": 1}
    assert answer["usage"] == {"prompt_tokens": count, "total_tokens": count, "prompt_tokens_details": details}


def test_all_forms_of_input_give_the_same_vectors(http: httpx.Client, tokenizer: Tokenizer) -> None:
    texts = ["one", "another"]
    ids = [tokenizer.encode(text) for text in texts]
    want = [expected(tokenizer, text) for text in texts]
    for given in (texts, ids):
        assert [item["embedding"] for item in post(http, "/v1/embeddings", input=given)["data"]] == want
    assert post(http, "/v1/embeddings", input=ids[1])["data"][0]["embedding"] == want[1]


def test_base64_holds_the_same_float32(http: httpx.Client, tokenizer: Tokenizer) -> None:
    data = post(http, "/v1/embeddings", input="x", encoding_format="base64")["data"]
    assert np.frombuffer(base64.b64decode(data[0]["embedding"]), "<f4").tolist() == expected(tokenizer, "x")


def test_dimensions_reach_the_node(http: httpx.Client, tokenizer: Tokenizer) -> None:
    assert post(http, "/v1/embeddings", input="x", dimensions=8)["data"][0]["embedding"] == expected(tokenizer, "x", 8)


def test_sdk_gets_a_thousand_vectors_from_both_nodes(
    http: httpx.Client, nodes: list[VectorNode], tokenizer: Tokenizer
) -> None:
    before = [node.num_prompts() for node in nodes]
    texts = [f"text {index} " * (1 + index % 7) for index in range(1000)]
    with openai.OpenAI(base_url=f"{http.base_url}/v1", api_key="none", max_retries=0) as sdk:
        for encoding in ("float", "base64"):
            answer = sdk.embeddings.create(model=MODEL, input=texts, encoding_format=encoding)
            assert [item.index for item in answer.data] == list(range(1000))
            for text, item in zip(texts, answer.data, strict=True):
                values: Any = item.embedding
                if isinstance(values, str):
                    values = np.frombuffer(base64.b64decode(values), "<f4").tolist()
                assert values == expected(tokenizer, text)
    counts = [node.num_prompts() - count for node, count in zip(nodes, before, strict=True)]
    assert sum(counts) == 2000
    assert min(counts) > 400
    assert max(len(call.prompts) for node in nodes for call in node.calls) <= MAX_PROMPTS


def test_truncation_keeps_the_last_tokens(http: httpx.Client, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a long text")
    answer = post(http, "/v1/embeddings", input="a long text", truncate_prompt_tokens=3)
    assert answer["data"][0]["embedding"] == vector_of(ids[-3:], SIZE).tolist()
    assert answer["usage"]["prompt_tokens"] == 3
    assert post(http, "/v1/embeddings", input="y" * 1500, truncate_prompt_tokens=-1)["usage"]["prompt_tokens"] == 1000


@pytest.mark.parametrize(
    ("body", "message", "param"),
    [
        ({}, "input is missing", "input"),
        ({"input": []}, "input is empty", "input"),
        ({"input": [[]]}, "text 0 has 0 tokens", "input"),
        ({"input": ["a", 5]}, "list of only one of these kinds", "input"),
        ({"input": [506]}, "token id 506 is outside the vocabulary 0 … 505", "input"),
        ({"input": [-1]}, "token id -1 is outside", "input"),
        ({"input": {"a": 1}}, "expected", "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, f"input has {MAX_INPUTS + 1} texts; the limit is {MAX_INPUTS}", "input"),
        ({"input": ["a", "y" * 1500]}, "text 1 has 15", "input"),
        ({"input": "a", "dimensions": SIZE + 1}, "at most 1024", "dimensions"),
        ({"input": "a", "dimensions": 0}, "dimensions is 0", "dimensions"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format", "encoding_format"),
        ({"input": "a", "dimension": 3}, "did you mean dimensions", "dimension"),
        ({"input": "a", "priority": 2**40}, "priority", "priority"),
    ],
)
def test_bad_embedding_request_names_its_field(
    http: httpx.Client, body: dict[str, Any], message: str, param: str
) -> None:
    problem, field = refused(http, "/v1/embeddings", **body)
    assert message in problem
    assert field == param


def test_generating_endpoints_name_those_of_the_model(http: httpx.Client) -> None:
    message, param = refused(http, "/v1/completions", prompt="a")
    assert message == "model 'small' has the task 'embed', not 'generate'; use /v1/embeddings, /v1/score or /v1/rerank"
    assert param == "model"


def test_generating_model_has_no_embeddings(client: httpx.Client) -> None:
    for path, body in (("/v1/embeddings", {"input": "a"}), ("/v1/rerank", {"query": "a", "documents": ["b"]})):
        message, param = refused(client, path, **body)
        assert "has the task 'generate', not 'embed'; use /v1/completions" in message
        assert param == "model"


# ------------------------------------------------------------ scores and rankings


def cosine(tokenizer: Tokenizer, first: str, second: str) -> float:
    a, b = (vector_of(tokenizer.encode(text), SIZE).astype(np.float64) for text in (first, second))
    return float(a @ b / (np.linalg.norm(a) * np.linalg.norm(b)))


def test_score_of_an_embedding_model_is_the_cosine(http: httpx.Client, tokenizer: Tokenizer) -> None:
    documents = ["b", "cc", "ddd"]
    want = [cosine(tokenizer, "a", document) for document in documents]
    bodies: list[dict[str, Any]] = [
        {"text_1": "a", "text_2": documents},
        {"queries": ["a"], "documents": documents},
    ]
    for body in bodies:
        for path in ("/score", "/v1/score"):
            answer = post(http, path, **body)
            assert [item["score"] for item in answer["data"]] == pytest.approx(want)
    pairs = post(http, "/score", text_1=["a", "b"], text_2=["b", "b"])["data"]
    assert [item["score"] for item in pairs] == pytest.approx([want[0], 1.0])


def test_ranking_is_sorted(http: httpx.Client, tokenizer: Tokenizer) -> None:
    documents = [f"document {index}" for index in range(20)]
    want = sorted(((cosine(tokenizer, "a", text), text) for text in documents), reverse=True)
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        answer = post(http, path, query="a", documents=documents, top_n=3)
        assert [item["document"]["text"] for item in answer["results"]] == [text for _, text in want[:3]]
        assert [item["relevance_score"] for item in answer["results"]] == pytest.approx([s for s, _ in want[:3]])
        assert all(documents[item["index"]] == item["document"]["text"] for item in answer["results"])
    objects = [{"text": text} for text in documents]
    plain = post(http, "/rerank", query="a", documents=objects, return_documents=False)["results"]
    assert len(plain) == 20
    assert "document" not in plain[0]


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/score", {"text_1": "a"}, "give either text_2 or documents"),
        ("/score", {"text_1": "a", "queries": "b", "text_2": "c"}, "give either text_1 or queries"),
        ("/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "2 queries for 1 documents"),
        ("/score", {"text_1": "a", "text_2": []}, "documents is empty"),
        ("/rerank", {"query": "a", "documents": []}, "documents is empty"),
        ("/rerank", {"query": "a", "documents": ["b"], "top_n": -1}, "top_n is -1"),
        ("/rerank", {"query": "a", "documents": ["b"], "instruction": "c"}, "have no instruction"),
        ("/rerank", {"query": "a", "documents": ["b"] * (MAX_INPUTS + 1)}, "2048"),
    ],
)
def test_bad_pairs_are_refused(http: httpx.Client, path: str, body: dict[str, Any], message: str) -> None:
    assert message in refused(http, path, **body)[0]


def test_reranker_sees_its_prompt_form(scorer: httpx.Client, tokenizer: Tokenizer) -> None:
    for instruction in (None, "Judge"):
        scores = post(scorer, "/v1/score", queries="q", documents=["d", "e"], instruction=instruction)["data"]
        for score, document in zip(scores, ["d", "e"], strict=True):
            text = RERANKER_PROMPT.format(instruction=instruction or DEFAULT_INSTRUCTION, query="q", document=document)
            assert score["score"] == pytest.approx(float(vector_of(tokenizer.encode(text), 1)[0]))
    assert (
        "task 'classify', not 'embed'; use /v1/score or /v1/rerank" in refused(scorer, "/v1/embeddings", input="a")[0]
    )


def test_documents_are_cut(scorer: httpx.Client, tokenizer: Tokenizer) -> None:
    document = "one two three four"
    kept = tokenizer.decode(tokenizer.encode(document, add_special_tokens=False)[:5])
    scores = [
        post(scorer, "/v1/rerank", query="q", documents=[text], **fields)["results"][0]["relevance_score"]
        for text, fields in ((document, {"max_tokens_per_doc": 5}), (kept, {}), (document, {"max_tokens_per_doc": 500}))
    ]
    assert len(kept) < len(document)
    assert scores[0] == scores[1] != scores[2]


# ------------------------------------------------------------ failures


def test_killed_node_leaves_exact_answers(http: httpx.Client, nodes: list[VectorNode], tokenizer: Tokenizer) -> None:
    moved = metric(http, "pdserve_migrations_total")
    nodes[1].do(nodes[1].released.clear)
    seen = len(nodes[1].calls)
    texts = [f"number {index}" for index in range(400)]
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, http, "/v1/embeddings", input=texts)
        wait_for(lambda: len(nodes[1].calls) > seen)
        nodes[1].stop()
        data = answer.result()["data"]
    assert [item["embedding"] for item in data] == [expected(tokenizer, text) for text in texts]
    assert metric(http, "pdserve_migrations_total") > moved
    nodes[1].do(nodes[1].released.set)
    nodes[1].start()
    wait_for(lambda: num_ready(http) == 2)


def test_stalled_node_gives_its_prompts_to_another(http: httpx.Client, nodes: list[VectorNode]) -> None:
    node = nodes[1]
    node.do(node.released.clear)
    seen = len(node.calls)
    cancelled = node.cancelled
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, http, "/v1/embeddings", input=[f"stalled {index}" for index in range(400)])
        wait_for(lambda: len(node.calls) > seen)
        node.description.stalled = True
        assert len(answer.result()["data"]) == 400
    wait_for(lambda: node.cancelled > cancelled)
    node.description.stalled = False
    node.do(node.released.set)


# ------------------------------------------------------------ changes of weights


def set_weights(nodes: list[VectorNode], *weights: str) -> None:
    for node, name in zip(nodes, weights, strict=True):
        node.description.weights = name


@pytest.fixture
def versions(nodes: list[VectorNode]) -> Iterator[None]:
    """The nodes have unlike weights until the end of the test."""
    set_weights(nodes, "v1", "v2")
    yield
    set_weights(nodes, "", "")


@pytest.mark.parametrize(("field", "value"), [("size", 1), ("max_model_len", 1), ("vocab_size", 1), ("size", 0)])
def test_a_node_that_describes_itself_wrongly_leaves_exact_answers(
    field: str, value: int, http: httpx.Client, nodes: list[VectorNode], tokenizer: Tokenizer
) -> None:
    described = nodes[0].description.pooling if field == "size" else nodes[0].description
    before = getattr(described, field)
    reports = nodes[0].reports
    setattr(described, field, value)
    try:
        wait_for(lambda: nodes[0].reports > reports + 1)
        for number in range(4):
            for size in (SIZE, 8):
                text = f"{field} {value} {number}"
                fields = {} if size == SIZE else {"dimensions": size}
                answer = post(http, "/v1/embeddings", input=text, **fields)
                assert answer["data"][0]["embedding"] == expected(tokenizer, text, size)
    finally:
        setattr(described, field, before)
    wait_for(lambda: num_ready(http) == 2)


def test_answer_has_vectors_of_the_version_that_it_names(
    versions: None, http: httpx.Client, tokenizer: Tokenizer
) -> None:
    texts = [f"text {index}" for index in range(200)]
    for _ in range(5):
        answer = post(http, "/v1/embeddings", input=texts)
        weights = answer["system_fingerprint"].removeprefix("fp_")
        assert weights in ("v1", "v2")
        vectors = [item["embedding"] for item in answer["data"]]
        assert vectors == [expected(tokenizer, text, weights=weights) for text in texts]
    ranking = post(http, "/v1/rerank", query="text 1", documents=texts)
    assert ranking["results"][0]["index"] == 1, "vectors of another version are unlike"
    assert ranking["system_fingerprint"] in ("fp_v1", "fp_v2")
    assert post(http, "/v1/score", text_1="a", text_2="a")["data"][0]["score"] == pytest.approx(1)


@pytest.mark.parametrize("lost", [False, True])
def test_request_begins_again_when_its_version_is_gone(
    versions: None, http: httpx.Client, nodes: list[VectorNode], tokenizer: Tokenizer, lost: bool
) -> None:
    """The nodes change their weights, or the only node with the version ends."""
    texts = [f"text {index}" for index in range(400)]
    for node in nodes:
        node.do(node.released.clear)
    seen = [len(node.calls) for node in nodes]
    with ThreadPoolExecutor() as pool:
        answer = pool.submit(post, http, "/v1/embeddings", input=texts)
        wait_for(lambda: [len(node.calls) for node in nodes] != seen)
        begun = next(node for node, calls in zip(nodes, seen, strict=True) if len(node.calls) > calls)
        if lost:
            weights = "v2" if begun is nodes[0] else "v1"
            begun.stop()
        else:
            weights = "v3"
            set_weights(nodes, weights, weights)
        for node in nodes:
            node.do(node.released.set)
        data = answer.result()
    assert data["system_fingerprint"] == f"fp_{weights}"
    assert [item["embedding"] for item in data["data"]] == [
        expected(tokenizer, text, weights=weights) for text in texts
    ]
    if lost:
        begun.start()
        wait_for(lambda: num_ready(http) == 2)


# ------------------------------------------------------------ failures of calls


def test_full_nodes_are_tried_again_and_errors_of_requests_are_final(
    http: httpx.Client, nodes: list[VectorNode]
) -> None:
    for node in nodes:
        node.failures.append((grpc.StatusCode.RESOURCE_EXHAUSTED, "full"))
    assert post(http, "/v1/embeddings", input="a")["data"]
    for node in nodes:
        node.failures[:] = [(grpc.StatusCode.INVALID_ARGUMENT, "no such prompt")]
    assert "no such prompt" in refused(http, "/v1/embeddings", input="a")[0]
    for node in nodes:
        node.failures.clear()


def test_texts_that_end_two_engines_are_not_tried_again(http: httpx.Client, nodes: list[VectorNode]) -> None:
    crash = (grpc.StatusCode.ABORTED, "the engine ended")
    nodes[0].failures = [crash]
    nodes[1].failures = []
    assert post(http, "/v1/embeddings", input=["a"] * 4)["data"]
    for node in nodes:
        node.failures = [crash, crash]
    response = http.post("/v1/embeddings", json={"input": "a"})
    assert response.json()["error"]["code"] == "request_crashes_engines"
    assert (response.status_code, response.headers["x-should-retry"]) == (500, "false")
    assert sum(len(node.failures) for node in nodes) == 2
    for node in nodes:
        node.failures = []


def test_disconnect_cancels_the_calls(http: httpx.Client, nodes: list[VectorNode]) -> None:
    for node in nodes:
        node.do(node.released.clear)
    before = sum(node.cancelled for node in nodes)
    with pytest.raises(httpx.ReadTimeout):
        http.post("/v1/embeddings", json={"input": ["a"] * 200}, timeout=0.5)
    wait_for(lambda: sum(node.cancelled for node in nodes) > before)
    wait_for(lambda: metric(http, "pdserve_requests_in_flight") == 0)
    for node in nodes:
        node.do(node.released.set)


def test_deadline_ends_the_request(tokenizer_dir: Path) -> None:
    node = VectorNode(MODEL, "embed", SIZE, "slow")
    node.released.clear()
    flags = ["--prefill", node.address, "--request-timeout", "1"]
    with router_process(tokenizer_dir, flags) as process, httpx.Client(base_url=process.url, trust_env=False) as client:
        message, _ = refused(client, "/v1/embeddings", 504, input="a")
        assert "time limit of 1 s" in message
        message, field = refused(client, "/v1/embeddings", input="a", dimensions=8)
        assert "cannot be shortened" in message
        assert field == "dimensions"
    node.close()


def test_vector_of_another_size_is_a_node_error(tokenizer_dir: Path) -> None:
    node = VectorNode(MODEL, "embed", SIZE, "broken")
    node.size = SIZE - 1
    flags = ["--prefill", node.address, "--migrations", "0"]
    with router_process(tokenizer_dir, flags) as process, httpx.Client(base_url=process.url, trust_env=False) as client:
        assert "it has 1024 values" in refused(client, "/v1/embeddings", 502, input="a")[0]
    node.close()


# ------------------------------------------------------------ the gate


def test_keys_limits_and_salts_hold_for_pooling(tokenizer_dir: Path, tmp_path: Path, nodes: list[VectorNode]) -> None:
    alice = new_key()
    slow = new_key()
    keys = tmp_path / "keys.toml"
    limits = {"alice": "best_priority = 5\n", "slow": "tokens_per_minute = 5\n"}
    keys.write_text("".join(key_entry(name, key) + limits[name] for name, key in (("alice", alice), ("slow", slow))))
    flags = ["--prefill", nodes[0].address, "--api-keys", str(keys), "--max-body-bytes", "4000"]
    with router_process(tokenizer_dir, flags) as process, httpx.Client(base_url=process.url, trust_env=False) as client:
        assert client.post("/v1/embeddings", json={"input": "a"}).status_code == 401
        client.headers["authorization"] = f"Bearer {alice}"
        post(client, "/v1/embeddings", input="a", cache_salt="s", priority=-3)
        call = nodes[0].calls[-1]
        assert call.cache_salt == Client(name="alice", tenant="alice").cache_salt("s")
        assert (call.priority, call.client != 0) == (5, True)
        refused(client, "/v1/embeddings", 413, input="a" * 5000)
        client.headers["authorization"] = f"Bearer {slow}"
        post(client, "/v1/embeddings", input=[1, 2, 3])
        message, _ = refused(client, "/v1/embeddings", 429, input=[1, 2, 3])
        assert "5 tokens per minute" in message


# ------------------------------------------------------------ splitting


def test_split_covers_all_prompts_in_bounded_calls() -> None:
    assert split([5], 4) == [range(1)]
    assert split([20_000, 1, 20_000], 1) == [range(1), range(1, 2), range(2, 3)]
    for lengths in ([10] * 1000, [1000] * 10, [3, 9000, 7] * 50):
        batches = split(lengths, 3)
        assert [index for batch in batches for index in batch] == list(range(len(lengths)))
        assert all(len(batch) <= MAX_PROMPTS for batch in batches)
    assert len(split([1000] * 10, 3)) == math.ceil(10 / 3)
    assert split([100] * 64, 1) == [range(32), range(32, 64)]
