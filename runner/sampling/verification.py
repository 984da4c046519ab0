"""Acceptance of a step's drafts: all that equal the samples, up to the first one that does not.

A sample is drawn at the newest token of a sequence and at each draft, with the noise of its position:

    computed   t   d1  d2  d3         t: the newest token
    sampled    s1  s2  s3  s4
    yield      s1  s2  s3             if d1 = s1 and d2 = s2, but d3 differs from s3

Each of these samples follows the tokens that it would follow without drafts, so the output is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain

import msgspec

from pdserve.records import Drafts, StepOutput, StepPlan


def without_rejected(plan: StepPlan, sampled: StepOutput) -> StepOutput:
    """Return the output of a step without the samples behind rejected drafts.

    Drafts that are accepted on order, ``Drafts.accept``, replace the samples, so that KV and tokens agree.

    ``sampled`` has a sample for each token of the decodes, then the samples of prompts.
    """
    drafts_of = {drafts.seq: drafts for drafts in plan.drafts}
    counts = tuple(_counts(plan, drafts_of, sampled.token_ids))
    tokens = list(sampled.token_ids)
    kept: list[range] = []
    at = 0
    for item, count in zip(plan.scheduled, counts, strict=False):
        kept.append(range(at, at + count))
        if item.num_tokens > 1 and drafts_of[item.seq].accept is not None:
            tokens[at : at + count - 1] = drafts_of[item.seq].token_ids[: count - 1]
        at += item.num_tokens
    indices = [*chain.from_iterable(kept), *range(at, len(sampled.token_ids))]
    logprobs = sampled.logprobs
    return msgspec.structs.replace(
        sampled,
        token_ids=tuple(tokens[index] for index in indices),
        decode_counts=counts,
        logprobs={new: logprobs[old] for new, old in enumerate(indices) if old in logprobs},
    )


def _counts(plan: StepPlan, drafts_of: Mapping[int, Drafts], token_ids: tuple[int, ...]) -> Iterator[int]:
    """Yield how many samples of each decode stay."""
    at = 0
    for item in plan.scheduled[: plan.num_decodes]:
        drafts = drafts_of.get(item.seq, Drafts(item.seq))
        guesses = drafts.token_ids
        accepted = 0
        assert len(guesses) == item.num_tokens - 1, f"a decode of {item.num_tokens} tokens has {len(guesses)} drafts"
        while accepted < len(guesses) and guesses[accepted] == token_ids[at + accepted]:
            accepted += 1
        yield 1 + (accepted if drafts.accept is None else min(drafts.accept, len(guesses)))
        at += item.num_tokens
