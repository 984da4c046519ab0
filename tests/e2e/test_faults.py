"""Nodes die or hang and clients cancel while requests run: tokens stay exact, and no block is lost."""

from __future__ import annotations

import asyncio
import itertools
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fleet import MODEL_NAME, Fleet, HttpError, NodeProcess, add_tokenizer, start_fleet
from machine import patience
from node_client import PrefillClient

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb
from pdserve.sampling_params import SamplingParams

VOCABULARY = 128
HAND_OFF_ALL = ["--handoff-min-tokens", "0"]


@dataclass
class Checkpoint:
    directory: Path
    model: Any
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def check(self, prompt: list[int], tokens: list[int], num_tokens: int) -> None:
        """Check that ``tokens`` are the model's ``num_tokens``."""
        with self._lock:
            assert tokens == reference_greedy(self.model, prompt, num_tokens, tokens)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    directory = add_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3"))
    return Checkpoint(directory, reference_model(directory))


@pytest.fixture(scope="module")
def fleet(checkpoint: Checkpoint) -> Iterator[Fleet]:
    with start_fleet(checkpoint.directory, decode_flags=HAND_OFF_ALL) as fleet:
        yield fleet


_seeds = itertools.count()


def new_prompt(length: int) -> list[int]:
    """Return random tokens that are in no prefix cache."""
    return random.Random(next(_seeds)).choices(range(3, VOCABULARY), k=length)


def wait_for(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.002)


def poll_status(node: NodeProcess, wanted: Callable[[pb.NodeStatus], bool], running: Sequence[Future[Any]]) -> bool:
    """Poll a node's status until ``wanted`` holds; return False if all of ``running`` end first."""
    with grpc.insecure_channel(node.address) as channel:
        stub = pb_grpc.NodeStub(channel)
        while not all(future.done() for future in running):
            if wanted(stub.Status(pb.StatusRequest(), timeout=patience(5.0))):
                return True
    return False


STAGES: dict[str, tuple[str, Callable[[pb.NodeStatus], bool]]] = {
    "while P computes": ("prefill", lambda status: status.held_blocks > 0),
    "while D reads": ("prefill", lambda status: status.leased_blocks > 0),
    "while D decodes": ("decode", lambda status: status.running > 2),
}


@pytest.mark.slow  # test_fault_table.py has a quick test
@pytest.mark.parametrize("stage", STAGES)
def test_requests_survive_the_death_of_the_prefill_node(fleet: Fleet, checkpoint: Checkpoint, stage: str) -> None:
    where, wanted = STAGES[stage]
    prefill = fleet.prefill[0]
    decode = fleet.decode[0]
    node = prefill if where == "prefill" else decode
    seen = False
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):  # until a poll sees the stage
            prompts = [new_prompt(800) for _ in range(8)]
            running = [pool.submit(fleet.complete, prompt, 24) for prompt in prompts]
            if seen := poll_status(node, wanted, running):
                break
        prefill.kill()
        after = pool.submit(fleet.complete, prompts[0][:300], 24)  # D and the router may not have noticed yet
        for prompt, future in zip(prompts, running, strict=True):
            checkpoint.check(prompt, future.result(), 24)
        checkpoint.check(prompts[0][:300], after.result(), 24)
    assert seen, f"no poll saw the node {stage}"
    decode.wait_idle(20.0)
    prefill.restart()
    wait_for(lambda: len(decode.describe().connected_peers) == 1)
    handoffs = decode.counter("handoffs")
    failures = decode.counter("handoff_failures")
    prompt = new_prompt(300)

    def is_handed_off() -> bool:
        checkpoint.check(prompt, fleet.complete(prompt, 8), 8)
        return decode.counter("handoffs") > handoffs

    wait_for(is_handed_off)
    assert decode.counter("handoff_failures") == failures


@pytest.fixture(scope="module")
def simulated(checkpoint: Checkpoint) -> Iterator[Fleet]:
    flags = ("--engine", "simulated")
    with start_fleet(checkpoint.directory, prefill_flags=flags, decode_flags=[*flags, *HAND_OFF_ALL]) as fleet:
        yield fleet


