"""Prompts that a prefill node computes in many steps, and faults between the parts that it announces."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Iterator

import pytest
from fault_proxy import Lost, Refusal
from machine import patience
from node_client import Prefill, PrefillClient, PrefillFailed, RouterClient, greedy
from stages import ATTEMPTS, BLOCK, DECODE_AHEAD, LENGTH, RELEASE_SECONDS, STEP, Pair

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb
from pdserve.sampling_params import SamplingParams

BLOCK_BYTES = 2 * 2 * 2 * BLOCK * 32 * 4  # layers, heads, K and V, tokens, head size, float32


def prompt_of(seed: int, length: int = LENGTH) -> list[int]:
    rng = random.Random(f"streamed {seed}")
    return [rng.randrange(3, 128) for _ in range(length)]


def send_long_prompt(client: PrefillClient, epoch: str, index: int, salt: str) -> Prefill:
    """Send a prompt of 16 steps and wait for its first ``index`` events."""
    tokens = pack_tokens(prompt_of(index, 1000))
    request = pb.PrefillRequest(epoch=epoch, token_ids=tokens, sampling=sampling_to_pb(greedy(1)), cache_salt=salt)
    prefill = client.send(request)
    for _ in range(index):
        prefill.next()
    return prefill


def check_all_leases_ended(pair: Pair) -> None:
    """Check that every block is free, and that each lease ended in one counted way."""
    pair.prefill.wait_idle(RELEASE_SECONDS)
    granted = pair.prefill.counter("leases_granted")
    assert granted == sum(pair.prefill.counter(f"leases_{end}") for end in ("released", "expired", "aborted"))


def on_part(number: int, action: Callable[[], None]) -> Callable[[str], None]:
    """Return a hook that acts before the ``number``-th announcement of blocks (from 1) is forwarded."""
    seen: list[str] = []

    def hook(kind: str) -> None:
        seen.append(kind)
        if kind == "kv_ready" and seen.count(kind) == number:
            action()

    return hook


@pytest.fixture
def pair(shared_pair: Pair) -> Iterator[Pair]:
    """Check that both nodes are idle after each test, and reset the proxy."""
    yield shared_pair
    shared_pair.proxy.reset()
    for node in (shared_pair.prefill, shared_pair.decode):
        node.wait_idle()


def test_announced_blocks_are_read_while_the_prompt_is_computed(pair: Pair) -> None:
    """D reads all but the last part, each once, while the proxy delays the first tokens."""
    prompt = prompt_of(1)
    before = pair.decode.counter("kv_read_bytes")

    def num_read() -> float:
        return (pair.decode.counter("kv_read_bytes") - before) / BLOCK_BYTES

    def wait_for_reads(kind: str) -> None:
        if kind == "first_tokens":
            pair.decodes.wait_until(lambda: num_read() == LENGTH // STEP * STEP // BLOCK, 10.0)

    pair.proxy.before_event = wait_for_reads
    with RouterClient(pair.decode.address) as client:
        expected = client.generate(prompt, greedy(12), cache_salt="local").tokens
        failures = pair.decode.counter("handoff_failures")
        assert client.generate(prompt, greedy(12), pair.prefill.address).tokens == expected
    assert num_read() == -(-LENGTH // BLOCK)
    assert pair.decode.counter("handoff_failures") == failures


def test_priority_and_client_of_a_request_reach_p(pair: Pair) -> None:
    seen: list[tuple[int, int]] = []

    def note(request: pb.HandoffRequest) -> list[pb.HandoffRequest]:
        if request.HasField("prefill"):
            seen.append((request.prefill.priority, request.prefill.client))
        return [request]

    pair.proxy.alter_request = note
    with RouterClient(pair.decode.address) as client:
        client.generate(prompt_of(3), greedy(2), pair.prefill.address, priority=-3, client=2**64 - 1)
    assert seen == [(-3, 2**64 - 1)]


def test_parts_are_announced_in_order(pair: Pair) -> None:
    epoch = pair.prefill.describe().epoch
    request = pb.PrefillRequest(
        epoch=epoch, token_ids=pack_tokens(prompt_of(2)), sampling=sampling_to_pb(greedy(4)), skip_tokens=2 * BLOCK
    )
    with PrefillClient(pair.prefill.address) as client:
        prefill = client.send(request)
        _, *parts, first, last = prefill.all()
        assert [part.HasField("last_chunk") for part in parts].count(True) == 1, (
            "before the step with the last part ends"
        )
        parts = [*(part for part in parts if not part.HasField("last_chunk")), last]
        kinds = [kind for message in client.messages for kind in message]
        at = kinds.index("first_tokens")
        assert kinds[at : at + 3] == ["first_tokens", "kv_ready", "finished"]
        assert len(first.first_tokens.choices) == 1
        assert [part.kv_ready.num_tokens for part in parts] == [64, 128, 192, 256, LENGTH]
        blocks = [block for part in parts for block in part.kv_ready.block_ids]
        assert len(blocks) == len(set(blocks)) == -(-LENGTH // BLOCK) - 2
        assert pair.prefill.status().leased_blocks == len(blocks)
        assert client.release(prefill)
        pair.prefill.wait_idle()


@pytest.mark.parametrize("how", ["breaks", "ends"])
def test_a_stream_that_ends_between_parts_frees_every_block(how: str, pair: Pair) -> None:
    """D gives a prompt up after any number of events."""
    epoch = pair.prefill.describe().epoch
    for index in range(6):
        with PrefillClient(pair.prefill.address) as client:
            send_long_prompt(client, epoch, index, f"{how} {index}")
            if how == "ends":
                client.half_close()
    check_all_leases_ended(pair)


@pytest.mark.parametrize("index", range(6))
def test_a_release_between_parts_ends_the_prompt(index: int, pair: Pair) -> None:
    """D releases a lease while P computes its prompt. If P was faster, another prompt is sent."""
    epoch = pair.prefill.describe().epoch
    failure = ""
    with PrefillClient(pair.prefill.address) as client:
        for attempt in range(ATTEMPTS):
            prefill = send_long_prompt(client, epoch, index, f"released {index} {attempt}")
            client.release(prefill)
            try:
                prefill.all()
            except PrefillFailed as exc:
                failure = str(exc)
                break
    assert "the lease ended" in failure, failure or "P computed each prompt before its release"
    check_all_leases_ended(pair)


def test_a_lease_is_extended_while_blocks_are_missing(pair: Pair) -> None:
    """The last blocks are announced much later than an unextended lease would end."""
    prompt = prompt_of(7)
    extended = threading.Semaphore(0)

    def wait_for_extensions() -> None:
        for _ in range(5):
            assert extended.acquire(timeout=patience(20.0))

    pair.proxy.before_event = on_part(5, wait_for_extensions)
    pair.proxy.before_extend = extended.release
    with RouterClient(pair.decode.address) as client:
        expected = client.generate(prompt, greedy(10), cache_salt="local").tokens
        before = pair.prefill.status().counters, pair.decode.status().counters
        assert client.generate(prompt, greedy(10), pair.prefill.address).tokens == expected
        after = pair.prefill.status().counters, pair.decode.status().counters
    for name, node, more in (
        ("pdserve_leases_released_total", 0, 1),
        ("pdserve_leases_expired_total", 0, 0),
        ("pdserve_handoffs_total", 1, 1),
        ("pdserve_handoff_failures_total", 1, 0),
    ):
        assert after[node][name] - before[node][name] == more, name


def test_a_handoff_whose_lease_cannot_be_extended_is_recomputed(pair: Pair) -> None:
    """P receives no Extend: D computes the prompt, and P's blocks are free when the lease has expired."""
    prompt = prompt_of(8)
    served = threading.Event()

    def wait_until_served() -> None:
        assert served.wait(patience(20.0))

    def lose() -> None:
        raise Lost

    pair.proxy.before_event = on_part(3, wait_until_served)
    pair.proxy.before_extend = pair.proxy.before_release = lose
    with RouterClient(pair.decode.address) as client:
        expected = client.generate(prompt, greedy(10), cache_salt="local").tokens
        expired = pair.prefill.counter("leases_expired")
        assert client.generate(prompt, greedy(10), pair.prefill.address).tokens == expected
        served.set()
    pair.prefill.wait_idle()
    assert pair.prefill.counter("leases_expired") == expired + 1


