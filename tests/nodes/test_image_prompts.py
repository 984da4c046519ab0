"""Prompts with images on the node that computes them: they wait for their pixels, and never for longer."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from image_node import BUDGET, ImageNode, Picture, Stream, image_node, prompt_with

from node.health import NodeState
from node.image_uploads import PixelClaim
from node.images import uploads
from node.images.incoming import IncomingImage
from node.reading.read_settings import ReadSettings
from node.reading.reading import Reading
from pdserve.errors import Draining, NodeError, Overloaded, PdserveError
from pdserve.images import ImageSpan
from pdserve.ipc.messages import Cancel, FreeLease, Mode, Submit
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.records import Peer
from pdserve.rpc.protobuf import images_from_pb, images_to_pb, pack_tokens
from pdserve.tracing.spans import NO_SPAN
from prefill_node.pulled_prefix import PulledPrefix

FIRST = Picture(2, 3, value=1)
SECOND = Picture(3, 2, value=2)
IDS, IMAGES = prompt_with(FIRST, SECOND)
ROLES = ("decode", "prefill")  # that the prompt is for
Scenario = Callable[[ImageNode], Awaitable[None]]


def run(checkpoint: Path, scenario: Scenario, **options: Any) -> None:
    async def body() -> None:
        async with image_node(checkpoint, **options) as node:
            await scenario(node)

    asyncio.run(body())


class Asker:
    """A stream that sends prompts to one role of the node."""

    def __init__(self, node: ImageNode, role: str) -> None:
        self._decodes = role == "decode"
        self.stream = Stream(node, pb_grpc.DecodeNodeStub if self._decodes else pb_grpc.PrefillNodeStub)

    async def ask(self, ids: list[int] = IDS, images: tuple[ImageSpan, ...] = IMAGES, **fields: Any) -> int:
        send = self.stream.generate if self._decodes else self.stream.prefill
        return await send(ids, images, **fields)

    async def cancel(self, number: int) -> None:
        if self._decodes:
            await self.stream.write(pb.ServeRequest(cancel=pb.Cancel(request=number)))
        else:
            await self.stream.write(pb.HandoffRequest(release=pb.ReleaseRequest(request=number)))

    def tokens(self, number: int) -> list[int]:
        if self._decodes:
            return [output.token_id for output in self.stream.outputs(number) if output.has_token]
        first = [event.first_tokens for event in self.stream.events(number) if event.HasField("first_tokens")]
        return [token.token_id for tokens in first for token in tokens.choices]

    def failure(self, number: int) -> pb.Failure | None:
        if self._decodes:
            failures = [output.failure for output in self.stream.outputs(number) if output.HasField("failure")]
        else:
            failures = [event.failed for event in self.stream.events(number) if event.HasField("failed")]
        assert len(failures) <= 1
        return failures[0] if failures else None


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("order", ["PQT", "TPQ", "PTQ"], ids=["pixels first", "prompt first", "prompt between"])
def test_a_prompt_is_computed_once_its_pixels_are_there(role: str, order: str, checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, role)
        number = 0
        for step in order:
            if step == "T":
                number = await asker.ask()
                await node.until(lambda: node.uploads._waiting or node.engine.submitted)
            else:
                assert not node.engine.submitted
                await node.put((FIRST if step == "P" else SECOND).pieces())
        await node.until(lambda: node.engine.submitted)
        assert node.engine.pixels() == {picture.digest: picture.pixels for picture in (FIRST, SECOND)}
        (submit,) = node.engine.submitted
        assert submit.images == IMAGES
        assert submit.mode is (Mode.LOCAL if role == "decode" else Mode.LEASE)
        node.engine.compute(submit)
        assert node.idle(), "the pixels are dropped with the first token"
        await node.until(lambda: asker.tokens(number) == [5])

    run(checkpoint, scenario)


def test_a_prompt_waits_for_pixels_while_the_engine_takes_none(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine reads commands between its steps, and a step may be long."""
    timeouts = 0

    def count(claim: Any) -> None:
        nonlocal timeouts
        timeouts += 1
        on_timeout(claim)

    on_timeout = uploads._Claim._on_timeout
    monkeypatch.setattr(uploads, "_PIXELS_SECONDS", 0.2)
    monkeypatch.setattr(uploads._Claim, "_on_timeout", count)

    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, "prefill")
        node.engine.writable.clear()
        puts = [asyncio.create_task(node.put(picture.pieces())) for picture in (FIRST, SECOND)]
        await node.until(lambda: node.engine.waiting == 2)
        number = await asker.ask()
        await node.until(lambda: timeouts >= 3)
        assert asker.failure(number) is None
        node.engine.writable.set()
        await asyncio.gather(*puts)
        await node.until(lambda: node.engine.submitted)

    run(checkpoint, scenario)


