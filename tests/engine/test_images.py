"""Images in steps: encoded once, when a step needs them, within their memory; no prompt waits forever for one."""

from __future__ import annotations

import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from fast_set import examples
from hypothesis import given
from hypothesis import strategies as st
from toy import reference, state_after
from toy_images import DEPTH, INPUT, Picture, SeeingNode, ask, prompt_of, seen
from toy_node import BLOCK, DEPTHS, Node

from engine.images.image_cache import ImageCache
from engine.images.image_steps import no_images
from engine.images.pixel_store import PixelStore
from pdserve.config.simulated_costs import SimulatedCosts, SimulatedSteps
from pdserve.images import EncodingCost, Images
from pdserve.ipc.messages import Cancel, FreeLease, KVConfirmed, Mode, Pause, PrefillLocally, Refused, Resume, StartRead
from pdserve.kv.states import NO_SLOT
from pdserve.sampling_params import SamplingParams

A = Picture(1)
B = Picture(2)
LARGE = Picture(3, 3, 4)
MakeSeeing = Callable[..., SeeingNode]
COSTS = SimulatedCosts(step=2e-3, decode=0.0, decode_context=0.0, prompt_token=1e-3, prompt_context=0.0, hidden=0.0)


def paced(cost: float) -> dict[str, Any]:
    """Return the options of a node whose steps are to take 20 ms at most beside streams."""
    seconds = SimulatedSteps(COSTS, INPUT, EncodingCost(cost)).seconds
    return {"itl_target": 0.02, "batch_tokens": 64, "full_step": 64, "seconds": seconds}


@pytest.fixture
def see() -> Iterator[MakeSeeing]:
    """Yield what makes nodes with a tower; they are closed after the test."""
    with ExitStack() as stack:

        def make(num_blocks: int, depth: int = 1, stages: int = 1, **options: Any) -> SeeingNode:
            node = SeeingNode(num_blocks, depth, stages, **options)
            stack.callback(node.close)
            return node

        yield make


def encodings(node: SeeingNode) -> list[list[int]]:
    """Return the numbers of the pictures that each step with a forward pass encodes."""
    steps = [plan for plan in node.runner.launched if plan.scheduled]
    return [[int.from_bytes(image.digest, "little") for image in plan.images] for plan in steps]


def chunks(node: Node) -> list[list[int]]:
    """Return the tokens of each prompt's chunk in each step."""
    return [[item.num_tokens for item in plan.prompts] for plan in node.runner.launched if plan.prompts]


def refusals(node: Node, steps: int = 50) -> list[Refused]:
    refused: list[Refused] = []
    for _ in range(steps):
        refused += node.step().refused
        if node.engine.idle:
            return refused
    raise AssertionError("the engine does not come to rest")


# ---------------------------------------------------------------- the store


def test_pixels_come_in_parts_and_are_visible_when_complete() -> None:
    store = PixelStore()
    first, *rest = LARGE.parts(50)
    store.put(first)
    assert LARGE.digest not in store
    assert len(store) == 1
    for part in rest:
        store.put(part)
    assert store.get(LARGE.digest) == LARGE.pixels
    store.drop(LARGE.digest)
    store.drop(LARGE.digest)
    assert LARGE.digest not in store
    assert not len(store)


def test_an_incomplete_image_is_dropped_and_begins_again() -> None:
    store = PixelStore()
    store.put(LARGE.parts(50)[0])
    store.drop(LARGE.digest)
    for part in LARGE.parts(50):
        store.put(part)
    assert store.get(LARGE.digest) == LARGE.pixels


# ---------------------------------------------------------------- the cache


def test_the_cache_drops_the_least_recently_used_image() -> None:
    cache = ImageCache(10)
    for step, digest in enumerate([b"a", b"b", b"a"], 1):
        assert cache.use(digest, 5, step, ()) == (step < 3)
    cache.applied(3)
    assert cache.use(b"c", 5, 4, ())
    assert cache.take_dropped() == (b"b",)
    assert cache.num_bytes == 10


