"""Oversized messages end their own call only, and the largest request that a router may send is served."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from fleet import Fleet, NodeProcess
from google.protobuf.internal.encoder import _VarintBytes  # type: ignore[attr-defined]
from machine import patience
from node_client import RouterClient, greedy

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.errors import PdserveError, RequestError
from pdserve.grammar import MAX_BYTES
from pdserve.logprobs import PromptLogprobs
from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.channel import open_channel
from pdserve.rpc.message_limits import ANSWER_LIMIT, request_limit
from pdserve.rpc.protobuf import pack_tokens, sampling_to_pb
from pdserve.sampling_params import SamplingParams
from router.fleet.policy import Placement
from router.fleet.serve_stream import ServeStream

CONTEXT = 8192  # tokens
CHOICES = 128
SIMULATED = ("--engine", "simulated", "--sim-speed", "1000", "--max-model-len", str(CONTEXT))
SERVE = {"decode": "/pdserve.v1.DecodeNode/Serve", "prefill": "/pdserve.v1.PrefillNode/Serve"}
#: A grammar of the largest size, which allows every letter.
GRAMMAR = json.dumps({"grammars": [{"lark_grammar": "start: /[a-z ]*/"}]}).ljust(MAX_BYTES)


@pytest.fixture(scope="module")
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        fleet.start_prefill(EMBEDDED_MODEL, SIMULATED)
        fleet.start_decode(EMBEDDED_MODEL, SIMULATED)
        fleet.wait_ready()
        yield fleet


def nested(size: int) -> bytes:
    """Return a Generate with ``size`` / 2 empty choices, the slowest to parse: 12 ms per MB."""
    body = b"\x4a\x00" * (size // 2)
    return bytes(b"\x0a" + _VarintBytes(len(body)) + body)


@pytest.mark.parametrize("role", SERVE)
def test_an_oversized_message_ends_only_its_call(fleet: Fleet, role: str) -> None:
    node: NodeProcess = (fleet.decode if role == "decode" else fleet.prefill)[0]
    message = nested(60 << 20)
    limit = request_limit(CONTEXT)
    channel: Any
    with grpc.insecure_channel(node.address) as channel, RouterClient(fleet.decode[0].address) as client:
        running = client.send(range(3, 40), greedy(2000))
        with pytest.raises(grpc.RpcError) as raised:
            list(channel.stream_stream(SERVE[role])(iter([message]), timeout=patience(60.0)))
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert f"({len(message)} vs. {limit})" in (raised.value.details() or "")
        assert node.describe().state == "ready"
        assert len(running.wait().tokens) == 2000


class Outputs:
    """Counts the choices that have ended."""

    def __init__(self) -> None:
        self.finished: set[int] = set()
        self.done: asyncio.Future[PdserveError | None] = asyncio.get_running_loop().create_future()

    def on_output(self, output: pb.Output) -> None:
        if output.finish_reason:
            self.finished.add(output.choice)
        if len(self.finished) == CHOICES:
            self.done.set_result(None)

    def on_failure(self, error: PdserveError) -> None:
        self.done.set_result(error)

    def on_stall(self) -> None: ...

    movable_tokens = 0

    def move(self, to: Placement) -> None: ...


def largest(output: int) -> pb.Generate:
    """Return a request of the largest lengths and counts that the router accepts, each choice with output so far."""
    sampling = SamplingParams(
        max_tokens=CONTEXT - 1000,
        n=CHOICES,
        temperature=1.0,
        logit_bias=dict.fromkeys(range(1024), -100.0),
        stop_token_ids=tuple(range(1024)),
        grammar=GRAMMAR,
    )
    message = pb.Generate(
        token_ids=pack_tokens([5] * 1000), sampling=sampling_to_pb(sampling), cache_salt="\U0001f600" * 1024
    )
    for choice in range(CHOICES):
        message.resume.add(choice=choice, token_ids=pack_tokens([2000 + choice] * output))
    return message


def generate(node: NodeProcess, message: pb.Generate) -> PdserveError | None:
    async def run() -> PdserveError | None:
        async with open_channel(node.address) as channel:
            stream = ServeStream(channel, "d", max_request=request_limit(CONTEXT), on_change=lambda: None)
            outputs = Outputs()
            number = stream.generate(message, outputs)
            async with asyncio.timeout(60.0):
                error = await outputs.done
            stream.forget(number)
            stream.close("the test has ended")
            return error

    return asyncio.run(run())


def test_the_largest_migrated_request_is_served(fleet: Fleet) -> None:
    """The request takes 3.5 MB: its choices travel in several messages."""
    message = largest(CONTEXT - 1001)
    message.sampling.grammar = ""  # no grammar allows the same token 7,191 times
    assert message.ByteSize() > 6 * request_limit(CONTEXT)
    assert generate(fleet.decode[0], message) is None
    fleet.decode[0].wait_idle()


def test_the_largest_grammar_passes(fleet: Fleet) -> None:
    message = largest(0)
    del message.resume[:]
    message.sampling.max_tokens = 2
    assert generate(fleet.decode[0], message) is None


def test_a_longer_prompt_is_refused_before_it_is_sent(fleet: Fleet) -> None:
    message = pb.Generate(token_ids=bytes(4 * CONTEXT + (1 << 20)))
    with pytest.raises(RequestError, match=r"decode node d takes 557056 at most; shorten its prompt"):
        generate(fleet.decode[0], message)


def test_choices_of_another_request_end_the_stream(fleet: Fleet) -> None:
    parts = [pb.ResumedChoices(request=n, choices=[pb.ResumedChoice(token_ids=bytes(4))]) for n in (1, 2)]
    requests = [pb.ServeRequest(resumed_choices=part).SerializeToString() for part in parts]
    channel: Any
    with (
        grpc.insecure_channel(fleet.decode[0].address) as channel,
        pytest.raises(grpc.RpcError, match="choices of request 2 came before request 1"),
    ):
        list(channel.stream_stream(SERVE["decode"])(iter(requests), timeout=patience(20.0)))


def test_long_tables_of_log_probabilities_are_split() -> None:
    rows = PromptLogprobs(5, 1, bytes(range(16)) * 10)
    parts = list(rows.parts(50))
    assert [(part.first, len(part.table)) for part in parts] == [(5, 48), (8, 48), (11, 48), (14, 16)]
    assert b"".join(part.table for part in parts) == rows.table


def test_the_largest_report_is_below_the_limit() -> None:
    change = pb.CacheChange(added=bytes(8 * 2 * 65_536), removed=bytes(8 * 2 * 65_536))
    assert pb.NodeReport(cache=change).ByteSize() < ANSWER_LIMIT
