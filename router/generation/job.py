"""One prompt with its sampling parameters, nothing left open."""

from __future__ import annotations

import msgspec

from pdserve.records import SamplingParams
from router.text.prompt import Prompt


class Job(msgspec.Struct, frozen=True):
    """``silent``: max_tokens is 0, so the one token that a node samples is dropped."""

    prompt: Prompt
    sampling: SamplingParams
    silent: bool = False