def test_images_of_steps_in_flight_and_kept_ones_stay() -> None:
    cache = ImageCache(10)
    cache.use(b"a", 5, 1, ())
    cache.use(b"b", 5, 2, ())
    cache.applied(1)
    assert not cache.fits({b"c": 6}, ())
    assert cache.fits({b"c": 5}, ())
    assert not cache.fits({b"c": 5}, {b"a"})
    assert cache.fits({b"a": 5, b"b": 5}, ())
    cache.applied(2)
    assert cache.fits({b"c": 10}, ())


def test_changes_name_complete_images_only() -> None:
    cache = ImageCache(10)
    cache.use(b"a", 5, 1, ())
    cache.completed(b"a")
    cache.use(b"b", 5, 1, ())  # partial
    assert cache.take_changes() == ([b"a"], [])
    cache.applied(1)
    cache.drop(b"b")
    cache.use(b"b", 5, 2, ())
    cache.completed(b"b")
    cache.use(b"c", 5, 2, ())
    cache.completed(b"c")
    assert cache.take_changes() == ([b"b", b"c"], [b"a"])
    cache.applied(2)
    cache.forget()
    assert cache.take_changes() == ([], [b"b", b"c"])


# ---------------------------------------------------------------- steps


def test_a_prompt_sees_its_images(see: MakeSeeing) -> None:
    node = see(40, cache=8)
    node.put(A, B)
    prompt = prompt_of(3, A, 2, B, 4)
    ask(node, 1, prompt, max_tokens=3)
    node.run()
    assert node.tokens[1, 0] == reference(seen(*prompt), 0, 3)
    assert encodings(node)[0] == [1, 2]
    assert Counter(node.seeing.encoded) == {A.digest: 1, B.digest: 1}
    assert node.scheduler.totals.images_encoded == 2
    node.assert_all_free()


def test_a_chunk_ends_before_an_image_that_exceeds_the_step(see: MakeSeeing) -> None:
    """A step has room for 16 tokens. The first image and what is before it fill it; the second needs the next step."""
    node = see(40, cache=8)
    node.put(A, B)
    ask(node, 1, prompt_of(3, A, 6, B, 4))
    node.run()
    assert encodings(node) == [[1], [2]]
    assert chunks(node) == [[13], [8]]


def test_an_image_larger_than_the_room_of_any_step_is_encoded_alone(see: MakeSeeing) -> None:
    node = see(40, cache=12, cost=100.0)
    node.put(LARGE)
    prompt = prompt_of(3, LARGE, 4)
    ask(node, 1, prompt)
    node.run()
    assert node.tokens[1, 0] == reference(seen(*prompt), 0, 1)
    assert chunks(node) == [[3], [BLOCK], [12]]
    assert encodings(node) == [[], [3], []]


def test_one_image_per_step_exceeds_its_room(see: MakeSeeing) -> None:
    node = see(80, cache=50, cost=100.0)
    node.put(A, B, LARGE)
    for rid, picture in enumerate((A, B, LARGE)):
        ask(node, rid, prompt_of(1, picture, 1))
    node.run()
    assert max(map(len, encodings(node))) == 1
    assert len(node.seeing.encoded) == 3


def test_equal_images_are_encoded_once_in_a_step_in_a_prompt_and_later(see: MakeSeeing) -> None:
    node = see(80, cache=8, cost=0.0)
    node.put(A)
    ask(node, 1, prompt_of(1, A, 1, A, 2))
    ask(node, 2, prompt_of(3, A, 2))
    node.run()
    node.drop(A)
    ask(node, 3, prompt_of(5, A, 2))
    node.run()
    assert node.seeing.encoded == [A.digest]
    assert node.scheduler.totals.image_cache_hits == 3
    assert (3, 0) in node.finished


def test_cached_prompts_encode_nothing(see: MakeSeeing) -> None:
    """Also after the pixels have gone, and where the embeddings have been dropped meanwhile."""
    node = see(80, cache=4)
    node.put(A, B)
    prompt = prompt_of(4, A, 5)
    for rid, picture in enumerate((A, B, A)):
        ask(node, rid, prompt if picture is A else prompt_of(4, B, 5))
        node.run()
        node.drop(picture)
    assert node.seeing.encoded == [A.digest, B.digest]
    assert node.tokens[2, 0] == node.tokens[0, 0]


