"""Moved streams: D pulls the KV that P has cached, P computes nothing, and the tokens do not change."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from node_client import Generated, PrefillClient, PrefillFailed, RouterClient, greedy
from node_fleet import Nodes
from stages import BLOCK, PROMPT, Pair, start_pair
from test_resumed import KINDS, OUTPUT, choices, logprobs_of

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb

LENGTH = 75  # tokens of the prompt
BLOCK_SIZE = 8  # tokens
CACHED = LENGTH // BLOCK_SIZE * BLOCK_SIZE
DONE = 5  # tokens of the output before the move
_salts = itertools.count()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{length}/{seed}").choices(range(3, 128), k=length)


def begun(whole: Generated, done: int = DONE) -> dict[int, list[int]]:
    return {choice: tokens[:done] for choice, tokens in whole.choices.items() if len(tokens) > done}


@pytest.mark.parametrize("kind", KINDS)
def test_moved_request_yields_the_remaining_tokens(kind: str, nodes: Nodes) -> None:
    """The prompt was handed off to another D, so P has it."""
    prompt = prompt_of(LENGTH)
    sampling = KINDS[kind]
    salt = f"moved {next(_salts)}"
    with RouterClient(nodes.decode.address) as client:
        whole = client.generate(prompt, sampling, nodes.main, cache_salt=salt)
    done = begun(whole)
    nodes.settle()
    steps = nodes.prefill.status().steps
    pulled = nodes.counter("pulled_tokens", nodes.strict)
    with RouterClient(nodes.strict.address) as client:
        rest = client.generate(prompt, sampling, nodes.main, cache_salt=salt, resume=choices(done), pull=True)
    assert rest.failure is None, rest.failure
    for choice in done:
        assert rest.choices[choice] == whole.choices[choice][DONE:]
        assert rest.finish[choice] == whole.finish[choice]
        assert logprobs_of(rest, choice) == pytest.approx(logprobs_of(whole, choice)[DONE:], abs=1e-4)
    assert nodes.prefill.status().steps == steps, "P computes nothing"
    assert nodes.counter("pulled_tokens", nodes.strict) == pulled + CACHED


@pytest.mark.parametrize("resume", [{0: [5, 6]}, {}], ids=["resumed", "new"])
def test_what_p_has_not_cached_is_computed_also_with_the_policy_to_fail(
    resume: dict[int, list[int]], nodes: Nodes
) -> None:
    prompt = prompt_of(LENGTH, 1)
    salt = f"missing {next(_salts)}"
    steps = nodes.prefill.status().steps
    misses = nodes.counter("pull_misses", nodes.strict)
    failures = nodes.counter("handoff_failures", nodes.strict)
    with RouterClient(nodes.strict.address) as client:
        sampling = greedy(OUTPUT)
        answer = client.generate(
            prompt, sampling, nodes.main, cache_salt=salt, resume=choices(resume), pull=True
        ).tokens
        assert answer == client.generate(prompt, sampling, cache_salt=salt, resume=choices(resume)).tokens
    assert nodes.prefill.status().steps == steps
    assert nodes.counter("pull_misses", nodes.strict) == misses + 1
    assert nodes.counter("handoff_failures", nodes.strict) == failures


def test_new_prompt_may_be_pulled(nodes: Nodes) -> None:
    """The prompt's length is a multiple of a block: D computes the last block, and samples behind it."""
    prompt = prompt_of(CACHED)
    salt = f"new {next(_salts)}"
    with RouterClient(nodes.decode.address) as client:
        whole = client.generate(prompt, greedy(OUTPUT), nodes.main, cache_salt=salt).tokens
    pulled = nodes.counter("pulled_tokens", nodes.strict)
    with RouterClient(nodes.strict.address) as client:
        assert client.generate(prompt, greedy(OUTPUT), nodes.main, cache_salt=salt, pull=True).tokens == whole
    assert nodes.counter("pulled_tokens", nodes.strict) == pulled + CACHED - BLOCK_SIZE


def test_last_token_of_a_new_prompt_is_not_pulled(pair: Pair) -> None:
    """D samples behind it. A P that announces its block all the same is not believed."""
    cached = CachedPrompt(pair)

    def whole(event: pb.PrefillEvent) -> Sequence[pb.PrefillEvent]:
        if event.HasField("kv_ready"):
            event.kv_ready.num_tokens = len(PROMPT)
            event.kv_ready.block_ids.append(event.kv_ready.block_ids[0])
            event.kv_ready.digests.append(0)
        return (event,)

    pair.proxy.alter_event = whole
    with RouterClient(pair.decode.address) as client:
        answer = client.generate(
            PROMPT, greedy(pair.num_tokens), pair.prefill.address, cache_salt=cached.salt, pull=True
        )
    assert answer.tokens == pair.expected
    pair.proxy.reset()
    pair.check_served()


# ---------------------------------------------------------------- P's stream


def send_pull(client: PrefillClient, nodes: Nodes, prompt: list[int], skip: int = 0) -> list[str]:
    """Pull a prompt, and return the kinds of P's events."""
    request = pb.PrefillRequest(
        epoch=nodes.prefill.describe().epoch,
        token_ids=pack_tokens(prompt),
        sampling=sampling_to_pb(greedy(1)),
        skip_tokens=skip,
        cached_only=True,
    )
    prefill = client.send(request)
    kinds = [""]
    while kinds[-1] != "finished":
        event = prefill.next()
        kinds.append(event.WhichOneof("kind") or "")
        if event.HasField("kv_ready"):
            assert event.kv_ready.num_tokens == CACHED
            assert len(event.kv_ready.block_ids) == (CACHED - skip) // BLOCK_SIZE
    assert client.release(prefill) == ("kv_ready" in kinds), "a lease without blocks has ended at once"
    return kinds[1:]


