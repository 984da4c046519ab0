"""The pages over HTTP: access; /dashboard: node states and history."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import msgspec
import pytest
from machine import patience
from router_process import MODEL, RouterProcess, router_process
from scripted_node import Conversation, ScriptedNode

from pdserve.pb import pdserve_pb2 as pb
from router.dashboard.live import STATE_PATH, LiveNode, LiveReport
from router.gate.api_keys import key_entry, new_key

PAGE = ["/dashboard", "/dashboard/main.js", "/dashboard/style.css", "/dashboard/icon.svg"]
CHAT_PAGE = ["/", "/chat/main.js", "/chat/style.css", "/chat/dom.js"]


def look(client: httpx.Client, **seen: str | int) -> LiveReport:
    response = client.get(STATE_PATH, params=seen)
    assert response.status_code == 200, response.text
    return msgspec.json.decode(response.content, type=LiveReport)


def client_of(router: RouterProcess) -> httpx.Client:
    return httpx.Client(base_url=router.url, timeout=patience(20), trust_env=False)


def node_at(report: LiveReport, address: str) -> LiveNode:
    return next(node for node in report.now.nodes if node.address == address)


def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.fixture
def other(request: pytest.FixtureRequest) -> Iterator[ScriptedNode]:
    """A decode node of another model."""
    node = ScriptedNode("other", node_id="other-node")
    yield node
    node.close()


@pytest.mark.parametrize("path", [*PAGE, *CHAT_PAGE])
def test_page_has_strict_security_headers(client: httpx.Client, path: str) -> None:
    response = client.get(path)
    assert response.status_code == 200
    assert "default-src 'none'" in response.headers["content-security-policy"]
    assert "unsafe" not in response.headers["content-security-policy"]
    assert response.headers["x-content-type-options"] == "nosniff"


def test_page_is_public_and_its_state_needs_a_key(
    tokenizer_dir: Path, scripted_node: ScriptedNode, tmp_path: Path
) -> None:
    key = new_key()
    file = tmp_path / "keys.toml"
    file.write_text(key_entry("alice", key))
    flags = ["--decode", scripted_node.address, "--api-keys", str(file)]
    with router_process(tokenizer_dir, flags) as router, client_of(router) as client:
        assert {client.get(path).status_code for path in (*PAGE, *CHAT_PAGE)} == {200}
        assert client.get(STATE_PATH).status_code == 401
        assert client.get(STATE_PATH + "/").status_code == 401
        response = client.get(STATE_PATH, headers={"Authorization": f"Bearer {key}"})
        assert response.status_code == 200
        assert "alice" not in response.text
        assert response.headers["cache-control"] == "no-store"


def complete(client: httpx.Client, node: ScriptedNode) -> dict[str, str]:
    """Return the response headers that name nodes."""

    async def script(conversation: Conversation) -> None:
        conversation.token(65, finish="length")

    node.scripts["named"] = script
    response = client.post("/v1/completions", json={"prompt": [1, 2], "cache_salt": "named"}).raise_for_status()
    return {name: value for name, value in response.headers.items() if name.startswith("x-pdserve")}


def test_prompt_without_handoff_has_a_decode_node_only(client: httpx.Client, scripted_node: ScriptedNode) -> None:
    assert complete(client, scripted_node) == {"x-pdserve-decode-node": "d0"}


def test_pages_and_names_of_nodes_can_be_turned_off(tokenizer_dir: Path, scripted_node: ScriptedNode) -> None:
    flags = ["--decode", scripted_node.address, "--no-dashboard", "--no-chat-page"]
    with router_process(tokenizer_dir, flags) as router, client_of(router) as client:
        assert {client.get(path).status_code for path in (*PAGE, STATE_PATH, *CHAT_PAGE)} == {404}
        assert complete(client, scripted_node) == {}


def test_requests_appear_in_rates_and_history(client: httpx.Client, scripted_node: ScriptedNode) -> None:
    """test_dashboard_figures.py tests the exact values, because a late sample changes them here."""

    async def script(conversation: Conversation) -> None:
        conversation.token(65)
        conversation.token(66)
        conversation.token(67, finish="length")

    async def failing(conversation: Conversation) -> None:
        conversation.fail(pb.Failure.NODE_FAILED)

    scripted_node.scripts |= {"dashboard": script, "dashboard-failing": failing}
    before = look(client)
    seen = before.history.seconds[-1]
    for salt in ("dashboard", "dashboard-failing"):
        client.post("/v1/completions", json={"prompt": [1, 2, 3, 4], "cache_salt": salt})

    def all_appear() -> bool:
        report = look(client, epoch=before.epoch, second=seen)
        traffic = report.now.traffic
        history = report.history
        assert not history.seconds or history.seconds[0] > seen
        rates = (traffic.request_rate, traffic.failure_rate, traffic.output_token_rate, traffic.outcomes.get("ok"))
        sums = (sum(history.requests), sum(history.failures), sum(history.output_tokens))
        return all(rates) and all(sums) and traffic.ttft.p50 is not None

    eventually(all_appear)


@pytest.mark.parametrize("seen", [{"epoch": "another", "second": 10**6}, {"epoch": "", "second": "x"}, {}])
def test_viewer_of_another_epoch_gets_the_whole_history(client: httpx.Client, seen: dict[str, str | int]) -> None:
    seconds = look(client, **seen).history.seconds
    assert seconds == list(range(seconds[0], seconds[0] + len(seconds)))
    assert seconds[0] == 0 or len(seconds) == 300


def test_state_of_each_node_is_shown(tokenizer_dir: Path, other: ScriptedNode) -> None:
    mine = ScriptedNode(MODEL, node_id="mine")
    mine.load = pb.NodeLoad(free_blocks=30, total_blocks=40, waiting=2, running=3)
    flags = ["--decode", mine.address, "--decode", other.address, "--decode", "127.0.0.1:9"]
    try:
        with router_process(tokenizer_dir, flags, until="loading") as router, client_of(router) as client:
            eventually(lambda: client.get("/health").status_code == 200)
            eventually(lambda: node_at(look(client), mine.address).state == "ready")
            eventually(lambda: node_at(look(client), other.address).state == "unused")
            report = look(client)
            node = node_at(report, mine.address)
            assert (node.name, node.running, node.waiting, node.free_blocks) == ("mine", 3, 2, 30)
            assert node_at(report, "127.0.0.1:9").state == "unreachable"
            assert [(m.name, m.decode_ready, m.decode) for m in report.now.models] == [(MODEL, 1, 1)]
            eventually(lambda: look(client).history.kv_decode[-1] == pytest.approx(0.25))
            mine.stop()
            eventually(lambda: node_at(look(client), mine.address).state == "lost")
            lost = node_at(look(client), mine.address)
            assert lost.name == "mine"
            assert lost.lost_seconds is not None
            eventually(lambda: look(client).now.models[0].decode_ready == 0)
            mine.start()
            eventually(lambda: node_at(look(client), mine.address).state == "ready")
    finally:
        mine.close()


def test_dashboard_works_without_nodes(tokenizer_dir: Path) -> None:
    with router_process(tokenizer_dir, [], until="loading") as router, client_of(router) as client:
        eventually(lambda: client.get("/version").status_code == 200)
        now = look(client).now
        assert (now.nodes, now.connections, now.handoffs) == ([], [], None)
        assert now.models[0].decode == 0