def test_a_prefix_that_ends_amid_an_image_encodes_the_whole_image(see: MakeSeeing) -> None:
    node = see(80, cache=12)
    node.put(LARGE, A)
    ask(node, 1, prompt_of(2, LARGE, 3))
    node.run()
    ask(node, 2, prompt_of(2, A, 3))  # drops the embeddings of the first
    node.run()
    ids, images = prompt_of(2, LARGE, 3)
    other = [*ids[:-3], 77, 78, 79]
    ask(node, 3, (other, images))
    node.run()
    assert node.tokens[3, 0] == reference(seen(other, images), 0, 1)
    assert node.scheduler.totals.prefix_cached_tokens == 12
    assert node.seeing.encoded == [LARGE.digest, A.digest, LARGE.digest]


def test_two_images_of_equal_size_under_the_same_text_share_no_block(see: MakeSeeing) -> None:
    node = see(80, cache=20)
    node.put(A, B)
    for rid, picture in enumerate((A, B, A)):
        ask(node, rid, prompt_of(2 * BLOCK, picture, 2 * BLOCK), max_tokens=3)
        node.run()
    assert node.tokens[0, 0] == node.tokens[2, 0] != node.tokens[1, 0]
    assert node.scheduler.totals.prefix_cached_tokens == 2 * BLOCK + 4 * BLOCK


def test_other_weights_make_other_embeddings(see: MakeSeeing) -> None:
    node = see(80, cache=20)
    node.put(A)
    ask(node, 1, prompt_of(2, A, 3))
    node.run()
    node.scheduler.forget_cached()
    ask(node, 2, prompt_of(2, A, 3))
    node.run()
    assert node.seeing.encoded == [A.digest, A.digest]
    assert node.seeing.embeddings == {A.digest: 4}


def test_choices_share_the_images_of_their_prompt(see: MakeSeeing) -> None:
    """The prompt ends amid a block in which the image ends: other choices begin with copies of the block."""
    node = see(80, cache=4)
    node.put(A)
    prompt = prompt_of(2, A, 1)
    ask(node, 1, prompt, sampling=SamplingParams(max_tokens=4, n=3))
    node.run()
    assert [node.tokens[1, choice] for choice in range(3)] == [reference(seen(*prompt), c, 4) for c in range(3)]
    assert node.seeing.encoded == [A.digest]
    assert chunks(node) == [[7], [1, 1]]
    node.assert_all_free()