def test_answers_of_p(nodes: Nodes) -> None:
    prompt = prompt_of(LENGTH, 2)
    with PrefillClient(nodes.prefill.address) as client:
        assert send_pull(client, nodes, prompt) == ["accepted", "finished"]
        request = pb.PrefillRequest(
            epoch=nodes.prefill.describe().epoch,
            token_ids=pack_tokens(prompt),
            sampling=sampling_to_pb(greedy(1)),
        )
        computed = client.send(request)
        computed.all()
        assert send_pull(client, nodes, prompt) == ["accepted", "kv_ready", "finished"]
        assert client.release(computed)
        assert send_pull(client, nodes, prompt, skip=16) == ["accepted", "kv_ready", "finished"]
        assert send_pull(client, nodes, prompt, skip=CACHED) == ["accepted", "finished"]
        request.cached_only = True
        request.skip_tokens = CACHED + BLOCK_SIZE
        with pytest.raises(PrefillFailed):
            client.send(request).all()


# ---------------------------------------------------------------- faults


@pytest.fixture(scope="module")
def pair(checkpoint: Path) -> Iterator[Pair]:
    flags = ["--kv-checksum", "on"]
    with start_pair(checkpoint, flags, decode_flags=["--peer-timeout", "2"], num_tokens=4 * DONE) as pair:
        yield pair


class CachedPrompt:
    """A prompt that P has cached, and D has not."""

    def __init__(self, pair: Pair) -> None:
        self.salt = f"cached {next(_salts)}"
        self.cached = len(PROMPT) // BLOCK * BLOCK
        with PrefillClient(pair.prefill.address) as client:
            request = pb.PrefillRequest(
                epoch=pair.prefill.describe().epoch,
                token_ids=pack_tokens(PROMPT),
                sampling=sampling_to_pb(greedy(1)),
                cache_salt=self.salt,
            )
            prefill = client.send(request)
            while prefill.next().WhichOneof("kind") != "finished":
                pass
            assert client.release(prefill)
        pair.prefill.wait_idle()

    def pull(self, pair: Pair) -> None:
        """Move a stream with this prompt to D, and check its tokens."""
        resume = [pb.ResumedChoice(choice=0, token_ids=pack_tokens(pair.expected[:DONE]))]
        with RouterClient(pair.decode.address) as client:
            answer = client.generate(
                PROMPT,
                greedy(pair.num_tokens),
                pair.prefill.address,
                cache_salt=self.salt,
                resume=resume,
                pull=True,
            )
        assert answer.tokens == pair.expected[DONE:]


def test_moved_stream_is_exact_with_checksums(pair: Pair) -> None:
    cached = CachedPrompt(pair)
    tokens = pair.prefill.counter("admitted_prompt_tokens")
    pulled = pair.decode.counter("pulled_tokens")
    cached.pull(pair)
    assert pair.decode.counter("pulled_tokens") == pulled + cached.cached
    assert pair.prefill.counter("admitted_prompt_tokens") == tokens
    pair.check_served()


def corrupted(event: pb.PrefillEvent) -> Sequence[pb.PrefillEvent]:
    if event.HasField("kv_ready"):
        event.kv_ready.digests[0] ^= 1
    return (event,)


def with_first_tokens(event: pb.PrefillEvent) -> Sequence[pb.PrefillEvent]:
    return (pb.PrefillEvent(first_tokens=pb.FirstTokens(choices=[pb.SampledToken(token_id=5)])), event)


def with_more_tokens(event: pb.PrefillEvent) -> Sequence[pb.PrefillEvent]:
    event.kv_ready.num_tokens += 4096 if event.HasField("kv_ready") else 0
    return (event,)


@pytest.mark.parametrize("alter", [corrupted, with_first_tokens, with_more_tokens])
def test_answer_that_lies_yields_no_wrong_token(alter: object, pair: Pair) -> None:
    cached = CachedPrompt(pair)
    failures = pair.decode.counter("handoff_failures")
    pair.proxy.alter_event = alter  # type: ignore[assignment]
    cached.pull(pair)
    pair.proxy.reset()
    assert pair.decode.counter("handoff_failures") == failures + 1
    pair.check_served()


@pytest.mark.parametrize(
    "when",
    [
        "blocks are announced",
        *(pytest.param(f"before the {what}", marks=pytest.mark.slow) for what in ("pull", "release")),
    ],
)
def test_killed_p_costs_no_token(when: str, pair: Pair) -> None:
    cached = CachedPrompt(pair)

    def kill(kind: str = "kv_ready") -> None:
        if kind == "kv_ready" and not killed:
            killed.append(kind)
            pair.prefill.kill()

    killed: list[str] = []
    if when == "before the pull":
        pair.proxy.before_prefill = kill
    elif when == "before the release":
        pair.proxy.before_release = kill
    else:
        pair.proxy.before_event = kill
    cached.pull(pair)
    assert killed
    pair.proxy.reset()
    pair.prefill.restart()
    pair.check_served()
