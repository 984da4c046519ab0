"""API keys of one tenant share cached prefixes; other tenants never see them."""

from __future__ import annotations

import random
from collections.abc import Iterator

import httpx
import pytest
from exposition import metrics_url, scrape, value
from fleet import MODEL_NAME, Fleet, copy_without_weights, start_fleet
from machine import patience

from router.gate.api_keys import key_entry, new_key
from router.gate.keys import Client

FIELDS = {"alice": "", "bob": "", "clerk": 'tenant = "alice"', "dan": "share = true", "eve": "share = true"}
KEYS = {name: new_key() for name in FIELDS}
LENGTH = 600


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = copy_without_weights(tmp_path_factory.mktemp("model"))
    keys = directory / "keys.toml"
    keys.write_text("".join(key_entry(name, KEYS[name]) + fields + "\n" for name, fields in FIELDS.items()))
    node = ["--engine", "simulated"]
    router = ["--api-keys", str(keys), "--metrics-port", "0", "--policy", "prefix-aware"]
    with start_fleet(directory, prefill_flags=node, decode_flags=node, router_flags=router) as fleet:
        yield fleet


def cached(fleet: Fleet, name: str, prompt: list[int], salt: str = "") -> int:
    """Send the prompt; return how many of its tokens were cached. D caches it, too: P samples fewer than 8 tokens."""
    body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": 8, "cache_salt": salt}
    headers = {"authorization": f"Bearer {KEYS[name]}"}
    response = httpx.post(f"{fleet.url}/v1/completions", json=body, headers=headers, timeout=patience(60.0))
    return int(response.raise_for_status().json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def new_prompt(seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 4096), k=LENGTH)


def expected_cached(fleet: Fleet) -> float:
    """Return the cached tokens that the router has expected so far, from its prefix index."""
    assert fleet.router is not None
    return value(scrape(metrics_url(fleet.router)), "pdserve_expected_cached_prompt_tokens_total")


def test_prompt_of_another_tenant_is_not_cached(fleet: Fleet) -> None:
    prompt = new_prompt(1)
    assert cached(fleet, "alice", prompt) == 0
    before = expected_cached(fleet)
    assert cached(fleet, "bob", prompt) == 0
    assert cached(fleet, "dan", prompt) == 0
    assert expected_cached(fleet) == before, "the router looks under the same salt"
    fleet.wait_until(lambda: cached(fleet, "alice", prompt) > LENGTH // 2 and expected_cached(fleet) > before, 10.0)
    assert cached(fleet, "bob", prompt) > LENGTH // 2, "in its own cache"


def test_keys_of_one_tenant_share(fleet: Fleet) -> None:
    prompt = new_prompt(2)
    assert cached(fleet, "alice", prompt) == 0
    assert cached(fleet, "clerk", prompt) > LENGTH // 2


def test_keys_that_opt_in_share(fleet: Fleet) -> None:
    prompt = new_prompt(3)
    assert cached(fleet, "dan", prompt) == 0
    assert cached(fleet, "eve", prompt) > LENGTH // 2


@pytest.mark.parametrize(("name", "seed"), [("bob", 10), ("dan", 20)])
def test_no_salt_of_a_client_names_another_tenant(fleet: Fleet, name: str, seed: int) -> None:
    for number, secret in enumerate(("", "private")):
        prompt = new_prompt(seed + number)
        assert cached(fleet, "alice", prompt, secret) == 0
        salt = Client(name="alice", tenant="alice").cache_salt(secret)
        for guess in (salt, "alice", f"alice\0{secret}", f"\0{secret}", secret):
            assert cached(fleet, name, prompt, guess) == 0
        assert cached(fleet, "alice", prompt, "other") == 0
        assert cached(fleet, "alice", prompt, secret) > LENGTH // 2


def test_salts_are_unambiguous() -> None:
    clients = [Client(), Client(name="a"), Client(name="b", tenant="a"), Client(name="a", tenant="b")]
    salts = [client.cache_salt(salt) for client in clients for salt in ("", "a", "b")]
    assert salts.pop(3) == salts[0] == "", "the shared cache without a salt is that of a router without keys"
    assert len(set(salts)) == len(salts)
    assert salts[1:3] == ["a", "b"], "without keys, nodes get the client's salt"
