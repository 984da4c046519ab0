"""Images reach the node that computes their prompt, once per prompt, and again where they are missing."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgspec
import pytest
from checkpoints import make_checkpoint
from image_node import INPUT, ImageNode, Picture, image_node, prompt_with
from machine import patience
from running_request import RunningRequest
from scripted_image_node import ScriptedImageNode, loaded
from scripted_node import Conversation, Script

from node.images import uploads
from pdserve.errors import NodeError, Overloaded, PdserveError, RequestError
from pdserve.images import ImageInput, ImageSpan
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import image_input_to_pb, pack_tokens, unpack_tokens
from router.fleet.fleet import Fleet
from router.fleet.image_nodes import ImageNodes
from router.fleet.node_client import IMAGES_AT_ONCE
from router.fleet.nodes import Nodes
from router.fleet.policy import POLICIES, NodeView, Placement
from router.fleet.prefix_index import PromptPrefix
from router.images import sending
from router.images.sending import ImageUpload
from router.metrics import RouterMetrics

MODEL = "small"
SALT = "s"
SMALL = Picture(2, 3, value=1)
LARGE = Picture(200, 200, value=2)  # 1.9 MB: eight pieces; more tokens than the nodes declare
OTHER = Picture(2, 3, value=3)


class Router:
    """A fleet of a router in front of scripted nodes."""

    def __init__(self, nodes: Nodes, fleet: Fleet, metrics: RouterMetrics) -> None:
        self.nodes = nodes
        self.fleet = fleet
        self.metrics = metrics

    def request(self, *pictures: Picture, salt: str = SALT) -> RunningRequest:
        ids, spans = prompt_with(*pictures)
        images = tuple(loaded(picture) for picture in pictures)
        return RunningRequest(ids, 20, self.fleet, self.metrics, salt, images=spans, pictures=images)

    def migrations(self, reason: str = "images") -> float:
        return float(self.metrics.migrations.labels(reason)._value.get())


Scenario = Callable[[Router], Awaitable[None]]


@asynccontextmanager
async def served(scripted: Sequence[ScriptedImageNode], policy: str) -> AsyncIterator[Router]:
    nodes = Nodes({}, {MODEL})
    metrics = RouterMetrics()
    fleet = Fleet(MODEL, nodes, policy, metrics)
    for role in {node.description.role for node in scripted}:
        nodes.listed(role, frozenset(node.address for node in scripted if node.description.role == role))
    try:
        await nodes.wait_until(lambda: sum(view.ready for view in nodes.views()) == len(scripted))
        yield Router(nodes, fleet, metrics)
    finally:
        await nodes.close()


def run(scripted: Sequence[ScriptedImageNode], scenario: Scenario, policy: str = "prefix-aware") -> None:
    async def body() -> None:
        async with asyncio.timeout(patience(60)), served(scripted, policy) as router:
            await scenario(router)

    with ExitStack() as stack:
        for node in scripted:
            stack.callback(node.close)
        asyncio.run(body())


async def until(condition: Callable[[], bool]) -> None:
    while not condition():  # noqa: ASYNC110 - nodes run in threads of their own
        await asyncio.sleep(0.005)


def saying(*token_ids: int, wait_for: Callable[[], bool] = lambda: True) -> Script:
    async def script(conversation: Conversation) -> None:
        await until(wait_for)
        for number, token_id in enumerate(token_ids, 1):
            conversation.token(token_id, finish="length" if number == len(token_ids) else "")

    return script


def in_turn(*scripts: Script) -> Script:
    """Play the next script for each request; the last one again and again."""
    left = list(scripts)

    async def script(conversation: Conversation) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(conversation)

    return script


async def lacking(conversation: Conversation) -> None:
    conversation.fail(pb.Failure.NEEDS_IMAGES, "pixels are missing")


def lacking_after(*token_ids: int) -> Script:
    async def script(conversation: Conversation) -> None:
        for token_id in token_ids:
            conversation.token(token_id)
        await lacking(conversation)

    return script


def refusing(code: grpc.StatusCode, times: int = 1 << 30) -> Callable[[Any], Awaitable[None]]:
    """Refuse the first ``times`` images."""
    calls = 0

    async def before(context: Any) -> None:
        nonlocal calls
        calls += 1
        if calls <= times:
            await context.abort(code, "scripted")

    return before


async def never(conversation: Conversation) -> None: ...


def pair(**fields: Any) -> tuple[ScriptedImageNode, ScriptedImageNode]:
    """Return P, which encodes images, and D, which does not."""
    prefill = ScriptedImageNode(MODEL, "p", "prefill", **fields)
    decode = ScriptedImageNode(MODEL, "d", images=None)
    decode.description.connected_peers.append("p")
    return prefill, decode


def test_a_node_that_decodes_and_encodes_gets_prompt_and_pixels() -> None:
    node = ScriptedImageNode(MODEL, "d")
    node.scripts[SALT] = saying(5, 6, wait_for=lambda: len(node.put) == 2)

    async def scenario(router: Router) -> None:
        assert router.fleet.image_input == INPUT
        request = router.request(SMALL, LARGE, SMALL)
        await request.start()
        assert await request.wait() == [5, 6]
        assert node.put == [SMALL.digest, LARGE.digest], "an image that appears twice is sent once"
        spans = prompt_with(SMALL, LARGE, SMALL)[1]
        sent = node.seen[SALT].message.images
        assert [(span.start, span.rows, span.columns, span.digest) for span in sent] == [
            (span.start, span.rows, span.columns, span.digest) for span in spans
        ]

    run([node], scenario)


@pytest.mark.parametrize("policy", POLICIES)
def test_pixels_go_to_the_prefill_node_even_of_short_prompts(policy: str) -> None:
    prefill, decode = pair()
    decode.scripts[SALT] = saying(5, wait_for=lambda: len(prefill.put) == 1)

    async def scenario(router: Router) -> None:
        request = router.request(SMALL)
        await request.start()
        assert await request.wait() == [5]
        assert prefill.put == [SMALL.digest]
        assert not decode.put
        message = decode.seen[SALT].message
        assert message.prefill_node == "p"
        assert not message.pull

    run([prefill, decode], scenario, policy)


def test_missing_images_are_sent_again_with_the_tokens_so_far() -> None:
    node = ScriptedImageNode(MODEL, "d")
    node.scripts[SALT] = in_turn(lacking_after(5, 6), saying(7, 8, wait_for=lambda: len(node.put) >= 1))

    async def scenario(router: Router) -> None:
        request = router.request(LARGE)
        await request.start()
        assert await request.wait() == [5, 6, 7, 8]
        (resumed,) = node.seen[SALT].message.resume
        assert list(unpack_tokens(resumed.token_ids)) == [5, 6]
        assert router.migrations() == 1

    run([node], scenario)


def test_a_prompt_that_is_preempted_often_ends_well() -> None:
    """A node that encodes no images lacks them each time, but each time there are more tokens."""
    node = ScriptedImageNode(MODEL, "d")
    node.scripts[SALT] = in_turn(*(lacking_after(token) for token in range(5, 11)), saying(11))

    async def scenario(router: Router) -> None:
        request = router.request(SMALL)
        await request.start()
        assert await request.wait() == list(range(5, 12))
        assert router.migrations() == 6

    run([node], scenario)


def test_images_that_are_always_missing_end_the_request() -> None:
    node = ScriptedImageNode(MODEL, "d")
    node.scripts[SALT] = lacking

    async def scenario(router: Router) -> None:
        request = router.request(SMALL)
        await request.start()
        error = await request.failure()
        assert isinstance(error, NodeError)
        assert "lacked the images 4 times without a new token, the limit is 3" in str(error)

    run([node], scenario)


def test_a_node_without_memory_is_asked_again() -> None:
    prefill, decode = pair()
    prefill.before = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED, times=3)
    decode.scripts[SALT] = saying(5, wait_for=lambda: len(prefill.put) == 1)

    async def scenario(router: Router) -> None:
        request = router.request(LARGE)
        await request.start()
        assert await request.wait() == [5]
        assert router.migrations() == 0

    run([prefill, decode], scenario)


def test_a_node_that_stays_without_memory_ends_the_request_with_a_503(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_PATIENCE", 0.2)
    prefill, decode = pair()
    prefill.before = refusing(grpc.StatusCode.RESOURCE_EXHAUSTED)
    decode.scripts[SALT] = never

    async def scenario(router: Router) -> None:
        request = router.request(SMALL)
        await request.start()
        assert isinstance(await request.failure(), Overloaded)
        await until(decode.seen[SALT].cancelled.is_set)

    run([prefill, decode], scenario)


def test_an_image_that_a_node_never_takes_ends_the_request_with_a_400() -> None:
    prefill, decode = pair()
    prefill.before = refusing(grpc.StatusCode.INVALID_ARGUMENT)
    decode.scripts[SALT] = never

    async def scenario(router: Router) -> None:
        request = router.request(SMALL)
        await request.start()
        assert isinstance(await request.failure(), RequestError)
        await until(decode.seen[SALT].cancelled.is_set)

    run([prefill, decode], scenario)


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED])
def test_a_failed_upload_sends_prompt_and_images_again(code: grpc.StatusCode) -> None:
    prefill, decode = pair()
    prefill.before = refusing(code, times=2)
    decode.scripts[SALT] = in_turn(never, never, saying(5, wait_for=lambda: len(prefill.put) == 1))

    async def scenario(router: Router) -> None:
        request = router.request(LARGE)
        await request.start()
        assert await request.wait() == [5]
        assert router.migrations() == 2

    run([prefill, decode], scenario)


def test_another_prefill_node_gets_the_images_after_the_first_has_ended() -> None:
    first, decode = pair()
    second = ScriptedImageNode(MODEL, "q", "prefill")
    decode.description.connected_peers.append("q")
    decode.scripts[SALT] = in_turn(never, saying(5, wait_for=lambda: len(second.put + first.put) == 1))

    async def scenario(router: Router) -> None:
        blocked = asyncio.Event()

        async def wait(context: Any) -> None:
            await blocked.wait()

        first.before = second.before = wait
        request = router.request(LARGE)
        await request.start()
        await until(lambda: first.most_at_once + second.most_at_once == 1)
        chosen, other = (first, second) if first.most_at_once else (second, first)
        del other.before
        other.before = refusing(grpc.StatusCode.OK, times=0)
        await asyncio.to_thread(chosen.stop)
        assert await request.wait() == [5]
        assert other.put == [LARGE.digest]

    run([first, second, decode], scenario)


def test_few_images_are_on_their_way_to_a_node_at_once() -> None:
    node = ScriptedImageNode(MODEL, "d")
    pictures = [Picture(2, 3, value=value) for value in range(3 * IMAGES_AT_ONCE)]
    node.scripts[SALT] = saying(5, wait_for=lambda: len(node.put) == len(pictures))

    async def scenario(router: Router) -> None:
        requests = [router.request(picture) for picture in pictures]
        for request in requests:
            await request.start()
        for request in requests:
            assert await request.wait() == [5]
        assert 1 < node.most_open <= IMAGES_AT_ONCE

    run([node], scenario)


def test_equal_images_of_requests_are_sent_one_after_the_other() -> None:
    node = ScriptedImageNode(MODEL, "d")
    node.scripts[SALT] = saying(5, wait_for=lambda: len(node.put) == 8)

    async def scenario(router: Router) -> None:
        images = (loaded(LARGE), loaded(OTHER))
        ids, spans = prompt_with(LARGE, OTHER)
        requests = [
            RunningRequest(ids, 20, router.fleet, router.metrics, SALT, images=spans, pictures=images) for _ in range(4)
        ]
        for request in requests:
            await request.start()
        for request in requests:
            assert await request.wait() == [5]
        assert node.most_at_once == 1
        assert sorted(node.put) == sorted([LARGE.digest, OTHER.digest] * 4)

    run([node], scenario)


@pytest.mark.parametrize("end", ["the client", "the first token"])
def test_an_upload_ends_with_its_use(end: str) -> None:
    node = ScriptedImageNode(MODEL, "d")

    async def wait(context: Any) -> None:
        await asyncio.Event().wait()

    node.before = wait
    node.scripts[SALT] = never if end == "the client" else saying(5, wait_for=lambda: node.most_at_once == 1)

    async def scenario(router: Router) -> None:
        request = router.request(LARGE, SMALL)
        await request.start()
        if end == "the client":
            await until(lambda: node.most_at_once == 1)
            request.cancel()
        else:
            assert await request.wait() == [5]
        await until(lambda: node.cancelled == 1)
        assert not node.put

    run([node], scenario)


@pytest.mark.parametrize("end", ["well", "with an error", "by its client"])
def test_the_memory_of_images_is_free_as_soon_as_a_request_ends(end: str) -> None:
    node = ScriptedImageNode(MODEL, "d")
    node.scripts[SALT] = {
        "well": saying(5, wait_for=lambda: len(node.put) == 1),
        "with an error": in_turn(lacking_after(5), lacking),
        "by its client": never,
    }[end]

    async def scenario(router: Router) -> None:
        image = loaded(LARGE)
        freed = weakref.ref(image)
        ids, spans = prompt_with(LARGE)
        request = RunningRequest(ids, 20, router.fleet, router.metrics, SALT, images=spans, pictures=(image,))
        del image
        gc.disable()
        try:
            await request.start()
            if end == "well":
                await request.wait()
            elif end == "with an error":
                await request.failure()
            else:
                await until(lambda: node.most_at_once == 1)
            request.close()
            for _ in range(3):  # cancelled tasks end
                await asyncio.sleep(0.01)
            assert freed() is None
        finally:
            gc.enable()

    run([node], scenario)


def test_images_are_kept_on_the_node_of_a_prompt_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sending, "_REFRESH", 0.05)
    node = ScriptedImageNode(MODEL, "d")
    node.scripts[SALT] = saying(5, wait_for=lambda: len(node.put) == 6)

    async def refuse_the_third(context: Any) -> None:
        if len(node.put) == 2:
            node.put.append(b"")
            await context.abort(grpc.StatusCode.UNAVAILABLE, "scripted")

    node.before = refuse_the_third

    async def scenario(router: Router) -> None:
        request = router.request(SMALL)
        await request.start()
        assert await request.wait() == [5]
        assert router.migrations() == 0

    run([node], scenario)


def refusal_of(router: Router, *pictures: Picture) -> Awaitable[PdserveError]:
    async def ask() -> PdserveError:
        request = router.request(*pictures)
        await request.start()
        return await request.failure()

    return ask()


def test_nodes_that_encode_no_images_get_none() -> None:
    node = ScriptedImageNode(MODEL, "d", images=None)

    async def scenario(router: Router) -> None:
        assert router.fleet.image_input is None
        error = await refusal_of(router, SMALL)
        assert isinstance(error, Overloaded)
        assert "no node of model 'small' that encodes images is ready" in str(error)
        assert not node.seen

    run([node], scenario)


def test_images_wait_for_the_prefill_node_of_a_decode_node_that_continues_them() -> None:
    prefill, decode = pair()
    decode.description.continued_images.CopyFrom(image_input_to_pb(INPUT))
    decode.scripts[SALT] = saying(5, wait_for=lambda: len(prefill.put) == 1)

    async def scenario(router: Router) -> None:
        nodes = router.nodes
        nodes.listed("prefill", frozenset())
        await nodes.wait_until(lambda: [view.node_id for view in nodes.views()] == ["d"])
        assert router.fleet.image_input == INPUT
        error = await refusal_of(router, SMALL)
        assert isinstance(error, Overloaded)
        assert "no node of model 'small' that encodes images is ready" in str(error)
        nodes.listed("prefill", frozenset([prefill.address]))
        await nodes.wait_until(lambda: sum(view.ready for view in nodes.views()) == 2)
        request = router.request(SMALL)
        await request.start()
        assert await request.wait() == [5]

    run([prefill, decode], scenario)


def test_nodes_that_process_images_otherwise_get_none(caplog: pytest.LogCaptureFixture) -> None:
    first, decode = pair()
    other = ScriptedImageNode(MODEL, "q", "prefill", images=msgspec.structs.replace(INPUT, fingerprint=bytes(32)))
    decode.description.connected_peers.append("q")
    decode.scripts[SALT] = saying(5, wait_for=lambda: bool(first.put))

    async def scenario(router: Router) -> None:
        assert router.fleet.image_input == INPUT
        for _ in range(4):
            request = router.request(SMALL)
            await request.start()
            assert await request.wait() == [5]
        assert set(first.put) == {SMALL.digest}
        assert not other.put
        assert not other.most_at_once
        warnings = [record.getMessage() for record in caplog.records if "in different ways" in record.getMessage()]
        assert len(warnings) == 1
        assert "q get none" in warnings[0]

    run([first, other, decode], scenario)


def test_a_model_that_sees_keeps_its_input_while_no_node_is_ready() -> None:
    prefill, decode = pair()

    async def scenario(router: Router) -> None:
        assert router.fleet.image_input == INPUT
        await asyncio.to_thread(prefill.stop)
        await until(lambda: not any(view.ready and view.images for view in router.fleet.snapshot().nodes))
        assert router.fleet.image_input == INPUT, "a 503 is right, a 400 would be wrong"
        assert isinstance(await refusal_of(router, SMALL), Overloaded)

    run([prefill, decode], scenario)


def test_a_move_brings_no_pixels_unless_the_node_asks_for_them() -> None:
    """KV travels with a move. If it does not arrive, the node has to compute the prompt, and lacks its images."""
    pair = [ScriptedImageNode(MODEL, name, "both") for name in ("a", "b")]
    for node, peer in zip(pair, ("b", "a"), strict=True):
        node.description.connected_peers.append(peer)
    moving = threading.Event()
    calls: list[tuple[str, bool, int]] = []  # node, whether it pulls, number of resumed tokens

    def script_of(node: ScriptedImageNode) -> Script:
        async def script(conversation: Conversation) -> None:
            message = conversation.message
            resumed = sum(len(resume.token_ids) // 4 for resume in message.resume)
            calls.append((node.description.node_id, message.pull, resumed))
            if len(calls) == 1:
                conversation.token(5)
                await until(moving.is_set)
                conversation.token(6)
            elif len(calls) == 2:
                assert not node.most_at_once, "a move sends no pixels"
                await lacking(conversation)
            else:
                await until(lambda: bool(node.put))
                conversation.token(7, finish="length")

        return script

    for node in pair:
        node.scripts[SALT] = script_of(node)

    async def scenario(router: Router) -> None:
        request = router.request(SMALL)
        await request.start()
        await request.wait(1)
        source = calls[0][0]
        target = "b" if source == "a" else "a"
        (running,) = router.fleet.movable(source)
        running.move(Placement(target, source))
        moving.set()
        assert await request.wait() == [5, 6, 7]
        assert calls[1] == (target, True, 2)
        assert calls[2][1:] == (False, 2)
        assert (router.migrations("moved"), router.migrations("images")) == (1, 1)

    run(pair, scenario)


# ------------------------------------------------------------ a node's own service


def described(node: ImageNode) -> Any:
    """Return what an upload needs to know of a NodeClient."""
    return SimpleNamespace(
        description=pb.NodeDescription(node_id="n"), channel=node.channel, image_slots=asyncio.Semaphore(IMAGES_AT_ONCE)
    )


def test_a_node_has_the_pixels_that_the_router_sends(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3")

    async def body() -> None:
        async with asyncio.timeout(patience(60)), image_node(checkpoint) as node:
            errors: list[PdserveError] = []
            upload = ImageUpload([loaded(LARGE), loaded(SMALL), loaded(LARGE)], described(node), errors.append)
            await until(lambda: len(node.engine.pixels()) == 2)
            assert node.engine.pixels() == {LARGE.digest: LARGE.pixels, SMALL.digest: SMALL.pixels}
            again = ImageUpload([loaded(LARGE)], described(node), errors.append)
            await until(lambda: node.uploads.counts["known"] == 1)
            assert node.uploads.counts == {"stored": 2, "known": 1, "refused": 0}
            assert not errors
            upload.cancel()
            again.cancel()

    asyncio.run(body())


def test_a_full_node_gets_an_image_when_it_has_memory_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_PROMPT_SECONDS", 0.3)
    checkpoint = make_checkpoint(tmp_path / "model", "qwen3")
    second = Picture(200, 200, value=9)

    async def body() -> None:
        budget = len(LARGE.pixels) + 1
        async with asyncio.timeout(patience(60)), image_node(checkpoint, budget=budget) as node:
            errors: list[PdserveError] = []
            running = [ImageUpload([loaded(image)], described(node), errors.append) for image in (LARGE, second)]
            await until(lambda: node.uploads.counts["stored"] == 2)
            assert node.uploads.counts["refused"] > 0
            assert not errors
            running.append(ImageUpload([loaded(Picture(400, 200))], described(node), errors.append))
            await until(lambda: len(errors) == 1)
            assert isinstance(errors[0], RequestError), "it never fits"
            for upload in running:
                upload.cancel()

    asyncio.run(body())


# ------------------------------------------------------------ choice of nodes

FULL_BLOCK = ImageSpan(0, 4, 4, bytes(32))
OTHER_INPUT = msgspec.structs.replace(INPUT, fingerprint=bytes(32))


def view(name: str, role: str, images: ImageInput | None, **fields: Any) -> NodeView:
    peers = frozenset(("p", "q", "b")) - {name}
    return NodeView(
        name, role, MODEL, **{"ready": True, "compat_hash": "h", "connected_peers": peers, "images": images, **fields}
    )


def chosen(
    *views: NodeView, worth: bool = True, alone: bool = False, n: int = 1, span: ImageSpan = FULL_BLOCK
) -> tuple[dict[str, str], bool]:
    """Return the roles of the nodes for a prompt of 20 tokens, and whether P may compute it. Blocks have 16 tokens."""
    nodes = ImageNodes(MODEL)
    nodes.update({node.node_id: node.images for node in views if node.images is not None and node.ready})
    prefix = PromptPrefix(pack_tokens([1] * 20), b"", (span,))
    able, hands_off = nodes.choose(views, prefix, n, worth=worth, alone=alone)
    assert all(node.hands_off_all for node in able if node.decodes and node.images != nodes.accepted)
    return {node.node_id: node.role for node in able}, hands_off


def test_only_nodes_that_encode_images_compute_them() -> None:
    p = view("p", "prefill", INPUT)
    blind = view("q", "prefill", None)
    d = view("d", "decode", None)
    seeing = view("e", "decode", INPUT)
    assert chosen(p, blind, d, seeing) == ({"p": "prefill", "e": "decode", "d": "decode"}, True)
    far = view("f", "decode", None, connected_peers=frozenset(("q",)))
    assert chosen(p, blind, d, far) == ({"p": "prefill", "d": "decode"}, True)
    other = view("q", "prefill", OTHER_INPUT)
    assert chosen(p, other, d, far) == ({"p": "prefill", "d": "decode"}, True)
    assert chosen(p, view("b", "both", None)) == ({"p": "prefill", "b": "decode"}, True)
    assert chosen(p, view("b", "both", INPUT), d) == ({"p": "prefill", "b": "both", "d": "decode"}, True)


def test_prompts_that_must_not_be_handed_off_need_a_decode_node_that_encodes() -> None:
    p = view("p", "prefill", INPUT)
    d = view("d", "decode", None)
    seeing = view("e", "decode", INPUT)
    assert chosen(p, d, seeing, worth=False) == ({"e": "decode"}, False)
    with pytest.raises(RequestError, match="prompt_logprobs"):
        chosen(p, d, worth=False)
    assert chosen(p, d, seeing, alone=True) == ({"e": "decode"}, False)
    assert chosen(p, d, alone=True) == ({"p": "prefill", "d": "decode"}, True), "no other node can be on trial"


def test_choices_that_compute_an_image_need_a_decode_node_that_encodes() -> None:
    """They share full blocks. Without such a node, the decode node copies the last block."""
    p = view("p", "prefill", INPUT)
    d = view("d", "decode", None)
    seeing = view("e", "decode", INPUT)
    handed_off = {"p": "prefill", "e": "decode", "d": "decode"}
    late = ImageSpan(1, 4, 4, bytes(32))
    assert chosen(p, d, seeing, n=2) == (handed_off, True)
    assert chosen(p, d, seeing, span=late) == (handed_off, True)
    assert chosen(p, d, seeing, n=2, span=late) == ({"e": "decode"}, False)
    with pytest.raises(Overloaded):
        chosen(p, d, view("e", "decode", INPUT, ready=False), n=2, span=late)
    assert chosen(p, d, n=2, span=late) == ({"p": "prefill", "d": "decode"}, True)


def test_without_a_ready_node_that_encodes_images_come_503s() -> None:
    d = view("d", "decode", None)
    lost = view("p", "prefill", INPUT, ready=False)
    for nodes in ((d,), (d, lost), (lost,), (view("p", "prefill", INPUT),)):
        with pytest.raises(Overloaded, match="that encodes images is ready"):
            chosen(*nodes)
