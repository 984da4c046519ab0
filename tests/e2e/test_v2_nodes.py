"""Nodes with runner V2 in Triton's interpreter: handoffs to and from V1, cancelled requests, disconnects."""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fleet import RUNNER_ENVIRONMENTS, Fleet, NodeProcess
from machine import patience
from node_client import Generated, RouterClient, greedy

from pdserve.sampling_params import SamplingParams

VOCABULARY = 128
OUTPUT = 6  # tokens
# At most 32 tokens per step, so that longer prompts take several steps.
FLAGS = ("--max-num-seqs", "8", "--max-batch-tokens", "32", "--max-model-len", "256", "--kv-cache-memory", "2MiB")
# The runners of P and D
PAIRS = [("V1", "V2"), *(pytest.param(pair, marks=pytest.mark.slow) for pair in [("V2", "V1"), ("V2", "V2")])]

pytestmark = pytest.mark.timeout(240)
_seeds = itertools.count()


@dataclass
class Nodes:
    source: str  # runner of P
    target: str  # runner of D
    prefill: NodeProcess
    decode: NodeProcess
    model: Any

    def wait_idle(self) -> None:
        for node in (self.prefill, self.decode):
            node.wait_idle(20.0)

    def expected(self, prompt: list[int]) -> list[int]:
        return reference_greedy(self.model, prompt, OUTPUT)


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    source, target = request.param
    path = tmp_path_factory.mktemp("model")
    directory = make_checkpoint(path, "llama", num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)
    with Fleet() as fleet:
        prefill = fleet.start_prefill(directory, FLAGS, RUNNER_ENVIRONMENTS[source])
        decode = fleet.start_decode(directory, [*FLAGS, "--handoff-min-tokens", "0"], RUNNER_ENVIRONMENTS[target])
        fleet.wait_ready()
        yield Nodes(source, target, prefill, decode, reference_model(directory))


def new_prompt(length: int) -> list[int]:
    """Return random tokens that are in no prefix cache."""
    return random.Random(next(_seeds)).choices(range(3, VOCABULARY), k=length)


def test_describe_names_the_runner(nodes: Nodes) -> None:
    for version, node in ((nodes.source, nodes.prefill), (nodes.target, nodes.decode)):
        description = node.describe()
        assert description.runner == version
        assert description.runner_reasons
        assert description.kv_layout == nodes.decode.describe().kv_layout


def test_handed_off_tokens_equal_transformers(nodes: Nodes) -> None:
    prefill = nodes.prefill
    decode = nodes.decode
    before = decode.counter("handoffs")
    prompts = [new_prompt(length) for length in (1, 15, 16, 17, 70)]
    with RouterClient(decode.address) as client:
        results = [client.send(prompt, greedy(OUTPUT), prefill.address) for prompt in prompts]
        for prompt, result in zip(prompts, results, strict=True):
            assert result.wait().tokens == nodes.expected(prompt), f"a prompt of {len(prompt)} tokens"
    assert decode.counter("handoffs") == before + len(prompts)
    assert decode.counter("handoff_failures") == 0
    nodes.wait_idle()


def at_once(nodes: Nodes) -> Callable[[Generated], bool]:
    return lambda request: True


def while_p_computes(nodes: Nodes) -> Callable[[Generated], bool]:
    before = nodes.prefill.status().steps
    return lambda request: nodes.prefill.status().steps > before


def at_the_first_token(nodes: Nodes) -> Callable[[Generated], bool]:
    return lambda request: request.started.is_set()


def while_the_last_step_is_in_flight(nodes: Nodes) -> Callable[[Generated], bool]:
    """The engine launches one step ahead of its outputs, so it receives the cancel after the last launch."""
    return lambda request: len(request.choices.get(0, ())) >= OUTPUT - 2


@pytest.mark.parametrize(
    "moment",
    [
        *(pytest.param(moment, marks=pytest.mark.slow) for moment in (at_once, while_p_computes, at_the_first_token)),
        while_the_last_step_is_in_flight,
    ],
)
def test_cancelled_request_frees_its_blocks(
    moment: Callable[[Nodes], Callable[[Generated], bool]], nodes: Nodes
) -> None:
    """The next request can use the blocks and the slot at once, and gets its own tokens."""
    peer = nodes.prefill.address
    prompt = new_prompt(70)
    following = new_prompt(35)
    is_reached = moment(nodes)
    with RouterClient(nodes.decode.address) as client:
        cancelled = client.send(prompt, greedy(OUTPUT), peer)
        wait_for(lambda: is_reached(cancelled), cancelled)
        client.cancel(cancelled)
        assert client.generate(following, greedy(OUTPUT), peer).tokens == nodes.expected(following)
        nodes.wait_idle()
        assert cancelled.failure is None
        tokens = cancelled.choices.get(0, [])
        assert tokens == nodes.expected(prompt)[: len(tokens)]
        # Part of the prompt may be in the prefix caches, and must be right there.
        assert client.generate(prompt, greedy(OUTPUT), peer).tokens == nodes.expected(prompt)
    nodes.wait_idle()


def wait_for(condition: Callable[[], bool], request: Generated) -> None:
    """Fails as soon as the request cannot reach the condition."""
    end = time.monotonic() + patience(20.0)
    while not condition():
        assert request.stream_error is None, f"the stream broke: {request.stream_error}"
        assert request.failure is None, request.failure
        assert time.monotonic() < end, "not within 20 s"
        time.sleep(0.001)


def disconnect_early(address: str, peer: str, seed: int) -> None:
    """Send random requests and close the stream while they run."""
    rng = random.Random(seed)
    with RouterClient(address) as client:
        for _ in range(3):
            prompt = rng.choices(range(3, VOCABULARY), k=rng.randint(1, 60))
            temperature = rng.choice([0.0, 1.0])
            n = rng.choice([1, 1, 3]) if temperature else 1
            sampling = SamplingParams(rng.randint(1, 8), n=n, temperature=temperature, seed=seed, ignore_eos=True)
            client.send(prompt, sampling, peer if rng.random() < 0.8 else "")
        time.sleep(rng.random())


@pytest.mark.slow
def test_disconnects_under_load_leave_nothing_behind(nodes: Nodes) -> None:
    """Clients disconnect at random times, beside one that must get exact tokens all the time."""
    address = nodes.decode.address
    peer = nodes.prefill.address
    with ThreadPoolExecutor(3) as pool, RouterClient(address) as client:
        leaving = [pool.submit(disconnect_early, address, peer, seed) for seed in range(90)]
        while not all(future.done() for future in leaving):
            prompt = new_prompt(40)
            assert client.generate(prompt, greedy(OUTPUT), peer).tokens == nodes.expected(prompt)
        for future in leaving:
            future.result()
    nodes.wait_idle()
    prompt = new_prompt(40)
    with RouterClient(address) as client:
        assert client.generate(prompt, greedy(OUTPUT), peer).tokens == nodes.expected(prompt)
    nodes.wait_idle()
    assert nodes.decode.counter("handoff_failures") == 0
