"""Token counts of a request."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from router.text.prompt import Prompt


class Usage(msgspec.Struct):
    """Tokens so far; updated while the request runs."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    image_tokens: int = 0  # prompt tokens of images
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    accepted_drafts: int = 0  # draft tokens, as decode nodes report them
    rejected_drafts: int = 0

    @classmethod
    def of_prompts(cls, prompts: Collection[Prompt]) -> Usage:
        """Return the usage of a request before its first token."""
        return cls(
            prompt_tokens=sum(prompt.num_tokens for prompt in prompts),
            image_tokens=sum(prompt.image_tokens for prompt in prompts),
        )

    def count_token(self, accepted_drafts: int, rejected_drafts: int) -> None:
        """Count an output token, and the drafts that came with it."""
        self.completion_tokens += 1
        self.accepted_drafts += accepted_drafts
        self.rejected_drafts += rejected_drafts
