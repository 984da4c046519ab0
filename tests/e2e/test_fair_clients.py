"""One short request of a client passes 100 long ones of another, at the router's queue and at the nodes'."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from fleet import Fleet, start_fleet
from machine import patience

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from router.gate.api_keys import key_entry, new_key

SIMULATED = ["--engine", "simulated"]
LONG = {"prompt": list(range(10, 1010)), "max_tokens": 60, "ignore_eos": True}
SHORT = {"prompt": [3, 4, 5], "max_tokens": 4, "ignore_eos": True}
NUM_LONG = 100


class Tenant(NamedTuple):
    key: str = ""
    address: str = "127.0.0.1"

    def client(self, fleet: Fleet) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            base_url=fleet.url,
            headers={"Authorization": f"Bearer {self.key}"} if self.key else {},
            transport=httpx.AsyncHTTPTransport(local_address=self.address, limits=httpx.Limits(max_connections=None)),
            timeout=patience(100),
        )


BUSY = new_key()
QUIET = new_key()


@pytest.fixture
def fleet(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Fleet]:
    """The parameter is the router's ``--max-inflight``, and whether clients need API keys."""
    max_inflight, keyed = request.param
    flags = ["--max-inflight", max_inflight]
    if keyed:
        keys = tmp_path / "keys.toml"
        keys.write_text(key_entry("busy", BUSY) + key_entry("quiet", QUIET))
        flags += ["--api-keys", str(keys)]
    # Long requests must last long beside the time that router, test and sockets take.
    simulated = [*SIMULATED, "--sim-speed", f"{1 / patience(1.0):g}"]
    decode_flags = [*simulated, "--max-num-seqs", "8"]
    with start_fleet(EMBEDDED_MODEL, prefill_flags=simulated, decode_flags=decode_flags, router_flags=flags) as fleet:
        yield fleet


async def ended_before(fleet: Fleet, busy: Tenant, quiet: Tenant) -> int:
    """Return how many of ``busy``'s long requests ended before the short one of ``quiet``, sent after them."""
    async with busy.client(fleet) as http, quiet.client(fleet) as other:
        ended = 0

        async def send(seed: int) -> None:
            nonlocal ended
            await asyncio.sleep(0.003 * seed)
            (await http.post("/v1/completions", json=LONG | {"cache_salt": str(seed)})).raise_for_status()
            ended += 1

        requests = [asyncio.create_task(send(seed)) for seed in range(NUM_LONG)]
        while int(re.findall(r"^pdserve_requests_in_flight (\d+)", (await other.get("/metrics")).text, re.M)[0]) < 75:
            await asyncio.sleep(0.01)
            assert ended < NUM_LONG / 4, "the long requests end before the others have arrived"
        before = ended
        (await other.post("/v1/completions", json=SHORT)).raise_for_status()
        passed = ended - before
        await asyncio.gather(*requests)
    return passed


NODES = "1024"  # --max-inflight with which requests wait at the nodes
ROUTER = "50"  # --max-inflight with which they wait at router and nodes
ADDRESSES = Tenant(), Tenant(address="127.0.0.2")
KEYS = Tenant(BUSY), Tenant(QUIET)


@pytest.mark.parametrize(
    ("fleet", "busy", "quiet"),
    [
        pytest.param((NODES, False), *ADDRESSES, id="nodes, addresses", marks=pytest.mark.slow),
        pytest.param((ROUTER, True), *KEYS, id="router, keys", marks=pytest.mark.slow),
        pytest.param((NODES, True), *KEYS, id="nodes, keys", marks=pytest.mark.slow),
        pytest.param((ROUTER, False), *ADDRESSES, id="router, addresses", marks=pytest.mark.slow),
    ],
    indirect=["fleet"],
)
def test_short_request_passes_long_ones_of_another_client(fleet: Fleet, busy: Tenant, quiet: Tenant) -> None:
    assert asyncio.run(ended_before(fleet, busy, quiet)) <= 30


@pytest.mark.slow  # test_grammar_masks.py has a quick test of the node alone
def test_grammars_of_a_client_do_not_delay_those_of_another() -> None:
    """At the router and at the node, the busy client's 12 grammars take a second or more of CPU."""
    rules = "start: r0\n" + "".join(f'r{i}: r{i + 1} "x"\n' for i in range(5000)) + 'r5000: "a"\n'

    def body(number: int) -> dict[str, object]:
        return {**SHORT, "guided_grammar": f"{rules}// {number}"}

    async def ended_before(fleet: Fleet) -> int:
        async with Tenant().client(fleet) as http, Tenant(address="127.0.0.2").client(fleet) as other:
            ended = 0

            async def send(number: int) -> None:
                nonlocal ended
                (await http.post("/v1/completions", json=body(number))).raise_for_status()
                ended += 1

            # The router starts its second compiler for the second of two grammars at a time.
            first = http.post("/v1/completions", json=body(-1)), other.post("/v1/completions", json=body(-2))
            await asyncio.gather(*first)
            requests = [asyncio.create_task(send(number)) for number in range(12)]
            await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
            before = ended
            (await other.post("/v1/completions", json={**SHORT, "guided_regex": "a{9}"})).raise_for_status()
            passed = ended - before
            await asyncio.gather(*requests)
        return passed

    with start_fleet(EMBEDDED_MODEL, prefill_flags=SIMULATED, decode_flags=SIMULATED) as fleet:
        assert asyncio.run(ended_before(fleet)) <= 4
