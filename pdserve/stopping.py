"""When a choice ends. One pure function, used by the engine and, for the first token, by the decode node's front."""

from __future__ import annotations

from collections.abc import Collection

from pdserve.records import FinishReason, SamplingParams


def finish_reason(
    token_id: int, num_outputs: int, sampling: SamplingParams, eos_token_ids: Collection[int]
) -> FinishReason | None:
    """Why a choice ends with ``token_id`` as its ``num_outputs``-th output (counted from 1), or None.

    ``max_tokens`` is taken as already bounded by the model's length. A grammar ends with an EOS whatever else is asked
    for: nothing can follow. Its mask has seen to ``min_tokens``, as far as it can be fulfilled.
    """
    if num_outputs >= sampling.min_tokens or sampling.grammar:
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in eos_token_ids and (sampling.grammar or not sampling.ignore_eos):
            return FinishReason.STOP
    return FinishReason.LENGTH if num_outputs >= sampling.max_tokens else None
