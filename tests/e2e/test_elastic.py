"""Nodes that prefill and decode: prompts cross between two of them, and every token is exact."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fault_injection import FaultInjector, random_faults
from fleet import MODEL_NAME, Fleet, add_tokenizer, start_elastic
from node_client import RouterClient, greedy
from running_request import RunningRequest

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens
from router.fleet import fleet as router_fleet
from router.fleet.moves import Move
from router.fleet.nodes import Nodes
from router.fleet.policy import FleetSnapshot
from router.fleet.stream_mover import StreamMover
from router.metrics import RouterMetrics

OUTPUT = 16  # tokens
FLAGS = ("--handoff-min-tokens", "1", "--block-size", "16", "--kv-checksum", "on", "--max-model-len", "2048")
PATIENCE = 15.0  # seconds


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return add_tokenizer(make_checkpoint(tmp_path_factory.mktemp("model") / "m", "qwen3", num_hidden_layers=2))


@pytest.fixture(scope="module")
def fleet(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with start_elastic(model, tmp_path_factory.mktemp("listed") / "nodes", 2, FLAGS) as fleet:
        yield fleet


def random_prompts(seed: int, count: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [rng.choices(range(3, 128), k=rng.randint(2, length)) for _ in range(count)]


def test_crossing_handoffs_are_exact(fleet: Fleet, model: Path) -> None:
    reference = reference_model(model)
    prompts = random_prompts(1, 12, 400)
    first, second = fleet.both
    with RouterClient(first.address) as to_first, RouterClient(second.address) as to_second:
        running = []
        for number, prompt in enumerate(prompts):
            client, peer = ((to_first, second), (to_second, first))[number % 2]
            running.append(client.send(prompt, greedy(OUTPUT), prefill_node=peer.describe().node_id))
        for prompt, request in zip(prompts, running, strict=True):
            tokens = request.wait().tokens
            assert tokens == reference_greedy(reference, prompt, OUTPUT, tokens)
    for node in fleet.both:
        assert node.counter("handoffs") == len(prompts) // 2
        assert node.counter("handoff_failures") == 0
        assert node.counter("leases_released") == len(prompts) // 2
        node.wait_idle()


def test_node_leaves_itself_out_of_its_peers(fleet: Fleet) -> None:
    first, second = fleet.both
    for node, other in ((first, second), (second, first)):
        description = node.describe()
        assert (description.role, list(description.connected_peers)) == ("both", [other.describe().node_id])
        assert f"prefill node {node.address}" not in node.output
        assert not any(f'peer="{node.address}"' in name for name in node.status().counters)


def test_router_uses_nodes_of_both_roles(fleet: Fleet, model: Path) -> None:
    reference = reference_model(model)
    prompts = random_prompts(2, 8, 300)
    with ThreadPoolExecutor(len(prompts)) as pool:
        outputs = list(pool.map(lambda prompt: fleet.complete(prompt, OUTPUT), prompts))
    for prompt, tokens in zip(prompts, outputs, strict=True):
        assert tokens == reference_greedy(reference, prompt, OUTPUT, tokens)


def test_streams_move_without_a_change_of_their_tokens(fleet: Fleet) -> None:
    """All streams leave their node at once, in the middle of their answers."""
    prompts = random_prompts(3, 6, 300)
    before = [node.counter("handoff_failures") for node in fleet.both]
    pulled = pulled_tokens(fleet)

    async def run() -> None:
        nodes = Nodes({}, {MODEL_NAME})
        metrics = RouterMetrics()
        served = router_fleet.Fleet(MODEL_NAME, nodes, "round-robin", metrics)
        nodes.listed("both", frozenset(node.address for node in fleet.both))
        await nodes.wait_until(lambda: nodes.complete and len(nodes.views()) == 2)

        async def answers(salt: str, moving: bool) -> list[list[int]]:
            requests = [RunningRequest(prompt, 200, served, metrics, salt) for prompt in prompts]
            for request in requests:
                await request.start()
            for request in requests:
                await request.wait(5)
            if moving:
                await StreamMover(served, cross).move_streams()
            return [await request.wait() for request in requests]

        assert await answers("moved", True) == await answers("stay", False)
        assert metrics.migrations.labels("moved")._value.get() >= 1
        assert all(metrics.migrations.labels(reason)._value.get() == 0 for reason in ("lost", "failed", "stalled"))
        await nodes.close()

    asyncio.run(run())
    assert [node.counter("handoff_failures") for node in fleet.both] == before
    assert pulled_tokens(fleet) > pulled
    for node in fleet.both:
        node.wait_idle()


def pulled_tokens(fleet: Fleet) -> float:
    return sum(node.counter("pulled_tokens") for node in fleet.both)


def resumed(choice: int, *token_ids: int) -> pb.ResumedChoice:
    return pb.ResumedChoice(choice=choice, token_ids=pack_tokens(token_ids))


FORGED: dict[str, list[pb.ResumedChoice]] = {
    "no tokens": [resumed(0)],
    "half a token": [pb.ResumedChoice(choice=0, token_ids=b"\1\0\0\0\1\0")],
    "a token beyond the vocabulary": [resumed(0, 5, 4_000_000_000)],
    "as many tokens as max_tokens": [resumed(0, *range(3, 3 + OUTPUT))],
    "more tokens than the context": [resumed(0, *[5] * 5000)],
    "a choice that is not there": [resumed(7, 5, 6)],
    "a choice twice": [resumed(0, 5, 6), resumed(0, 7)],
    "two choices of one": [resumed(0, 5, 6), resumed(1, 7)],
}


def test_forged_moves_are_refused_or_computed_and_change_no_other_stream(fleet: Fleet, model: Path) -> None:
    """A client of the gRPC port resumes requests that never ran, with the KV of a node that never computed them."""
    reference = reference_model(model)
    prompt = random_prompts(5, 1, 100)[0]
    first, second = fleet.both
    names = [first.describe().node_id, second.describe().node_id, "nothing", "x" * 10_000]
    with RouterClient(first.address) as victim, RouterClient(first.address) as forger:
        running = [victim.send(other, greedy(300), names[1]) for other in random_prompts(6, 3, 300)]
        for case, resume in FORGED.items():
            for name in names:
                failure = forger.generate(prompt, greedy(OUTPUT), name, resume=resume).failure
                assert failure is not None, case
                assert failure.code == pb.Failure.INVALID, f"{case}: {failure}"
        for pull in (True, False):
            for name in names:
                answer = forger.generate(prompt, greedy(OUTPUT), name, resume=[resumed(0, 5, 6, 7)], pull=pull)
                assert answer.tokens == reference_greedy(reference, [*prompt, 5, 6, 7], OUTPUT - 3, answer.tokens), name
        for request, other in zip(running, random_prompts(6, 3, 300), strict=True):
            tokens = request.wait().tokens
            assert tokens == reference_greedy(reference, other, 300, tokens)
    for node in fleet.both:
        node.wait_idle()
        assert "Traceback" not in node.output


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_streams_move_exactly_while_nodes_are_killed_and_stopped(model: Path, tmp_path: Path) -> None:
    """Streams move twice per second between three nodes, which die, hang and come back meanwhile."""
    prompts = random_prompts(7, 12, 300)
    flags = ("--engine", "simulated", "--sim-costs", "step=0.004", "--handoff-min-tokens", "1")

    async def run(fleet: Fleet) -> None:
        nodes = Nodes({}, {MODEL_NAME})
        metrics = RouterMetrics()
        served = router_fleet.Fleet(MODEL_NAME, nodes, "round-robin", metrics)
        nodes.listed("both", frozenset(node.address for node in fleet.both))
        await nodes.wait_until(lambda: nodes.complete and len(nodes.views()) == 3)

        async def answer(index: int, salt: str) -> list[int]:
            request = RunningRequest(prompts[index], 300, served, metrics, salt)
            await request.start()
            return await request.wait()

        async def client(index: int) -> int:
            count = 0
            while asyncio.get_running_loop().time() < end:
                assert await answer(index, f"{index} {count}") == expected[index]
                count += 1
            return count

        expected = await asyncio.gather(*(answer(index, "expected") for index in range(len(prompts))))
        end = asyncio.get_running_loop().time() + 60.0
        mover = StreamMover(served, around)
        mover.start()
        with FaultInjector(fleet, random_faults(9, {"both": 3}, pause=2.0)) as injector:
            counts = await asyncio.gather(*map(client, range(len(prompts))))
        mover.close()
        assert min(counts) > 3
        assert sum(injector.injected.values()) > 5
        assert metrics.migrations.labels("moved")._value.get() > 20
        assert metrics.migrations.labels("lost")._value.get() > 0
        await nodes.close()

    with start_elastic(model, tmp_path / "nodes", 3, flags) as fleet:
        asyncio.run(run(fleet))
        for node in fleet.both:
            node.wait_idle(30.0)


def around(snapshot: FleetSnapshot) -> list[Move]:
    """Move streams of each node to the next one, also if that does not read from it."""
    names = [node.node_id for node in snapshot.nodes]
    return [Move(name, names[at - 1], 4) for at, name in enumerate(names) if len(names) > 1]


def cross(snapshot: FleetSnapshot) -> list[Move]:
    first, second = (node.node_id for node in snapshot.nodes)
    return [Move(first, second, 9), Move(second, first, 9)]


def nodes_ready(fleet: Fleet) -> float:
    """Nodes of both roles that the router uses."""
    lines = httpx.get(f"{fleet.url}/metrics", trust_env=False).text.splitlines()
    ready = f'pdserve_nodes_ready{{model="{MODEL_NAME}",role="both"}}'
    return next(float(line.rpartition(" ")[2]) for line in lines if line.startswith(ready))


@pytest.mark.slow
def test_full_nodes_do_not_wait_for_each_other(model: Path, tmp_path: Path) -> None:
    """Each prompt needs most of a node's blocks, and goes to both nodes: one reserves blocks, the other computes it."""
    flags = ("--engine", "simulated", "--kv-cache-memory", "512KiB", "--max-model-len", "512")
    with start_elastic(model, tmp_path / "nodes", 2, flags) as small:
        first, second = small.both
        total = first.status().total_blocks * first.describe().kv_layout.block_size
        names = [node.describe().node_id for node in small.both]
        length = min(480, total * 3 // 4)
        with RouterClient(first.address) as to_first, RouterClient(second.address) as to_second:
            running = [
                client.send(random.Random(number).choices(range(3, 128), k=length), greedy(8), prefill_node=peer)
                for number in range(6)
                for client, peer in ((to_first, names[1]), (to_second, names[0]))
            ]
            for request in running:
                assert len(request.wait().tokens) == 8
        assert sum(node.counter("handoff_refusals") for node in small.both) > 0
        for node in small.both:
            assert node.counter("handoff_failures") == 0
            node.wait_idle()


@pytest.mark.slow
def test_a_killed_node_costs_no_answer_and_a_drained_one_no_failure(model: Path, tmp_path: Path) -> None:
    prompts = random_prompts(4, 6, 300)
    with start_elastic(model, tmp_path / "nodes", 2, ("--engine", "simulated", "--handoff-min-tokens", "1")) as fleet:
        expected = [fleet.complete(prompt, 100) for prompt in prompts]
        first, second = fleet.both
        with ThreadPoolExecutor(len(prompts)) as pool:
            running = [pool.submit(fleet.complete, prompt, 100, cache_salt="killed") for prompt in prompts]
            fleet.wait_until(lambda: first.status().running > 0 or running[0].done(), PATIENCE)
            first.kill()
            assert [future.result() for future in running] == expected
            first.restart()
            fleet.wait_until(lambda: nodes_ready(fleet) == 2, PATIENCE)
            running = [pool.submit(fleet.complete, prompt, 100, cache_salt="drained") for prompt in prompts]
            second.signal(signal.SIGTERM)
            assert [future.result() for future in running] == expected
        second.wait_ended(30.0)
        assert second.child.process.returncode == 0, second.output
        first.wait_idle()