@pytest.mark.parametrize("role", ROLES)
def test_pixels_that_do_not_come_fail_the_prompt(role: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(uploads, "_PIXELS_SECONDS", 0.2)
    monkeypatch.setattr(uploads, "_PROMPT_SECONDS", 0.2)

    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, role)
        await node.put(FIRST.pieces())
        number = await asker.ask()
        await node.until(lambda: asker.failure(number))
        failure = asker.failure(number)
        assert failure is not None
        assert failure.code == pb.Failure.NEEDS_IMAGES
        assert "the pixels of 1 of 2 images did not arrive within 0.2 s; put them" in failure.message
        await node.put(SECOND.pieces())
        await node.until(node.idle)
        assert not node.engine.submitted
        again = await asker.ask()
        for picture in (FIRST, SECOND):
            await node.put(picture.pieces())
        await node.until(lambda: node.engine.submitted)
        node.engine.compute(node.engine.submitted[0])
        await node.until(lambda: asker.tokens(again) == [5])
        await node.until(node.idle)

    run(checkpoint, scenario)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("how", ["cancel", "stream", "engine", "deadline"])
def test_a_prompt_that_ends_while_it_waits_is_never_computed(role: str, how: str, checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, role)
        number = await asker.ask(timeout_ms=100 if how == "deadline" else 0)
        await node.put(FIRST.pieces())
        match how:
            case "deadline":
                await node.until(lambda: asker.failure(number))
            case "cancel":
                await node.until(lambda: node.uploads._waiting)
                await asker.cancel(number)
            case "stream":
                await node.until(lambda: node.uploads._waiting)
                await asker.stream.cancel()
            case "engine":
                await node.until(lambda: node.uploads._waiting)
                node.engine.refuse_all(NodeError("the engine hangs"))
        await node.until(lambda: not node.uploads._waiting)
        await node.until(lambda: any(isinstance(message, Cancel | FreeLease) for message in node.engine.sent))
        await node.put(SECOND.pieces())
        assert not node.engine.submitted
        node.uploads.clear()
        assert node.idle()

    run(checkpoint, scenario)


def test_prompts_share_pixels_until_the_last_of_them_is_computed(checkpoint: Path) -> None:
    """An equal image in another prompt, at another place, is the same upload."""
    ids, images = prompt_with(SECOND, FIRST, FIRST)

    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, "prefill")
        await asker.ask()
        await asker.ask(ids, images)
        for picture in (FIRST, SECOND) * 2:
            await node.put(picture.pieces())
        await node.until(lambda: len(node.engine.submitted) == 2)
        assert node.uploads.counts == {"stored": 2, "known": 2, "refused": 0}
        assert node.uploads.num_bytes == len(FIRST.pixels) + len(SECOND.pixels)
        for submit in node.engine.submitted:
            assert len(node.engine.pixels()) == 2
            node.engine.compute(submit)
        node.uploads.clear()  # the second Puts came after their prompt
        assert node.idle()

    run(checkpoint, scenario)


