"""API keys, rate limits and admission over HTTP, against a real router and a scripted node."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest
from exposition import metrics_url
from machine import patience
from router_process import MODEL, RouterProcess, router_process, wait_for
from scripted_node import Conversation, ScriptedNode

from cli.main import main
from pdserve.errors import ConfigError
from pdserve.pb import pdserve_pb2 as pb
from router.dashboard.live import STATE_PATH
from router.gate.api_keys import key_entry, new_key
from router.gate.keys import Client, parse_keys
from router.gate.refused_keys import MAX_NETWORKS, PER_MINUTE, RefusedKeys

NAMES = ("alice", "bob", "slow", "tokens", "single", "humble")
KEYS = {name: new_key() for name in NAMES}
LIMITS = {
    "slow": "requests_per_minute = 2",
    "tokens": "tokens_per_minute = 30",
    "single": "max_concurrent = 1",
    "humble": "best_priority = 5",
}


def entries(*names: str) -> str:
    return "\n".join(key_entry(name, KEYS[name]) + LIMITS.get(name, "") for name in names)


async def answer(conversation: Conversation) -> None:
    for token_id in (65, 66):
        conversation.token(token_id)
    conversation.token(67, finish="length")


async def linger(conversation: Conversation) -> None:
    conversation.token(65)
    await conversation.cancelled.wait()


def salted(name: str, salt: str) -> str:
    """Return the salt that a node gets."""
    return Client(name=name, tenant=name).cache_salt(salt)


SCRIPTS = {"answer": answer, "linger": linger}
SCRIPTS |= {salted(name, salt): script for name in NAMES for salt, script in SCRIPTS.items()}


@pytest.fixture(scope="module")
def key_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("secret") / "keys.toml"
    path.write_text(entries(*NAMES))
    return path


@pytest.fixture(scope="module")
def guarded(tokenizer_dir: Path, scripted_node: ScriptedNode, key_file: Path) -> Iterator[RouterProcess]:
    """A router with API keys, one slot and one waiting request."""
    scripted_node.scripts |= SCRIPTS
    flags = ["--decode", scripted_node.address, "--api-keys", str(key_file), "--max-inflight", "1", "--max-queue", "1"]
    flags += ["--metrics-client-names", "--sse-keep-alive", "0.5"]  # it sees within 0.5 s that a client has left
    with router_process(tokenizer_dir, flags) as process:
        yield process


@pytest.fixture(scope="module")
def http(guarded: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=guarded.url, trust_env=False, timeout=patience(20)) as client:
        yield client


def headers(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[name]}"}


def ask(http: httpx.Client, name: str, salt: str = "answer", **fields: object) -> httpx.Response:
    body = {"prompt": [1] * 10, "cache_salt": salt, **fields}
    return http.post("/v1/completions", json=body, headers=headers(name))


@contextmanager
def lingering(http: httpx.Client, name: str) -> Iterator[None]:
    """Hold a slot with a stream until the block ends."""
    body = {"prompt": [1], "cache_salt": "linger", "stream": True}
    with http.stream("POST", "/v1/completions", json=body, headers=headers(name)) as response:
        chunks = response.iter_raw()  # keeps the connection open
        next(chunks)
        yield


def metric(http: httpx.Client, series: str) -> float:
    text = http.get("/metrics", headers=headers("alice")).text
    match = re.search(rf"^{re.escape(series)} (\S+)$", text, re.MULTILINE)
    return float(match[1]) if match else 0.0


@pytest.mark.parametrize(
    "authorization",
    [
        None,
        "Bearer",
        "Bearer wrong",
        f"Basic {KEYS['alice']}",
        f"Bearer {KEYS['alice'][:-1]}",
        "Bearer \xff\xfe",
        KEYS["alice"],
    ],
    ids=["none", "no key", "wrong", "another scheme", "cut", "not ASCII", "no scheme"],  # keys differ in each run
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/tokenize", "/nothing/there"])
def test_missing_or_malformed_key_gets_401(http: httpx.Client, path: str, authorization: str | None) -> None:
    sent = [] if authorization is None else [(b"Authorization", authorization.encode("latin-1"))]
    response = http.request("POST" if "models" not in path else "GET", path, headers=sent, content=b"{}")
    assert response.status_code == 401
    assert response.headers["www-authenticate"] == "Bearer"
    error = response.json()["error"]
    assert (error["type"], error["code"]) == ("invalid_request_error", "invalid_api_key")
    assert KEYS["alice"] not in response.text


@pytest.mark.parametrize(
    ("sent", "status"),
    [
        ([("X-Api-Key", "alice")], 200),
        ([("X-Api-Key", "alice"), ("X-Api-Key", "alice")], 401),
        ([("X-Api-Key", "wrong")], 401),
        ([("Authorization", "alice"), ("X-Api-Key", "wrong")], 200),
        ([("Authorization", "wrong"), ("X-Api-Key", "alice")], 401),
    ],
    ids=["one", "two", "wrong", "beside a bearer token", "beside a wrong bearer token"],
)
def test_key_in_x_api_key_counts_without_authorization(
    http: httpx.Client, sent: list[tuple[str, str]], status: int
) -> None:
    values = [(name, KEYS.get(key, key)) for name, key in sent]
    pairs = [(name, f"Bearer {value}" if name == "Authorization" else value) for name, value in values]
    assert http.get("/v1/models", headers=pairs).status_code == status


def test_missing_key_gets_an_error_of_the_path_s_protocol(http: httpx.Client) -> None:
    answer = http.post("/v1/messages", json={}).json()
    assert (answer["type"], answer["error"]["type"]) == ("error", "authentication_error")


def test_wrong_key_is_rejected_in_openai_words(http: httpx.Client) -> None:
    response = http.get("/v1/models", headers={"Authorization": "Bearer wrong"})
    assert response.json()["error"]["message"].startswith("Incorrect API key provided")


def test_only_health_and_the_page_of_endpoints_are_open(http: httpx.Client) -> None:
    assert http.get("/docs").status_code == 200
    for path in ("/health", "/health/live"):
        assert (http.get(path).status_code, http.get(path).json()) == (200, {"status": "ok"})
    assert [http.get(path).status_code for path in ("/metrics", "/version", "/openapi.json")] == [401] * 3


def test_metrics_need_a_key_or_their_port_and_name_no_client(
    tokenizer_dir: Path, scripted_node: ScriptedNode, key_file: Path
) -> None:
    scripted_node.scripts |= SCRIPTS
    flags = ["--decode", scripted_node.address, "--api-keys", str(key_file), "--metrics-port", "0"]
    with (
        router_process(tokenizer_dir, flags) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as http,
    ):
        assert ask(http, "alice").status_code == 200
        assert http.get("/metrics").status_code == 401
        texts = [http.get("/metrics", headers=headers("bob")).text, http.get(metrics_url(process)).text]
        state = http.get(STATE_PATH, headers=headers("bob"))
        assert http.get(STATE_PATH).status_code == 401
    for text in texts:
        assert 'pdserve_requests_total{endpoint="completions",outcome="ok"} 1.0' in text
    for text in (*texts, state.raise_for_status().text):
        assert not [name for name in ("alice", "bob", "humble") if name in text]


@pytest.mark.parametrize("wrong", ["wrong", KEYS["alice"][:-1]], ids=["random", "cut"])
def test_refused_keys_are_limited_per_address_and_valid_ones_are_not(
    tokenizer_dir: Path, scripted_node: ScriptedNode, key_file: Path, wrong: str
) -> None:
    flags = ["--decode", scripted_node.address, "--api-keys", str(key_file)]
    limited = 20
    with (
        router_process(tokenizer_dir, flags) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as http,
    ):
        for _ in range(PER_MINUTE + limited):
            refused = http.get("/v1/models", headers={"authorization": f"Bearer {wrong}"})
            if refused.status_code == 429:
                break
            assert refused.status_code == 401
        assert refused.status_code == 429
        assert 1 <= int(refused.headers["retry-after"]) <= 2
        assert refused.headers["connection"] == "close"
        assert refused.json()["error"]["type"] == "rate_limit_error"
        assert http.get("/v1/models", headers=headers("alice")).status_code == 200
        assert metric(http, "pdserve_unauthorized_limited_requests_total") == 1
        elsewhere = httpx.HTTPTransport(local_address="127.0.0.2")
        with httpx.Client(base_url=process.url, transport=elsewhere) as other:
            assert other.get("/v1/models", headers={"authorization": "Bearer wrong"}).status_code == 401


def test_refused_keys_of_many_networks_are_bounded() -> None:
    refused = RefusedKeys()
    assert [refused.count(f"2001:db8::{i:x}", 0.0) > 0 for i in range(PER_MINUTE + 1)] == [False] * PER_MINUTE + [True]
    assert refused.count("2001:db8:0:1::1", 0.0) == 0
    assert refused.count("2001:db8::1", 1.0) == 0, "one per second returns"
    for number in range(2 * MAX_NETWORKS):
        assert refused.count(f"10.0.{number >> 8}.{number & 255}", 1.0) == 0
    assert len(refused._buckets) == MAX_NETWORKS


def test_request_log_has_key_names_but_no_keys(
    tokenizer_dir: Path, scripted_node: ScriptedNode, key_file: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    scripted_node.scripts |= SCRIPTS
    flags = ["--decode", scripted_node.address, "--api-keys", str(key_file), "--log-requests"]
    with router_process(tokenizer_dir, flags) as router:
        with httpx.Client(base_url=router.url, trust_env=False) as http:
            request_id = ask(http, "bob").headers["x-request-id"]
            assert http.post("/v1/completions", headers=headers("alice"), content=b"no body").status_code == 400
        router.process.terminate()  # a request is logged after its answer was sent
        router.process.wait(timeout=patience(10))
    log = capfd.readouterr().err
    assert f"request {request_id} with key bob: completions, ok after" in log
    assert "with key alice: completions, invalid_" in log
    assert not any(key in log for key in KEYS.values())


def test_valid_key_is_served_and_counted_by_name(http: httpx.Client) -> None:
    before = metric(http, 'pdserve_key_requests_total{key="alice",outcome="ok"}')
    response = ask(http, "alice")
    assert response.json()["choices"][0]["finish_reason"] == "length"
    assert "x-ratelimit-limit-requests" not in response.headers
    assert metric(http, 'pdserve_key_requests_total{key="alice",outcome="ok"}') == before + 1
    assert metric(http, 'pdserve_key_tokens_total{key="alice",kind="output"}') >= 3
    text = http.get("/metrics", headers=headers("alice")).text
    assert not any(key in text for key in KEYS.values())


def test_requests_per_minute(http: httpx.Client) -> None:
    first = ask(http, "slow")
    assert (first.status_code, first.headers["x-ratelimit-remaining-requests"]) == (200, "1")
    assert ask(http, "slow").status_code == 200
    refused = ask(http, "slow")
    assert refused.status_code == 429
    assert 1 <= int(refused.headers["retry-after"]) <= 30
    assert refused.headers["x-ratelimit-limit-requests"] == "2"
    assert refused.headers["x-ratelimit-remaining-requests"] == "0"
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "rate_limit_exceeded")
    assert "2 requests per minute" in error["message"]
    assert ask(http, "alice").status_code == 200  # limits are per key


def test_tokens_per_minute_count_prompts_and_outputs(http: httpx.Client) -> None:
    assert ask(http, "tokens").status_code == 200  # 10 + 3
    second = ask(http, "tokens")
    assert int(second.headers["x-ratelimit-remaining-tokens"]) <= 8
    refused = ask(http, "tokens")
    assert refused.status_code == 429
    assert int(refused.headers["retry-after"]) >= 1
    assert "30 tokens per minute" in refused.json()["error"]["message"]


def test_concurrent_requests_are_limited(http: httpx.Client, scripted_node: ScriptedNode) -> None:
    with lingering(http, "single"):
        refused = ask(http, "single")
        assert refused.status_code == 429
        assert "the limit is 1" in refused.json()["error"]["message"]
    scripted_node.wait_cancelled(salted("single", "linger"))
    wait_for(lambda: ask(http, "single").status_code == 200)


def test_queue_serves_by_priority_and_rejects_its_last(http: httpx.Client, scripted_node: ScriptedNode) -> None:
    """With one request running and one waiting, a new one is rejected unless its priority is higher."""
    with ThreadPoolExecutor() as threads:
        with lingering(http, "alice"):
            waits = threads.submit(ask, http, "bob", priority=3)
            wait_for(lambda: metric(http, "pdserve_requests_waiting") == 1)
            for name, priority in (("bob", 3), ("humble", -9)):
                refused = ask(http, name, priority=priority)
                assert refused.status_code == 503
                assert int(refused.headers["retry-after"]) >= 1
                assert "the limit is 1" in refused.json()["error"]["message"]
            urgent = threads.submit(ask, http, "bob", priority=-1)
            assert waits.result(patience(20)).status_code == 503
            wait_for(lambda: metric(http, "pdserve_requests_waiting") == 1)
            assert not urgent.done()
        assert urgent.result(patience(20)).status_code == 200
    wait_for(lambda: metric(http, "pdserve_requests_in_flight") == 0)


@pytest.mark.parametrize(("name", "asked", "sent"), [("alice", -7, -7), ("humble", -7, 5), ("humble", 9, 9)])
def test_priority_reaches_the_node(
    http: httpx.Client, scripted_node: ScriptedNode, name: str, asked: int, sent: int
) -> None:
    assert ask(http, name, priority=asked).status_code == 200
    assert scripted_node.seen[salted(name, "answer")].message.priority == sent


def test_nodes_tell_clients_apart_and_learn_no_names(http: httpx.Client, scripted_node: ScriptedNode) -> None:
    seen: list[int] = []
    for name in ("alice", "bob", "alice"):
        assert ask(http, name).status_code == 200
        message = scripted_node.seen[salted(name, "answer")].message
        seen.append(message.client)
        assert name.encode() not in message.SerializeToString()
    assert seen[0] == seen[2] != seen[1]


def test_full_decode_node_passes_a_request_on_once(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    async def full(conversation: Conversation) -> None:
        conversation.fail(pb.Failure.OVERLOADED, "no room", retry_after_ms=7000)

    other = ScriptedNode(MODEL, node_id="d1")
    try:
        flags = ["--decode", scripted_node.address, "--decode", other.address]
        with (
            router_process(tokenizer_dir, flags) as process,
            httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as http,
        ):
            for node in (scripted_node, other):  # either may be chosen first
                node.scripts |= {"moves": full if node is scripted_node else answer, "stays": full}
            for _ in range(2):
                assert ask(http, "alice", "moves").status_code == 200
            refused = ask(http, "alice", "stays")
            assert (refused.status_code, refused.headers["retry-after"]) == (503, "7")
            assert "no room" in refused.json()["error"]["message"]
    finally:
        other.close()


def test_disconnected_client_leaves_the_queue(http: httpx.Client, scripted_node: ScriptedNode) -> None:
    with lingering(http, "alice"):
        scripted_node.seen.pop(salted("bob", "answer"), None)
        with pytest.raises(httpx.ReadTimeout):
            http.post(
                "/v1/completions", json={"prompt": [1], "cache_salt": "answer"}, headers=headers("bob"), timeout=0.3
            )
        wait_for(lambda: metric(http, "pdserve_requests_waiting") == 0)
    wait_for(lambda: metric(http, "pdserve_requests_in_flight") == 0)
    assert salted("bob", "answer") not in scripted_node.seen


def test_changed_key_file_is_reloaded(http: httpx.Client, key_file: Path) -> None:
    def replace(text: str) -> None:
        fresh = key_file.with_name("fresh")
        fresh.write_text(text)
        os.replace(fresh, key_file)  # atomic, like a mounted Secret

    def models(name: str) -> int:
        return http.get("/v1/models", headers=headers(name)).status_code

    replace(entries(*(name for name in NAMES if name != "bob")))
    wait_for(lambda: models("bob") == 401)
    assert models("alice") == 200
    replace("this is no TOML")
    wait_for(lambda: metric(http, 'pdserve_key_file_reloads_total{outcome="failed"}') == 1)
    assert models("alice") == 200
    replace(entries(*NAMES))
    wait_for(lambda: models("bob") == 200)


def test_waiting_request_gets_503_on_immediate_shutdown(
    tokenizer_dir: Path, scripted_node: ScriptedNode, key_file: Path
) -> None:
    scripted_node.scripts["linger"] = linger
    with (
        router_process(tokenizer_dir, ["--decode", scripted_node.address, "--max-inflight", "1"]) as process,
        httpx.Client(base_url=process.url, trust_env=False, timeout=patience(20)) as http,
        ThreadPoolExecutor() as threads,
        lingering(http, "alice"),
    ):
        waits = threads.submit(ask, http, "alice")
        wait_for(lambda: metric(http, "pdserve_requests_waiting") == 1)
        process.process.send_signal(signal.SIGINT)
        assert waits.result(patience(20)).status_code == 503


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "missing required field `keys`"),
        ("[keys]", "has 0 keys"),
        ("keys = 3", "Expected `object`"),
        ("keys = " + "[" * 3000 + "]" * 3000, "keys.toml is not a file of API keys"),
        ("[keys.a]\nsha256 = 'abc'", "keys.a.sha256 is not a hexadecimal SHA-256"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nrequests = 3", "unknown field `requests`"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\nmax_concurrent = 0", ">= 1"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\n[keys.b]\nsha256 = '{'0' * 64}'", "b and a have the same key"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\ntenant = ''", "keys.a.tenant '' is invalid"),
        (f"[keys.a]\nsha256 = '{'0' * 64}'\ntenant = 'b'\nshare = true", "keys.a has both tenant and share"),
        (f"[keys.'a b']\nsha256 = '{'0' * 64}'", "key name 'a b' is invalid"),
    ],
)
def test_invalid_key_file_is_explained(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)):
        parse_keys(text.encode(), "keys.toml")


def test_client_may_have_two_keys() -> None:
    hashes = [re.findall(r'"([0-9a-f]{64})"', key_entry("alice", KEYS[name]))[0] for name in ("alice", "bob")]
    ring = parse_keys(f"[keys.alice]\nsha256 = {hashes}".encode(), "keys.toml")
    for name in ("alice", "bob"):
        client = ring.client_of(KEYS[name].encode())
        assert client is not None
        assert client.name == "alice"


def test_generated_key_matches_its_entry(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["key", "carol"]) == 0
    said = capsys.readouterr()
    key = said.err.split()[-1]
    assert key not in said.out
    client = parse_keys(said.out.encode(), "stdout").client_of(key.encode())
    assert client is not None
    assert client.name == "carol"
