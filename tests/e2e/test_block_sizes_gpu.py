"""Nodes that share a GPU: answers through handoffs at every block size, and KV caches of nodes that start together.

    python -m pytest -m gpu tests/e2e/test_block_sizes_gpu.py

All nodes are on one GPU and need NIXL and FlashInfer: they name it, so without it they do not start. The embedded model
answers the held-out questions, tool calls and schemas, in bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from fleet import MODEL_NAME, Fleet, NodeProcess

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.runner_oracle import VARIABLE
from training.held_out import Case, cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
    pytest.mark.timeout(500),
]

RUNNERS = {"V1": {VARIABLE: "0"}, "V2": {VARIABLE: "1"}}
START = 200.0  # seconds
MODEL = ("--served-model-name", MODEL_NAME, "--device", "cuda", "--dtype", "bfloat16")
NODE = (*MODEL, "--attention-backend", "flashinfer")
KERNELS = "batch_prefill"  # in the names of FlashInfer's libraries for chunks of prompts
CONCURRENT = 16  # requests

#: --block-size and --kernel-block-size, the page. Three pages are parts of a block.
SIZES = [(16, 16), (96, 32), (128, 16), (128, 64)]


@pytest.fixture(scope="module")
def asked() -> list[Case]:
    return cases(EMBEDDED_MODEL)


@pytest.fixture(scope="module")
def alone(asked: list[Case]) -> list[Any]:
    """Answers of one node with the runner V1 and blocks of 16."""
    with Fleet((*NODE, "--kv-cache-memory", "1GiB")) as fleet:
        fleet.start_decode(EMBEDDED_MODEL, environ=RUNNERS["V1"])
        fleet.start_router(EMBEDDED_MODEL)
        fleet.wait_ready(START)
        fleet.wait_until(fleet.serves, START)
        return answers(fleet, asked)


def answers(fleet: Fleet, asked: Sequence[Case]) -> list[Any]:
    """Return content and tool calls of each answer, without the random ids of calls."""

    def ask(case: Case) -> Any:
        message = fleet.post("/v1/chat/completions", case.body, timeout=120.0)["choices"][0]["message"]
        calls = [call["function"] for call in message.get("tool_calls") or []]
        return message.get("content"), calls

    with ThreadPoolExecutor(CONCURRENT) as pool:
        return list(pool.map(ask, asked))


@pytest.fixture(params=SIZES, ids=lambda sizes: "{}/{}".format(*sizes))
def nodes(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    """Yield a prefill and a decode node of each runner, with CUDA graphs in V2."""
    block, page = request.param
    sizes = ("--block-size", str(block), "--kernel-block-size", str(page))
    with Fleet((*NODE, "--kv-cache-memory", "1GiB", *sizes)) as fleet:
        for environ in RUNNERS.values():
            fleet.start_prefill(EMBEDDED_MODEL, environ=environ)
        for environ in RUNNERS.values():
            fleet.start_decode(EMBEDDED_MODEL, ("--handoff-min-tokens", "0"), environ)
        fleet.wait_ready(START)
        for node in fleet.nodes:
            layout = node.describe().kv_layout
            assert (layout.block_size, layout.kernel_block_size) == (block, page)
            assert uses_flashinfer(node), node.output
        yield fleet


def uses_flashinfer(node: NodeProcess) -> bool:
    """Return whether the node's rank has loaded FlashInfer's kernels, which its warm-up runs."""
    (engine,) = node.processes("engine")
    return any(KERNELS in mapped.path for mapped in engine.memory_maps())


def test_answers_through_handoffs_equal_those_of_one_node(nodes: Fleet, asked: list[Case], alone: list[Any]) -> None:
    """Each runner's prefill node with each runner's decode node."""
    pairs = [(prefill, decode) for prefill in nodes.prefill for decode in nodes.decode]
    with ExitStack() as stack:
        routers = [stack.enter_context(Fleet()) for _ in pairs]
        for router, (prefill, decode) in zip(routers, pairs, strict=True):
            router.start_router(EMBEDDED_MODEL, ("--prefill", prefill.address, "--decode", decode.address))
        for router, (prefill, decode) in zip(routers, pairs, strict=True):
            router.wait_ready(START)
            router.wait_until(router.serves, START)
            before = decode.counter("handoffs")
            different = [
                (case.kind, got, expected)
                for case, got, expected in zip(asked, answers(router, asked), alone, strict=True)
                if got != expected
            ]
            assert not different, f"P {runner(prefill)}, D {runner(decode)}: {different}"
            assert decode.counter("handoffs") - before == len(asked)
            assert decode.counter("handoff_failures") == 0


def runner(node: NodeProcess) -> str:
    return node.describe().runner


@pytest.mark.parametrize("block", [16, 128])
def test_nodes_that_start_at_the_same_moment_get_equal_kv_caches(block: int) -> None:
    """Five times, the two nodes of a GPU get the KV blocks that one gets by itself, but for a tenth."""
    flags = (*NODE, "--gpu-memory-utilization", "0.3", "--block-size", str(block))
    with Fleet(flags) as fleet:
        by_itself = start_together(fleet, 1)
    pairs = []
    for _ in range(5):
        with Fleet(flags) as fleet:
            pairs.append(start_together(fleet, 2))
    print(f"KV blocks of {block} tokens: {by_itself} alone, {pairs} together")
    assert all(0.9 * by_itself[0] <= blocks <= 1.1 * by_itself[0] for pair in pairs for blocks in pair), pairs


def start_together(fleet: Fleet, number: int) -> list[int]:
    """Start nodes at the same moment. Return their KV blocks."""
    with ThreadPoolExecutor(number) as pool:
        nodes = list(pool.map(lambda _: fleet.start_prefill(EMBEDDED_MODEL), range(number)))
    fleet.wait_ready(START)
    return [node.status().total_blocks for node in nodes]