def test_pixels_stay_for_the_prompt_of_a_later_put(checkpoint: Path) -> None:
    """The first prompt ends between the second one's Put, which the node answered at once, and the second prompt."""
    ids, images = prompt_with(FIRST)

    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, "prefill")
        await asker.ask(ids, images)
        await node.put(FIRST.pieces())
        await node.until(lambda: node.engine.submitted)
        await node.put(FIRST.pieces())
        node.engine.compute(node.engine.submitted[0])
        assert node.engine.pixels()
        await asker.ask(ids, images)
        await node.until(lambda: len(node.engine.submitted) == 2)
        node.engine.compute(node.engine.submitted[1])
        assert node.idle()

    run(checkpoint, scenario)


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize("first", ["pixels", "prompt"])
def test_a_span_of_another_size_than_its_image_is_refused(role: str, first: str, checkpoint: Path) -> None:
    """The runner would find fewer or more rows than the prompt has tokens."""
    ids, _ = prompt_with(FIRST)
    lie = (ImageSpan(1, FIRST.columns, FIRST.rows, FIRST.digest),)

    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, role)
        honest = Asker(node, role)
        if first == "pixels":
            await node.put(FIRST.pieces())
        number = await asker.ask(ids, lie)
        other = await honest.ask(ids, (FIRST.span(1),))
        if first == "prompt":
            await node.until(lambda: len(node.uploads._waiting.get(FIRST.digest, ())) == 2)
            await node.put(FIRST.pieces())
        await node.until(lambda: asker.failure(number) and node.engine.submitted)
        failure = asker.failure(number)
        assert failure is not None
        assert failure.code == pb.Failure.INVALID
        assert "has height 8 and width 12; the prompt has tokens for 12 and 8" in failure.message
        (submit,) = node.engine.submitted
        node.engine.compute(submit)
        await node.until(lambda: honest.tokens(other) == [5])
        await node.until(node.idle)

    run(checkpoint, scenario)


@pytest.mark.parametrize("role", ROLES)
def test_images_that_never_fit_together_are_refused(role: str, checkpoint: Path) -> None:
    pictures = [Picture(10, 10, value=number) for number in range(3)]  # 4,800 bytes each

    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, role)
        number = await asker.ask(*prompt_with(*pictures))
        await node.until(lambda: asker.failure(number))
        failure = asker.failure(number)
        assert failure is not None
        assert failure.code == pb.Failure.INVALID
        assert "the pixels of the images take 14400 bytes, more than the 10000" in failure.message
        assert node.idle()
        assert not node.uploads._waiting

    run(checkpoint, scenario, budget=10_000)


def test_a_prompt_is_accepted_before_its_pixels(checkpoint: Path) -> None:
    """D's peer timeout runs meanwhile."""

    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, "prefill")
        number = await asker.ask()
        await node.until(lambda: asker.stream.events(number))
        assert [event.WhichOneof("kind") for event in asker.stream.events(number)] == ["accepted"]
        assert not node.engine.submitted

    run(checkpoint, scenario)


@pytest.mark.parametrize("paused", [True, False])
def test_a_pause_while_pixels_arrive_is_not_lost(paused: bool, checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, "decode")
        number = await asker.ask(paused=not paused)
        change = {"pause": pb.Pause(request=number)} if paused else {"resume": pb.Resume(request=number)}
        await asker.stream.write(pb.ServeRequest(**change))
        await node.until(lambda: node.engine.sent)
        for picture in (FIRST, SECOND):
            await node.put(picture.pieces())
        await node.until(lambda: node.engine.submitted)
        assert node.engine.submitted[0].paused is paused

    run(checkpoint, scenario)


def test_with_a_prefill_node_this_node_waits_for_no_pixels(checkpoint: Path) -> None:
    """They are at P. The engine refuses the request if it has to compute an image."""

    async def scenario(node: ImageNode) -> None:
        await Asker(node, "decode").ask(prefill_node="unknown")
        await node.until(lambda: node.engine.submitted)
        assert node.engine.submitted[0].images == IMAGES
        assert not node.uploads._waiting

    run(checkpoint, scenario)


def test_a_pull_names_the_images_and_waits_for_no_pixels(checkpoint: Path) -> None:
    """Also where the last token of the pulled prefix is one of an image."""
    ids, images = prompt_with(FIRST)

    async def scenario(node: ImageNode) -> None:
        await Asker(node, "prefill").ask(ids[:-1], images, cached_only=True)
        await node.until(lambda: node.engine.pulls)
        assert node.engine.pulls[0].images == images
        request = pb.PrefillRequest(token_ids=pack_tokens(IDS), images=images_to_pb(IMAGES))
        peers = Reading(ReadSettings()).attach(node.context)
        prefix = PulledPrefix(request, 1, NO_SPAN, node.engine, peers)
        assert images_from_pb(prefix.ask(Peer("source", "epoch", ())).images) == IMAGES

    run(checkpoint, scenario)


