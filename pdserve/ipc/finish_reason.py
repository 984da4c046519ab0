"""Why a choice ends: on D's engine, and in its frontend for tokens that P has sampled."""

from __future__ import annotations

from collections.abc import Collection

from pdserve.records import FinishReason
from pdserve.sampling_params import SamplingParams


def finish_reason(
    token_id: int, num_outputs: int, sampling: SamplingParams, eos_token_ids: Collection[int]
) -> FinishReason | None:
    """Return why a choice ends with ``token_id`` as its ``num_outputs``-th output (counted from 1), or None.

    ``max_tokens`` must be bounded by the model's length already. A grammar ends with an EOS even under ``ignore_eos``:
    nothing can follow. Masks have enforced ``min_tokens`` as far as they could.
    """
    if num_outputs >= sampling.min_tokens or sampling.masked:
        if token_id in sampling.stop_token_ids:
            return FinishReason.STOP
        if token_id in eos_token_ids and (sampling.grammar or not sampling.ignore_eos):
            return FinishReason.STOP
    return FinishReason.LENGTH if num_outputs >= sampling.max_tokens else None