@pytest.mark.slow  # test_disconnects.py has quick tests
@pytest.mark.parametrize(("served", "count"), [("simulated", 100), *(("fleet", n) for n in (100, 1000))])
def test_cancelled_requests_leave_no_blocks_or_leases(served: str, count: int, request: pytest.FixtureRequest) -> None:
    """A tenth of the requests are cancelled at random times."""
    fleet: Fleet = request.getfixturevalue(served)
    rng = random.Random(11)
    cancelled = set(rng.sample(range(count), count // 10))
    ended = asyncio.run(_many_requests(fleet.url, count, cancelled, rng))
    assert ended == count - len(cancelled)
    for node in (*fleet.prefill, *fleet.decode):
        node.wait_idle(20.0)


async def _many_requests(url: str, count: int, cancelled: set[int], rng: random.Random) -> int:
    """Send the requests and return how many ran to their end."""
    at_once = asyncio.Semaphore(32)
    prefix = new_prompt(40)
    limits = httpx.Limits(max_connections=64, max_keepalive_connections=32)

    async def one(client: httpx.AsyncClient, index: int) -> bool:
        prompt = (prefix if index % 2 else []) + rng.choices(range(3, VOCABULARY), k=rng.randint(1, 120))
        body = {"model": MODEL_NAME, "prompt": prompt, "max_tokens": rng.randint(1, 12), "stream": index % 3 > 0}
        timeout = rng.uniform(0.0, 0.25) if index in cancelled else 60.0
        async with at_once:
            try:
                async with asyncio.timeout(timeout):
                    response = await client.post(f"{url}/v1/completions", json={**body, "ignore_eos": True})
                    assert response.status_code == 200, response.text
            except TimeoutError:
                assert index in cancelled
            return index not in cancelled

    async with httpx.AsyncClient(timeout=patience(60.0), limits=limits) as client:
        return sum(await asyncio.gather(*(one(client, index) for index in range(count))))


def overwrite_cache(node: NodeProcess) -> None:
    """Fill the whole KV cache of a prefill node with another prompt, as another decode node could."""
    status = node.status()
    description = node.describe()
    length = min(status.total_blocks * description.kv_layout.block_size, description.max_model_len) - 8
    request = pb.PrefillRequest(
        request_id="overwrite",
        epoch=description.epoch,
        token_ids=pack_tokens(new_prompt(length)),
        sampling=sampling_to_pb(SamplingParams(max_tokens=1, temperature=0.0)),
    )
    with PrefillClient(node.address) as client:
        client.send(request).all()


@pytest.mark.slow  # tests/nodes/test_handoff_faults.py has quick tests
@pytest.mark.parametrize("stopped", ["engine", "node"])
def test_expired_lease_yields_no_token(checkpoint: Checkpoint, stopped: str) -> None:
    """D is stopped from before its read until P's lease has expired and P has overwritten the blocks."""
    flags = ["--lease-seconds", "1.0", "--lease-guard", "0.2", "--kv-cache-memory", "3MiB"]
    decode_flags = [*HAND_OFF_ALL, "--peer-timeout", "30"]  # else D's frontend declares its engine stuck first
    with (
        start_fleet(checkpoint.directory, prefill_flags=flags, decode_flags=decode_flags) as fleet,
        ThreadPoolExecutor(1) as pool,
    ):
        prefill = fleet.prefill[0]
        decode = fleet.decode[0]
        prompt = new_prompt(2000)
        prefill.signal_engine(signal.SIGSTOP)
        running = pool.submit(fleet.complete, prompt, 40)
        wait_for(lambda: decode.status().held_blocks > 0)
        decode.signal_engine(signal.SIGSTOP)
        if stopped == "node":
            decode.signal(signal.SIGSTOP)
        prefill.signal_engine(signal.SIGCONT)
        wait_for(lambda: prefill.status().leased_blocks > 0)
        wait_for(lambda: prefill.status().leased_blocks == 0)
        overwrite_cache(prefill)
        decode.signal_engine(signal.SIGCONT)
        decode.signal(signal.SIGCONT)
        checkpoint.check(prompt, running.result(), 40)
        assert decode.counter("handoff_failures") == 1
        assert decode.counter("handoff_recomputes") == 1
        for node in (prefill, decode):
            node.wait_idle(20.0)


@pytest.mark.slow
def test_too_short_leases_lead_to_recompute(checkpoint: Checkpoint) -> None:
    flags = ["--lease-seconds", "0.002", "--lease-guard", "0"]
    with start_fleet(checkpoint.directory, prefill_flags=flags, decode_flags=HAND_OFF_ALL) as fleet:
        prompts = [new_prompt(900) for _ in range(8)]
        with ThreadPoolExecutor(8) as pool:
            outputs = list(pool.map(lambda prompt: fleet.complete(prompt, 12), prompts))
        for prompt, tokens in zip(prompts, outputs, strict=True):
            checkpoint.check(prompt, tokens, 12)
        for node in (*fleet.prefill, *fleet.decode):
            node.wait_idle(20.0)


@pytest.mark.slow  # tests/nodes/test_integrity.py has quick tests of the policy
def test_failure_policy_fail_returns_an_error_and_the_node_stays_up(checkpoint: Checkpoint) -> None:
    flags = [*HAND_OFF_ALL, "--kv-failure-policy", "fail"]
    migrations = ["--migrations", "0"]
    with (
        start_fleet(checkpoint.directory, decode_flags=flags, router_flags=migrations) as fleet,
        ThreadPoolExecutor(1) as pool,
    ):
        fleet.prefill[0].signal_engine(signal.SIGSTOP)
        running = pool.submit(fleet.complete, new_prompt(300), 8)
        wait_for(lambda: fleet.decode[0].status().held_blocks > 0)
        fleet.prefill[0].kill()
        with pytest.raises(HttpError) as failed:
            running.result()
        assert failed.value.status == 502
        assert failed.value.error["message"]
        fleet.decode[0].wait_idle()
        prompt = new_prompt(50)
        checkpoint.check(prompt, complete_with_retries(fleet, prompt, 8), 8)  # without a P, D computes it


def complete_with_retries(fleet: Fleet, prompt: list[int], max_tokens: int) -> list[int]:
    """Complete a prompt, retrying while the router still names the dead node."""
    end = time.monotonic() + patience(20.0)
    while True:
        try:
            return fleet.complete(prompt, max_tokens)
        except HttpError as exc:
            if exc.status not in (502, 503) or time.monotonic() > end:
                raise
            time.sleep(0.1)
