"""Nodes that appear, disappear and stop reading, and several models."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from router_process import MODEL, router_process
from scripted_node import Conversation, ScriptedNode

from pdserve.errors import Overloaded, PdserveError
from pdserve.hashing import root_hash
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens
from router.fleet.fleet import Fleet, NodeCall
from router.fleet.nodes import Nodes
from router.fleet.policy import Placement
from router.fleet.prefix_index import PromptPrefix
from router.fleet.serve_stream import lightest_first
from router.metrics import RouterMetrics


class Outputs:
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.errors: list[PdserveError] = []
        self.changed = asyncio.Event()

    def on_output(self, output: pb.Output) -> None:
        self.tokens.append(output.token_id)
        self.changed.set()

    def on_failure(self, error: PdserveError) -> None:
        self.errors.append(error)
        self.changed.set()

    def on_stall(self) -> None: ...

    movable_tokens = 0

    def move(self, to: Placement) -> None: ...

    async def token(self) -> int:
        """Wait for the next token."""
        await self.changed.wait()
        self.changed.clear()
        assert not self.errors
        return self.tokens[-1]


@dataclass
class Pair:
    """Two nodes that send one token, and a second one after ``go_on``."""

    first: ScriptedNode
    second: ScriptedNode
    go_on: Callable[[], None]


@pytest.fixture
def pair() -> Iterator[Pair]:
    async def script(conversation: Conversation) -> None:
        conversation.token(1)
        await wanted.wait()
        conversation.token(2, finish="stop")

    nodes = ScriptedNode(MODEL, node_id="d0"), ScriptedNode(MODEL, node_id="d1")
    wanted = asyncio.Event()
    for node in nodes:
        node.scripts["s"] = script
    yield Pair(*nodes, lambda: nodes[0].do(wanted.set))
    for node in nodes:
        node.close()


def test_unlisted_node_finishes_its_requests(pair: Pair) -> None:
    first = pair.first
    second = pair.second

    async def run() -> None:
        nodes = Nodes({}, {MODEL})
        fleet = Fleet(MODEL, nodes, "least-loaded", RouterMetrics())
        nodes.listed("decode", frozenset({first.address}))
        await nodes.wait_until(lambda: nodes.complete and nodes.ready)
        old = Outputs()
        new = Outputs()
        call = send(fleet, request(), old)
        assert await old.token() == 1

        nodes.listed("decode", frozenset({second.address}))
        await nodes.wait_until(lambda: nodes.complete and nodes.ready)
        assert send(fleet, request(), new).node.node_id == "d1"
        pair.go_on()
        assert await old.token() == 2
        call.finish()
        nodes.listed("decode", frozenset({first.address, second.address}))  # back again, as a new one
        await nodes.wait_until(lambda: nodes.complete and len(nodes.views()) == 2)
        assert not old.errors
        await nodes.close()

    asyncio.run(run())


def test_an_index_that_differs_from_the_cache_is_built_again(pair: Pair) -> None:
    """A request of the node goes on meanwhile."""
    node = pair.first
    blocks = [3, 5]

    async def run() -> None:
        nodes = Nodes({}, {MODEL})
        fleet = Fleet(MODEL, nodes, "least-loaded", RouterMetrics())
        nodes.listed("decode", frozenset({node.address}))
        await nodes.wait_until(lambda: nodes.complete and nodes.ready)
        outputs = Outputs()
        call = send(fleet, request(), outputs)
        assert await outputs.token() == 1

        node.cached = pb.CacheChange(added=array("Q", blocks).tobytes(), digest=3)
        await nodes.wait_until(lambda: nodes.prefixes.rebuilds > 0)
        node.cached = pb.CacheChange(added=array("Q", blocks).tobytes(), digest=3 ^ 5)
        while set(nodes.prefixes.holders) != set(blocks):  # noqa: ASYNC110 - reports of blocks are no changes
            await asyncio.sleep(0.01)
        rebuilds = nodes.prefixes.rebuilds
        pair.go_on()
        assert await outputs.token() == 2
        assert nodes.prefixes.rebuilds == rebuilds
        call.finish()
        await nodes.close()

    asyncio.run(run())


def test_node_with_both_roles_takes_requests(pair: Pair) -> None:
    node = pair.first
    node.description.role = "both"

    async def run() -> None:
        nodes = Nodes({}, {MODEL})
        fleet = Fleet(MODEL, nodes, "prefix-aware", RouterMetrics())
        nodes.listed("both", frozenset({node.address}))
        await nodes.wait_until(lambda: nodes.complete and nodes.ready)
        outputs = Outputs()
        call = send(fleet, request(), outputs)
        assert await outputs.token() == 1
        call.cancel()
        assert [(view.decodes, view.prefills) for view in nodes.views()] == [(True, True)]
        await nodes.close()

    asyncio.run(run())


def test_fleet_is_complete_once_handoffs_work(pair: Pair) -> None:
    prefill = pair.first
    decode = pair.second
    prefill.description.role = "prefill"

    async def run() -> None:
        nodes = Nodes({}, {MODEL})
        nodes.listed("prefill", frozenset({prefill.address}))
        nodes.listed("decode", frozenset({decode.address}))
        await nodes.wait_until(lambda: len([view for view in nodes.views() if view.ready]) == 2)
        assert not nodes.complete
        decode.stop()
        decode.description.connected_peers.append("d0")
        decode.start()
        await nodes.wait_until(lambda: nodes.complete)
        await nodes.close()

    asyncio.run(run())


def test_node_with_two_addresses_counts_once(pair: Pair) -> None:
    first = pair.first

    async def run() -> None:
        nodes = Nodes({}, {MODEL})
        nodes.listed("decode", frozenset({first.address, first.address.replace("127.0.0.1", "localhost")}))
        await nodes.wait_until(lambda: nodes.complete and nodes.ready)
        assert [view.node_id for view in nodes.views()] == ["d0"]
        await nodes.close()

    asyncio.run(run())


def test_node_that_does_not_read_gets_no_new_requests(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdserve.rpc.multiplexed_stream.MAX_UNSENT", 1 << 20)
    stuck = pair.first
    prompt = pack_tokens([1] * 131_072)

    async def fill(nodes: Nodes, fleet: Fleet) -> list[Outputs]:
        """Send requests until the node is not ready any more, whatever gRPC's own buffers still take."""
        sent: list[Outputs] = []
        with suppress(TimeoutError):
            while len(sent) < 100:
                async with asyncio.timeout(1.0):
                    await nodes.wait_until(lambda: nodes.ready)
                sent.append(Outputs())
                send(fleet, pb.Generate(token_ids=prompt, cache_salt="s"), sent[-1])
        return sent

    async def run() -> None:
        nodes = Nodes({}, {MODEL})
        fleet = Fleet(MODEL, nodes, "least-loaded", RouterMetrics())
        stuck.do(stuck.reading.clear)
        nodes.listed("decode", frozenset({stuck.address}))
        await nodes.wait_until(lambda: nodes.ready)
        try:
            sent = await fill(nodes, fleet)
            assert len(sent) < 100, "the queue has no bound"
            assert not any(outputs.errors for outputs in sent)
            with pytest.raises(Overloaded):
                send(fleet, request(), Outputs())

            nodes.listed("decode", frozenset({stuck.address, pair.second.address}))
            await nodes.wait_until(lambda: nodes.ready)
            other = Outputs()
            assert send(fleet, request(), other).node.node_id == "d1"
            assert await other.token() == 1

            stuck.do(stuck.reading.set)
            await nodes.wait_until(lambda: all(view.ready for view in nodes.views()))
            assert [await outputs.token() for outputs in sent] == [1] * len(sent)
        finally:
            await nodes.close()

    asyncio.run(run())


