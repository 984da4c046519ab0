"""Migrated requests, which continue the output of another decode node."""

from __future__ import annotations

import itertools
import random

import pytest
from node_client import Generated, RouterClient, greedy
from node_fleet import Nodes

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams

OUTPUT = 12  # tokens
KINDS = {
    "greedy": greedy(OUTPUT),
    "seeded": SamplingParams(OUTPUT, n=3, temperature=0.9, top_p=0.95, seed=5, ignore_eos=True, logprobs=2),
    "penalties": SamplingParams(
        OUTPUT,
        n=2,
        min_tokens=8,
        temperature=1.2,
        seed=6,
        repetition_penalty=1.3,
        presence_penalty=0.5,
        frequency_penalty=0.3,
        stop_token_ids=tuple(range(0, 128, 25)),
    ),
}
_salts = itertools.count()


def prompt_of(length: int) -> list[int]:
    return random.Random(length).choices(range(3, 128), k=length)


def choices(tokens: dict[int, list[int]]) -> list[pb.ResumedChoice]:
    return [pb.ResumedChoice(choice=choice, token_ids=pack_tokens(token_ids)) for choice, token_ids in tokens.items()]


def logprobs_of(result: Generated, choice: int) -> list[float]:
    return [token.logprob for token in result.logprobs.get(choice, [])]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", ["handed off", "prefilled on D", "cached on D"])
@pytest.mark.parametrize("cut", [1, 5, OUTPUT - 1])
def test_a_resumed_request_yields_the_remaining_tokens(kind: str, way: str, cut: int, nodes: Nodes) -> None:
    prompt = prompt_of(75)
    sampling = KINDS[kind]
    peer = nodes.main if way == "handed off" else ""
    with RouterClient(nodes.decode.address) as client:
        salt = f"resumed {next(_salts)}"
        whole = client.generate(prompt, sampling, cache_salt=salt)
        begun = {choice: tokens[:cut] for choice, tokens in whole.choices.items() if len(tokens) > cut}
        assert begun
        again = salt if way == "cached on D" else f"resumed {next(_salts)}"
        rest = client.generate(prompt, sampling, peer, cache_salt=again, resume=choices(begun))
    assert rest.failure is None, rest.failure
    for choice in begun:
        assert rest.choices[choice] == whole.choices[choice][cut:]
        assert rest.finish[choice] == whole.finish[choice]
        assert logprobs_of(rest, choice) == pytest.approx(logprobs_of(whole, choice)[cut:], abs=1e-4)
    assert rest.choices.keys() == begun.keys()
    assert rest.cached_tokens == 0, "the router has been told by the first node"


@pytest.mark.parametrize(
    ("resume", "words"),
    [
        ({3: [5]}, ["choice is 3", "2"]),
        ({0: []}, ["0", "1"]),
        ({1: [5] * OUTPUT}, [str(OUTPUT), str(OUTPUT - 1)]),
        ({2: [5, 128]}, ["128", "127"]),
    ],
)
def test_an_impossible_resumed_output_is_refused(resume: dict[int, list[int]], words: list[str], nodes: Nodes) -> None:
    with RouterClient(nodes.decode.address) as client:
        failure = client.generate(prompt_of(9), greedy(OUTPUT, n=3), resume=choices(resume)).failure
        assert failure is not None
        assert failure.code == pb.Failure.INVALID
        assert all(word in failure.message for word in words), failure.message
        broken = [pb.ResumedChoice(token_ids=b"123")]
        failure = client.generate(prompt_of(9), greedy(OUTPUT), resume=broken).failure
        assert failure is not None
        assert failure.code == pb.Failure.INVALID
        assert len(client.generate(prompt_of(9), greedy(3)).tokens) == 3
