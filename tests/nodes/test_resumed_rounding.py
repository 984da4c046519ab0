"""Sampled answers alone, in a batch and resumed, without any fault: equal in float32, equal up to rounding in bfloat16.

python -m pytest -m slow -s tests/nodes/test_resumed_rounding.py      prints how many answers differ
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpoints import make_checkpoint
from client_load import VOCABULARY
from fleet import add_tokenizer, start_fleet
from node_client import Generated, RouterClient

from pdserve.pb import pdserve_pb2 as pb
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams

REQUESTS = 100
TOKENS = 60
AT_ONCE = 16
ROUNDING = 0.1  # change of a log-probability in bfloat16; wrong KV changes it by several units


def send(client: RouterClient, seed: int, resume: Sequence[int] = ()) -> Generated:
    prompt = random.Random(seed).choices(range(3, VOCABULARY), k=20 + seed * 2)
    sampling = SamplingParams(max_tokens=TOKENS, temperature=0.9, seed=seed, logprobs=5, ignore_eos=True)
    so_far = [pb.ResumedChoice(choice=0, token_ids=pack_tokens(resume))] if resume else []
    return client.send(prompt, sampling, resume=so_far, cache_salt=str(random.getrandbits(60)))


def largest_change(answer: Generated, expected: Generated, begins: int) -> float:
    """Return the largest change of a log-probability up to the first token that differs, that one included.

    A token that is no longer among the most likely ones counts as if it was as likely as the last of them.
    """
    changes = [0.0]
    for at, (mine, other) in enumerate(zip(answer.logprobs[0], expected.logprobs[0][begins:], strict=True)):
        most_likely = dict(zip(mine.top_ids, mine.top_logprobs, strict=True))
        least = min(mine.top_logprobs)
        both = zip(other.top_ids, other.top_logprobs, strict=True)
        changes += [abs(most_likely.get(token_id, min(least, value)) - value) for token_id, value in both]
        if answer.choices[0][at] != expected.choices[0][begins + at]:
            break
    return max(changes)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_answers_differ_by_rounding_only(tmp_path: Path, dtype: str) -> None:
    model = add_tokenizer(make_checkpoint(tmp_path / "m", "qwen3", dtype=dtype, vocab_size=VOCABULARY))
    rng = random.Random(1)
    with start_fleet(model, 0, 1, router=False) as fleet, RouterClient(fleet.decode[0].address) as client:
        alone = [send(client, seed).wait() for seed in range(REQUESTS)]
        again = [send(client, seed).wait() for seed in range(REQUESTS)]
        assert [answer.tokens for answer in again] == [answer.tokens for answer in alone]
        runs: dict[str, list[tuple[Generated, int]]] = {"in a batch": [], "resumed alone": []}
        for start in range(0, REQUESTS, AT_ONCE):
            batch = [send(client, seed) for seed in range(start, min(start + AT_ONCE, REQUESTS))]
            runs["in a batch"] += [(request.wait(), 0) for request in batch]
        for seed, answer in enumerate(alone):
            begins = rng.randrange(1, TOKENS)
            runs["resumed alone"].append((send(client, seed, answer.tokens[:begins]).wait(), begins))
    for name, answers in runs.items():
        pairs = list(zip(answers, alone, strict=True))
        differ = sum(answer.tokens != other.tokens[begins:] for (answer, begins), other in pairs)
        change = max(largest_change(answer, other, begins) for (answer, begins), other in pairs)
        print(f"{dtype}, {name}: {differ} of {REQUESTS} answers differ, log-probabilities by up to {change:.2g}")
        assert change < (ROUNDING if dtype == "bfloat16" else 1e-3)
        assert dtype == "bfloat16" or not differ
