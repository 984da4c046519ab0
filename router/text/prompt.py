"""A prompt as token ids."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec


class Prompt(msgspec.Struct, frozen=True):
    """``text`` is the client's text, or the decoded text to echo; ``offsets`` are where each token begins in it."""

    token_ids: Sequence[int]
    text: str | None = None
    offsets: Sequence[int] = ()