@pytest.mark.parametrize("role", ROLES)
def test_a_draining_node_takes_the_pixels_that_its_prompts_wait_for(role: str, checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, role)
        number = await asker.ask()
        await node.until(lambda: node.uploads._waiting)
        node.context.state = NodeState.DRAINING
        for picture in (FIRST, SECOND):
            await node.put(picture.pieces())
        await node.until(lambda: node.engine.submitted)
        assert (await node.refused(Picture(1, 1).pieces()))[0] == "RESOURCE_EXHAUSTED"
        node.engine.compute(node.engine.submitted[0])
        await node.until(lambda: asker.tokens(number) == [5])
        assert node.idle()

    run(checkpoint, scenario)


def test_prompts_that_wait_are_handed_over_with_the_rest(checkpoint: Path) -> None:
    async def scenario(node: ImageNode) -> None:
        asker = Asker(node, "decode")
        number = await asker.ask()
        await node.until(lambda: node.uploads._waiting)
        node.engine.refuse_all(Draining("the node shuts down"))
        await node.until(lambda: asker.failure(number))
        failure = asker.failure(number)
        assert failure is not None
        assert failure.code == pb.Failure.DRAINING
        assert not node.uploads._waiting

    run(checkpoint, scenario)


class Life:
    """A prompt of the random test, from its claim to its end."""

    def __init__(self, rid: int, pictures: list[Picture]) -> None:
        _, self.images = prompt_with(*pictures)
        self.submit = Submit(rid, b"", None, Mode.LEASE, images=self.images)  # type: ignore[arg-type]  # never run
        self.claim = PixelClaim()
        self.ready = False
        self.error: PdserveError | None = None

    def on_failed(self, error: PdserveError) -> None:
        assert not self.ready
        self.error = error


@pytest.mark.parametrize("seed", range(20))
def test_whatever_happens_in_whatever_order_no_prompt_lacks_pixels_and_none_stay(
    seed: int, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_PIXELS_SECONDS", 0.3)
    monkeypatch.setattr(uploads, "_PROMPT_SECONDS", 0.1)
    chance = random.Random(seed)
    pictures = [Picture(60, 60 + number % 3, value=number) for number in range(6)]  # 172,800 bytes and more: two parts

    async def put(node: ImageNode, picture: Picture) -> None:
        try:
            image = IncomingImage(picture.header(), node.uploads.memory)
        except Overloaded:
            return
        try:
            for piece in picture.pieces(60_000)[1:]:
                image.add(piece.data)
                await asyncio.sleep(chance.random() * 0.01)
            await image.check()
            await node.uploads.store(image)
        finally:
            image.close()

    def begin(node: ImageNode, life: Life) -> None:
        def then() -> None:
            life.ready = True
            node.engine.send(life.submit)

        life.claim = node.uploads.when_ready(life.images, then, life.on_failed)

    def check(node: ImageNode, lives: list[Life]) -> None:
        there = node.engine.pixels()
        for life in lives:
            if life.ready:
                assert {span.digest for span in life.images} <= there.keys()
        assert sum(map(len, there.values())) <= node.uploads.num_bytes <= BUDGET // 5

    async def scenario(node: ImageNode) -> None:
        lives: list[Life] = []
        puts: list[asyncio.Task[None]] = []
        for rid in range(150):
            choice = chance.random()
            if choice < 0.4:
                puts.append(asyncio.create_task(put(node, chance.choice(pictures))))
            elif choice < 0.55:
                lives.append(Life(rid, chance.sample(pictures, chance.randint(1, 3))))
                begin(node, lives[-1])
            elif choice < 0.75 and lives:  # it is computed, or cancelled while it waits
                life = lives.pop(chance.randrange(len(lives)))
                life.claim.release()
                life.claim.release()
            elif choice < 0.8 and puts:
                chance.choice(puts).cancel()
            elif choice < 0.9:
                (node.engine.writable.clear if chance.random() < 0.5 else node.engine.writable.set)()
            check(node, lives)
            await asyncio.sleep(chance.choice([0, 0.002]))
        node.engine.writable.set()
        await asyncio.wait(puts)
        assert all(task.cancelled() or task.exception() is None for task in puts)
        await node.until(lambda: all(life.ready or life.error for life in lives))
        check(node, lives)
        for life in lives:
            life.claim.release()
        await node.until(node.idle)
        assert not node.uploads._waiting
        assert not node.uploads._uploads

    run(checkpoint, scenario, budget=BUDGET // 5)
