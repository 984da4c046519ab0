"""Web pages of other origins, and ids that clients give to their requests."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
from router_process import router_process
from scripted_node import Conversation, ScriptedNode

from router.__main__ import main
from router.gate.api_keys import key_entry, new_key

ORIGIN = "https://chat.example"
PREFLIGHT = {"access-control-request-method": "POST", "access-control-request-headers": "authorization,content-type"}


@pytest.fixture(scope="module")
def page(tokenizer_dir: Path, scripted_node: ScriptedNode) -> Iterator[httpx.Client]:
    """A web page's view of a router."""

    async def end(conversation: Conversation) -> None:
        conversation.token(5, finish="stop")

    scripted_node.scripts["cors"] = end
    flags = ["--decode", scripted_node.address, "--cors-origin", ORIGIN]
    with (
        router_process(tokenizer_dir, flags) as router,
        httpx.Client(base_url=router.url, trust_env=False) as client,
    ):
        yield client


@pytest.mark.parametrize(("origin", "allowed"), [(ORIGIN, ORIGIN), ("https://evil.example", None)])
def test_pages_of_the_given_origin_alone_may_use_the_api(page: httpx.Client, origin: str, allowed: str | None) -> None:
    for stream in (False, True):
        body = {"prompt": [1], "cache_salt": "cors", "stream": stream}
        answer = page.post("/v1/completions", json=body, headers={"origin": origin})
        assert answer.status_code == 200
        assert answer.headers.get("access-control-allow-origin") == allowed


def test_preflight_needs_no_key_and_a_page_reads_why_it_was_refused(
    tokenizer_dir: Path, scripted_node: ScriptedNode, tmp_path: Path
) -> None:
    keys = tmp_path / "keys.toml"
    key = new_key()
    keys.write_text(key_entry("page", key))
    flags = ["--decode", scripted_node.address, "--cors-origin", ORIGIN, "--api-keys", str(keys)]
    with (
        router_process(tokenizer_dir, flags) as router,
        httpx.Client(base_url=router.url, headers={"origin": ORIGIN}, trust_env=False) as client,
    ):
        preflight = client.options("/v1/models", headers=PREFLIGHT)
        refused = client.get("/v1/models")
        served = client.get("/v1/models", headers={"authorization": f"Bearer {key}"})
    assert [answer.status_code for answer in (preflight, refused, served)] == [200, 401, 200]
    assert {answer.headers["access-control-allow-origin"] for answer in (preflight, refused, served)} == {ORIGIN}


def test_without_the_flag_no_page_is_allowed(client: httpx.Client) -> None:
    answer = client.get("/v1/models", headers={"origin": ORIGIN})
    assert "access-control-allow-origin" not in answer.headers


@pytest.mark.parametrize("given", ["order-17_a.b", "a" * 64])
def test_id_of_the_client_is_kept(page: httpx.Client, given: str) -> None:
    headers = {"x-request-id": given}
    answer = page.post("/v1/completions", json={"prompt": [1], "cache_salt": "cors"}, headers=headers)
    assert answer.headers["x-request-id"] == given
    assert answer.json()["id"] == f"cmpl-{given}"
    assert page.post("/v1/completions", json={"prompt": []}, headers=headers).headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "a" * 65, "a b", "a;b", "ü"])
def test_id_that_could_harm_a_log_is_replaced(page: httpx.Client, given: str) -> None:
    headers = [(b"x-request-id", given.encode())]
    answer = page.post("/v1/completions", json={"prompt": [1], "cache_salt": "cors"}, headers=headers)
    assert re.fullmatch("[0-9a-f]{32}", answer.headers["x-request-id"])


@pytest.mark.parametrize("origin", ["chat.example", "https://chat.example/page"])
def test_origin_with_a_path_or_without_a_scheme_is_refused(origin: str, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(["model", "--cors-origin", origin]) != 0
    assert "is not an origin" in capfd.readouterr().err
