"""Token counts of a request."""

from __future__ import annotations

import msgspec


class Usage(msgspec.Struct):
    """Tokens so far; updated while the request runs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
