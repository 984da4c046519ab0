"""The one rule for which prompts go to a prefill node, used by routers and by D."""

from __future__ import annotations

import pytest

from pdserve.request_cost import worth_handoff


@pytest.mark.parametrize(
    ("uncached_tokens", "prompt_logprobs", "min_tokens", "expected"),
    [
        (32, -1, 32, True),
        (31, -1, 32, False),
        (1, -1, 0, True),
        (0, -1, 0, False),  # D has all of the KV
        (5000, 0, 0, False),  # D computes log-probabilities of the prompt itself
        (5000, 3, 32, False),
    ],
)
def test_a_handoff_pays_off_for_enough_uncached_tokens_without_prompt_logprobs(
    uncached_tokens: int, prompt_logprobs: int, min_tokens: int, expected: bool
) -> None:
    assert worth_handoff(uncached_tokens, prompt_logprobs, min_tokens) is expected