def test_report_interval_grows_with_the_number_of_nodes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    async def pauses(addresses: frozenset[str]) -> list[int]:
        nodes = Nodes({}, {MODEL})
        nodes.listed("decode", addresses)
        await nodes.wait_until(lambda: all(node.ready for node in nodes))
        await nodes.close()
        return [pair.first.pauses.pop(), *pair.second.pauses]

    assert asyncio.run(pauses(frozenset({pair.first.address}))) == [20]
    monkeypatch.setattr("router.fleet.nodes.REPORTS", 5.0)
    assert asyncio.run(pauses(frozenset({pair.first.address, pair.second.address}))) == [400, 400]


def test_node_that_reports_too_many_cached_blocks_is_not_used(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    """The node is tried again, and used once it reports fewer blocks."""
    node = pair.first
    node.cached = pb.CacheChange(added=array("Q", range(131_073)).tobytes())

    async def run() -> None:
        nodes = Nodes({}, {MODEL})
        was_ready: list[bool] = []
        nodes.on_change(lambda: was_ready.append(nodes.ready))
        nodes.listed("decode", frozenset({node.address}))
        async with asyncio.timeout(20):
            while len(node.pauses) < 3:  # noqa: ASYNC110 - report streams that the router has opened
                await asyncio.sleep(0.01)
        assert not any(was_ready)
        node.cached = pb.CacheChange()
        await nodes.wait_until(lambda: nodes.ready)
        await nodes.close()

    asyncio.run(run())
    assert "it reports 131073 cached blocks, the limit is 131072" in caplog.text


def request() -> pb.Generate:
    return pb.Generate(token_ids=pack_tokens([1, 2]), cache_salt="s")


def send(fleet: Fleet, message: pb.Generate, outputs: Outputs) -> NodeCall:
    return fleet.generate(message, outputs, PromptPrefix(message.token_ids, root_hash(message.cache_salt)))


def test_router_serves_several_models(tokenizer_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    async def answer(conversation: Conversation) -> None:
        conversation.token(40, finish="length")

    nodes = {name: ScriptedNode(name, node_id=name) for name in ("one", "two", "three")}
    flags = ["--model", f"one={tokenizer_dir}", "--model", f"two={tokenizer_dir}"]
    for node in nodes.values():
        node.scripts["s"] = answer
        flags += ["--decode", node.address]
    with router_process(None, flags) as process, httpx.Client(base_url=process.url, trust_env=False) as client:
        assert [model["id"] for model in client.get("/v1/models").json()["data"]] == ["one", "two"]
        for name in ("two", "one", "two"):
            body = {"prompt": "x", "cache_salt": "s", "model": name}
            answered = client.post("/v1/completions", json=body).json()
            assert answered["model"] == name
            assert nodes[name].seen.pop("s")
        assert client.post("/v1/completions", json={"prompt": "x"}).json()["error"]["param"] == "model"
        refused = client.post("/v1/completions", json={"prompt": "x", "model": "three"})
        assert refused.status_code == 404
        assert "'one' or 'two'" in refused.json()["error"]["message"]
        assert not nodes["three"].seen
        metrics = client.get("/metrics").text
        assert 'pdserve_nodes_ready{model="one",role="decode"} 1.0' in metrics
    for node in nodes.values():
        node.close()
    said = [line for line in capfd.readouterr().err.splitlines() if "'three'" in line]
    assert len(said) == 1


def test_light_output_does_not_wait_for_heavy_ones_of_the_same_step() -> None:
    logprobs = pb.TokenLogprobs(top_ids=range(20), top_logprobs=[-1.0] * 20)
    heavy = [pb.Output(request=1, choice=index % 8, token_id=index, logprobs=logprobs) for index in range(160)]
    ordered = lightest_first([*heavy[:80], pb.Output(request=2), *heavy[80:], pb.Output(request=2, choice=1)])
    assert [(output.request, output.choice) for output in ordered[:2]] == [(2, 0), (2, 1)]
    assert [output.token_id for output in ordered[2:]] == list(range(160))