@pytest.mark.parametrize("ended", ["confirmed", "refused", "there already"])
def test_tokens_decoded_ahead_arrive_before_the_kv(ended: str, pair: Pair) -> None:
    """P decodes ahead until D's Release, which the proxy delays until the client has all tokens of P.

    D then goes on behind them: with P's KV, without it, or not at all.
    """
    prompt = prompt_of(5)
    num_tokens = 1 + DECODE_AHEAD if ended == "there already" else 40
    with RouterClient(pair.decode.address) as client:
        expected = client.generate(prompt, greedy(num_tokens, logprobs=0), cache_salt="local")
        before = pair.decode.counter("handoff_ahead_tokens"), pair.decode.counter("handoff_recomputes")
        result = client.send(prompt, greedy(num_tokens, logprobs=0), pair.prefill.address, cache_salt=ended)

        def hold() -> None:
            pair.decodes.wait_until(lambda: len(result.choices.get(0, ())) == 1 + DECODE_AHEAD, 10.0)
            if ended == "refused":
                raise Refusal(pb.Failure.NODE_FAILED)

        pair.proxy.before_release = hold
        assert result.wait().tokens == expected.tokens
    assert [token.logprob for token in result.logprobs[0]] == pytest.approx(
        [token.logprob for token in expected.logprobs[0]], abs=1e-4
    )
    assert pair.decode.counter("handoff_ahead_tokens") == before[0] + DECODE_AHEAD
    assert pair.decode.counter("handoff_recomputes") == before[1] + (ended == "refused")


def test_choices_share_one_handoff_of_an_uncached_suffix(pair: Pair) -> None:
    sampling = SamplingParams(max_tokens=8, n=3, temperature=1.0, seed=7, ignore_eos=True)
    prompt = prompt_of(3)
    with RouterClient(pair.decode.address) as client:
        local = client.generate(prompt, sampling, cache_salt="local").choices
        client.generate(prompt[: 10 * BLOCK], greedy(2))
        before = pair.decode.counter("kv_read_bytes")
        assert client.generate(prompt, sampling, pair.prefill.address).choices == local
        assert pair.decode.counter("kv_read_bytes") - before == (-(-LENGTH // BLOCK) - 10) * BLOCK_BYTES