def hand_off(node: Node, prompt: tuple[list[int], Images], sampling: SamplingParams) -> None:
    """Hand a prompt off: its KV comes into the blocks of the sequence, with the first token of each choice."""
    ids = seen(*prompt)
    ask(node, 1, prompt, sampling=sampling, mode=Mode.HANDOFF)
    node.step()
    (sequence,) = node.scheduler._live.of_request(1)
    blocks = sequence.table.blocks
    state = NO_SLOT if sequence.state is None else 0
    node.obey(StartRead(1, "unknown", tuple(blocks), len(ids), remote_state=state))  # fails: the test writes the bytes
    while not node.step().reads:
        time.sleep(0.001)  # the connector's thread reports it
    for position, token in enumerate(ids):
        node.runner.cache[blocks[position // BLOCK], 0, 0, :, position % BLOCK, 0] = token, position
    if sequence.state is not None:
        node.runner.slots[sequence.state.slot, :2] = state_after(ids)
    node.obey(KVConfirmed(1, len(ids), tuple(tuple(reference(ids, choice, 1)) for choice in range(sampling.n))))


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("slots", [0, 12], ids=["attention", "recurrent"])
def test_choices_behind_a_handoff_need_no_pixels(slots: int, depth: tuple[int, int], see: MakeSeeing) -> None:
    prompt = prompt_of(2, A, 1)
    node = see(80, *depth, cache=20, images=no_images, state_slots=slots)
    hand_off(node, prompt, SamplingParams(max_tokens=6, n=3))
    assert not refusals(node)
    assert [node.tokens[1, choice] for choice in range(3)] == [reference(seen(*prompt), c, 6)[1:] for c in range(3)]
    node.assert_all_free()


@pytest.mark.parametrize("slots", [0, 12], ids=["attention", "recurrent"])
def test_copied_block_stays_while_a_step_copies_it(slots: int, see: MakeSeeing) -> None:
    """The first choice ends while the steps that begin the others are in flight."""
    prompt = prompt_of(2, A, 1)
    second = reference(seen(*prompt), 0, 2)[1]
    node = see(80, 2, cache=20, images=no_images, state_slots=slots)
    hand_off(node, prompt, SamplingParams(max_tokens=6, n=2, stop_token_ids=(second,)))
    ask(node, 2, prompt_of(12), max_tokens=8)
    assert not refusals(node)
    expected = reference(seen(*prompt), 1, 6, stop=(second,))[1:]
    assert [node.tokens[1, choice] for choice in range(2)] == [[second], expected]
    assert node.tokens[2, 0] == reference(prompt_of(12)[0], 0, 8)
    node.assert_all_free()


@pytest.mark.parametrize("end", [Cancel(1), Pause(1)], ids=["cancelled", "paused"])
@pytest.mark.parametrize("slots", [0, 12], ids=["attention", "recurrent"])
def test_choice_that_ends_or_pauses_before_its_first_step_frees_its_blocks(
    slots: int, end: Cancel | Pause, see: MakeSeeing
) -> None:
    prompt = prompt_of(2, A, 1)
    node = see(80, cache=20, images=no_images, state_slots=slots)
    hand_off(node, prompt, SamplingParams(max_tokens=6, n=3))
    node.obey(end)
    assert not refusals(node)
    if isinstance(end, Pause):
        node.obey(Resume(1))
        assert not refusals(node)
        assert [node.tokens[1, c] for c in range(3)] == [reference(seen(*prompt), c, 6)[1:] for c in range(3)]
    node.assert_all_free()


def test_choices_without_a_free_block_need_pixels(see: MakeSeeing) -> None:
    prompt = prompt_of(2, A, 1)
    node = see(2, cache=20, images=no_images)
    hand_off(node, prompt, SamplingParams(max_tokens=2, n=2))
    assert [event.kind for event in refusals(node)] == ["ImagesMissing"]
    node.assert_all_free()


def test_a_prompt_for_a_peer_is_leased_with_its_images(see: MakeSeeing) -> None:
    node = see(80, cache=8)
    node.put(A, B)
    prompt = prompt_of(3, A, 2, B, 4)
    ask(node, 1, prompt, mode=Mode.LEASE)
    leased = []
    while not node.engine.idle:
        leased += node.step().leased
    assert node.kv_of(leased) == seen(*prompt)
    node.obey(FreeLease(1))
    node.assert_all_free()


def test_a_pull_without_kv_encodes_the_images(see: MakeSeeing) -> None:
    node = see(80, cache=8)
    node.put(A)
    prompt = prompt_of(3, A, 4)
    ask(node, 1, prompt, mode=Mode.PULL_AND_LEASE)
    node.step()
    assert not node.seeing.encoded
    node.obey(KVConfirmed(1, 0, ()))
    node.run()
    assert node.seeing.encoded == [A.digest]
    node.obey(FreeLease(1))
    node.assert_all_free()


def test_backlog_counts_the_work_of_encoding(see: MakeSeeing) -> None:
    node = see(80, cache=8, cost=3.0)
    node.put(A)
    ask(node, 1, prompt_of(2, A, 2))
    assert node.scheduler.status().backlog == 8 + 12
    node.run()
    assert node.scheduler.status().backlog == 0


# ---------------------------------------------------------------- refusals


def test_a_prompt_without_pixels_is_refused_and_others_go_on(see: MakeSeeing) -> None:
    node = see(80, cache=20)
    node.put(A)
    for part in B.parts(5)[:-1]:
        node.obey(part)
    ask(node, 1, prompt_of(2, A, 3, B, 2))
    ask(node, 2, prompt_of(2, A, 3))
    (refused,) = refusals(node)
    assert refused.rid == 1
    assert refused.kind == "ImagesMissing"
    assert "the pixels of the image at token 9 are no longer on this node; put them" in refused.message
    assert (2, 0) in node.finished
    assert node.seeing.encoded == [A.digest]
    node.assert_all_free()


def test_a_node_without_a_tower_refuses_what_it_would_have_to_encode(see: MakeSeeing) -> None:
    node = see(80, cache=20, images=no_images)
    ask(node, 1, prompt_of(2, A, 3))
    (refused,) = refusals(node)
    assert refused.kind == "ImagesMissing"
    assert "this node encodes no images, and has to compute the one at token 2" in refused.message
    node.assert_all_free()


@pytest.mark.parametrize("seeing", [True, False])
def test_a_handoff_that_fails_is_refused_without_pixels(seeing: bool, see: MakeSeeing) -> None:
    node = see(80, cache=20) if seeing else see(80, cache=20, images=no_images)
    ask(node, 1, prompt_of(2, A, 3), mode=Mode.HANDOFF)
    assert not refusals(node)
    node.obey(PrefillLocally(1))
    (refused,) = refusals(node)
    assert refused.kind == "ImagesMissing"
    node.assert_all_free()


def test_a_preempted_sequence_without_pixels_uses_the_prefix_cache(see: MakeSeeing) -> None:
    """Its image is in a full block, which stays cached while nothing else needs it."""
    node = see(80, cache=4)
    node.put(A, B)
    prompt = prompt_of(2, A, 3)
    ask(node, 1, prompt, max_tokens=8)
    node.step()
    node.drop(A)
    ask(node, 2, prompt_of(1, B, 1))
    node.step()  # drops the embeddings
    (sequence,) = node.scheduler._live.of_request(1)
    node.scheduler.room.preempt(sequence)
    assert not refusals(node)
    assert node.tokens[1, 0] == reference(seen(*prompt), 0, 8)


def test_a_preempted_sequence_whose_blocks_have_gone_needs_its_pixels_again(see: MakeSeeing) -> None:
    node = see(10, cache=4)
    node.put(A, B)
    ask(node, 1, prompt_of(2, A, 3), max_tokens=20)
    node.step()
    node.drop(A)
    (sequence,) = node.scheduler._live.of_request(1)
    node.scheduler.room.preempt(sequence)
    node.obey(Pause(1))
    ask(node, 2, prompt_of(1, B, 34))
    assert not refusals(node)
    node.obey(Resume(1))
    (refused,) = refusals(node)
    assert (refused.rid, refused.kind) == (1, "ImagesMissing")
    node.assert_all_free()


def test_a_choice_that_is_refused_ends_its_request_beside_a_running_one(see: MakeSeeing) -> None:
    """The step that finds out decodes the other choice: the runner may not drop that before the step."""
    node = see(40, cache=4)
    node.put(A)
    ask(node, 1, prompt_of(2, A, 1), sampling=SamplingParams(max_tokens=20, n=2))
    for _ in range(3):
        node.step()
    node.drop(A)
    node.scheduler._kv.forget_cached()
    node.scheduler.images.forget()
    victim = node.scheduler._live.of_request(1)[1]
    node.scheduler.room.preempt(victim)
    refused = refusals(node)
    assert [event.kind for event in refused] == ["ImagesMissing"]
    node.assert_all_free()


def test_an_image_that_never_fits_is_refused_at_once(see: MakeSeeing) -> None:
    node = see(80, cache=11)
    node.put(LARGE)
    ask(node, 1, prompt_of(2, LARGE, 3))
    (refused,) = refusals(node)
    assert refused.kind == "RequestError"
    assert "takes 120 bytes of embeddings, more than the 110 of this node's --image-cache" in refused.message


# ---------------------------------------------------------------- targets


def test_streams_keep_their_gap_while_images_are_encoded(see: MakeSeeing) -> None:
    """An image of 3 tokens costs as much as 12 of text; the target allows steps of 20 ms, a token takes 1 ms."""
    node = see(400, cache=400, cost=4.0, **paced(4.0))
    pictures = [Picture(10 + number, 1, 3) for number in range(12)]  # 12 ms each
    node.put(*pictures)
    ask(node, 1, prompt_of(4), max_tokens=80)
    for _ in range(4):
        node.step()
    for rid, picture in enumerate(pictures, 2):
        ask(node, rid, prompt_of(10 * rid, picture, 2), client=rid)
    node.run()
    mixed = [plan for plan in node.runner.launched if plan.num_decodes and plan.images]
    assert mixed
    assert max(len(plan.images) for plan in mixed[2:]) <= 2  # the rest of one, and the beginning of another
    assert len(node.seeing.encoded) == len(pictures)


def paced_node(see: MakeSeeing, cost: float, depth: int = 1, stages: int = 1, cache: int = 40) -> SeeingNode:
    """Return a node with a stream that decodes, whose steps with prompts may take 20 ms; a token takes 1 ms."""
    node = see(400, depth, stages, cache=cache, cost=cost, **paced(cost))
    ask(node, 1, prompt_of(4), max_tokens=200)
    for _ in range(8):
        node.step()
    ask(node, 2, prompt_of(90), max_tokens=1)  # the node learns what a token costs
    run_until(node, 2)
    return node


def run_until(node: SeeingNode, *rids: int) -> None:
    """Step until these requests have ended."""
    for _ in range(100):
        if all((rid, 0) in node.finished for rid in rids):
            return
        node.step()
    raise AssertionError("a request does not end")


def pieces(node: SeeingNode, picture: Picture) -> list[tuple[int, int]]:
    """Return the pieces in which a picture was encoded."""
    plans = node.runner.launched
    return [(image.first, image.last) for plan in plans for image in plan.images if image.digest == picture.digest]


def test_an_image_beside_a_stream_is_encoded_in_pieces(see: MakeSeeing) -> None:
    """The image takes 60 ms, a block of the tower 12. Each step decodes, too, and takes 20 ms at most."""
    node = paced_node(see, 5.0)
    node.put(LARGE)
    prompt = prompt_of(3, LARGE, 4)
    begin = len(node.runner.launched)
    ask(node, 3, prompt)
    run_until(node, 3)
    assert node.tokens[3, 0] == reference(seen(*prompt), 0, 1)
    assert pieces(node, LARGE) == [(block, block + 1) for block in range(DEPTH)]
    assert all(plan.num_decodes for plan in node.runner.launched[begin:])
    steps = SimulatedSteps(COSTS, INPUT, EncodingCost(5.0))
    assert max(map(steps.seconds, node.runner.launched[begin:])) <= 0.0205
    assert node.scheduler.totals.images_encoded == 1
    assert node.scheduler.totals.image_cache_hits == 0
    ask(node, 4, prompt_of(5, LARGE, 4))
    run_until(node, 4)
    assert node.scheduler.totals.image_cache_hits == 1


def test_a_block_that_exceeds_every_step_is_run_all_the_same(see: MakeSeeing) -> None:
    node = paced_node(see, 100.0)
    node.put(LARGE, A)
    ask(node, 3, prompt_of(3, LARGE, 4))
    ask(node, 4, prompt_of(2, A, 4))
    run_until(node, 3, 4)
    for picture in (LARGE, A):
        assert pieces(node, picture) == [(block, block + 1) for block in range(DEPTH)]
    assert max(len(plan.images) for plan in node.runner.launched) == 1


def test_an_image_without_streams_is_encoded_in_one_piece(see: MakeSeeing) -> None:
    node = see(400, cache=40, cost=100.0, **paced(100.0))
    node.put(LARGE)
    ask(node, 3, prompt_of(3, LARGE, 4))
    node.run()
    assert pieces(node, LARGE) == [(0, DEPTH)]


def test_the_rest_of_an_image_whose_streams_have_ended_is_one_piece(see: MakeSeeing) -> None:
    node = paced_node(see, 5.0)
    node.put(LARGE)
    prompt = prompt_of(LARGE, 4)
    ask(node, 3, prompt)
    node.step()
    node.step()
    node.obey(Cancel(1))
    node.run()
    assert pieces(node, LARGE) == [(0, 1), (1, 2), (2, DEPTH)]
    assert node.tokens[3, 0] == reference(seen(*prompt), 0, 1)


def test_a_prompt_that_ends_frees_its_partial_image(see: MakeSeeing) -> None:
    """Its hidden states make room for those of another one, and its embeddings, of which there is room for one."""
    node = paced_node(see, 5.0, cache=12)
    other = Picture(4, 3, 4)
    node.put(LARGE, other)
    ask(node, 3, prompt_of(LARGE, 4))
    node.step()
    assert node.seeing.partial.keys() == {LARGE.digest}
    node.obey(Cancel(3))
    node.drop(LARGE)
    ask(node, 4, prompt_of(other, 4))
    node.step()
    assert node.seeing.partial.keys() == {other.digest}
    run_until(node, 4)
    assert node.seeing.encoded == [other.digest]


def test_a_partial_image_goes_on_for_another_prompt_and_without_pixels(see: MakeSeeing) -> None:
    node = paced_node(see, 5.0)
    node.put(LARGE)
    ask(node, 3, prompt_of(LARGE, 4))
    ask(node, 4, prompt_of(LARGE, 5), client=2)
    node.step()
    node.step()
    node.obey(Cancel(3))
    node.drop(LARGE)
    run_until(node, 4)
    assert node.tokens[4, 0] == reference(seen(*prompt_of(LARGE, 5)), 0, 1)
    assert pieces(node, LARGE) == [(block, block + 1) for block in range(DEPTH)]


def test_a_preempted_prompt_begins_its_image_again(see: MakeSeeing) -> None:
    node = paced_node(see, 5.0)
    node.put(LARGE)
    ask(node, 3, prompt_of(LARGE, 4))
    node.step()
    node.step()
    (sequence,) = node.scheduler._live.of_request(3)
    node.scheduler.room.preempt(sequence)
    run_until(node, 3)
    assert pieces(node, LARGE)[2:] == [(block, block + 1) for block in range(DEPTH)]


def test_a_paused_prompt_gives_its_partial_image_up(see: MakeSeeing) -> None:
    node = paced_node(see, 5.0)
    node.put(LARGE)
    ask(node, 3, prompt_of(LARGE, 4))
    node.step()
    node.obey(Pause(3))
    node.step()
    assert not node.seeing.partial
    node.obey(Resume(3))
    run_until(node, 3)
    assert len(pieces(node, LARGE)) == 1 + DEPTH


def test_other_weights_drop_a_partial_image(see: MakeSeeing) -> None:
    node = paced_node(see, 5.0)
    node.put(LARGE)
    ask(node, 3, prompt_of(LARGE, 4))
    node.step()
    node.scheduler.images.forget()
    run_until(node, 3)
    assert pieces(node, LARGE) == [(0, 1), *((block, block + 1) for block in range(DEPTH))]


def test_prompts_complete_the_partial_image_of_a_later_one(see: MakeSeeing) -> None:
    """The older prompt reaches its image while the later one's is partial, and there is memory for one of the two."""
    node = paced_node(see, 8.0, cache=12)
    other = Picture(4, 3, 4)
    node.put(LARGE, other)
    prompts = {3: prompt_of(60, LARGE, 4), 4: prompt_of(other, 5)}
    for rid, prompt in prompts.items():
        ask(node, rid, prompt, client=rid)
    for _ in range(60):
        node.step()
    for rid, prompt in prompts.items():
        assert node.tokens[rid, 0] == reference(seen(*prompt), 0, 1)
    assert sorted(set(node.seeing.encoded)) == sorted({LARGE.digest, other.digest})


# ---------------------------------------------------------------- everything at once


@pytest.mark.parametrize("depth", DEPTHS)
@given(seed=st.integers(0, 1 << 30))
@examples(40)
def test_every_prompt_ends_whatever_happens(depth: tuple[int, int], seed: int) -> None:
    """Little memory for KV and embeddings, cancels, pauses, pixels that go with the first token as in a frontend."""
    chance = random.Random(seed)
    check_every_prompt_ends(depth, chance, chance.choice((14, 20, 40)), state_slots=chance.choice((0, 0, 20)))


@pytest.mark.parametrize("depth", DEPTHS)
@given(seed=st.integers(0, 1 << 30))
@examples(40)
def test_every_prompt_ends_where_steps_compute_whole_images(depth: tuple[int, int], seed: int) -> None:
    """The runner asserts that no step ends inside an image. Prefix hits do, and blocks run out."""
    chance = random.Random(seed)
    windows = chance.choice(((None,), (None, 6), (9, None)))
    num_blocks = chance.choice((20, 30, 40)) * len(windows)
    check_every_prompt_ends(
        depth, chance, num_blocks, whole=True, windows=windows, batch_tokens=chance.choice((19, 30))
    )


def check_every_prompt_ends(depth: tuple[int, int], chance: random.Random, num_blocks: int, **options: Any) -> None:
    cache = chance.choice((12, 13, 20, 40))
    cost = chance.choice((0.0, 0.3, 1.0, 5.0, 30.0))
    steps = SimulatedSteps(SimulatedCosts(prompt_token=2e-3), INPUT, EncodingCost(cost))
    node = SeeingNode(
        num_blocks,
        *depth,
        cache=cache,
        cost=cost,
        itl_target=chance.choice((0.0, None, 0.02)),
        ttft_target=chance.choice((0.0, 0.5)),
        layered=chance.random() < 0.3,
        seconds=steps.seconds,
        **options,
    )
    pictures = [Picture(number, chance.randint(1, 3), chance.randint(1, 4)) for number in range(1, 7)]
    pixels = Counter[int]()  # prompts that need them, by number of the picture
    open_prompts: dict[int, list[int]] = {}  # numbers of the pictures whose pixels are here, by rid
    expected: dict[int, list[int]] = {}
    cancelled: set[int] = set()
    refused: dict[int, str] = {}
    paused: set[int] = set()

    def release(rid: int) -> None:
        for number in open_prompts.pop(rid, ()):
            pixels[number] -= 1
            if not pixels[number]:
                node.drop(pictures[number])

    def submit(rid: int) -> None:
        numbers = [chance.randrange(len(pictures)) for _ in range(chance.randint(0, 3))]
        parts: list[int | Picture] = [chance.randint(1, 6)]
        for number in numbers:
            parts += [pictures[number], chance.randint(1, 3)]
        ids, images = prompt_of(*parts)
        for number in set(numbers):
            if not pixels[number]:
                node.put(pictures[number])
            pixels[number] += 1
        open_prompts[rid] = list(set(numbers))
        max_tokens = chance.randint(1, 6)
        expected[rid] = reference(seen(ids, images), 0, max_tokens)
        ask(node, rid, (ids, images), max_tokens=max_tokens, client=chance.randint(0, 2))

    reported = set[bytes]()  # images with embeddings, as routers learn them
    last = 0
    for _ in range(400):
        if last < 14 and chance.random() < 0.3:
            last += 1
            submit(last)
        live = [rid for rid in expected if (rid, 0) not in node.finished and rid not in cancelled | refused.keys()]
        if live and chance.random() < 0.1:
            rid = chance.choice(live)
            match chance.randrange(4):
                case 0:
                    cancelled.add(rid)
                    node.obey(Cancel(rid))
                    release(rid)
                case 1 if rid not in paused:
                    paused.add(rid)
                    node.obey(Pause(rid))
                case _:
                    paused.discard(rid)
                    node.obey(Resume(rid))
        if last == 14:
            for rid in paused & set(live):
                node.obey(Resume(rid))
            paused.clear()
        running = list(node.scheduler._live.running.values())
        if running and chance.random() < 0.02 and not node.scheduler._in_flight:
            node.scheduler.room.preempt(chance.choice(running))
        if not node.engine.idle:
            batch = node.step()
            assert reported >= set(batch.images_dropped)
            reported = reported - set(batch.images_dropped) | set(batch.images_cached)
            for event in batch.refused:
                refused[event.rid] = event.kind
                release(event.rid)
            for prefilled in batch.prefilled:
                release(prefilled.rid)
        elif last == 14 and not live:
            break
    assert node.engine.idle
    cached, dropped = node.scheduler.images.take_changes()
    assert reported - set(dropped) | set(cached) == node.seeing.embeddings.keys()
    for rid, tokens in expected.items():
        if rid in refused:
            assert refused[rid] == "ImagesMissing"
            assert node.tokens[rid, 0], "its pixels were here until its first token"
        elif rid not in cancelled:
            assert node.tokens[rid, 0] == tokens
    assert last == 14
    node.assert_all_free()
    node.close()
