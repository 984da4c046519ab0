"""A prompt as token ids."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from pdserve.errors import RequestError, cut
from pdserve.images import Images
from pdserve.records import TOKEN_BYTES
from pdserve.rpc.protobuf import pack_tokens, unpack_tokens


class Prompt(msgspec.Struct, frozen=True):
    """Token ids are packed once, as soon as they are known, and reach the decode node as these bytes.

    ``text`` is the client's text, or the decoded text to echo; ``offsets`` are where each token begins in it.
    ``images`` are where images lie among the tokens.
    """

    token_ids: bytes  # little-endian uint32
    text: str | None = None
    offsets: Sequence[int] = ()
    images: Images = ()

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    @property
    def image_tokens(self) -> int:
        """Tokens of all images."""
        return sum(span.num_tokens for span in self.images)

    def last(self, num_tokens: int) -> bytes:
        """The last token ids, packed."""
        return self.token_ids[-num_tokens * TOKEN_BYTES :]

    def first(self, num_tokens: int) -> bytes:
        """The first token ids, packed."""
        return self.token_ids[: num_tokens * TOKEN_BYTES]

    def unpacked(self) -> array[int]:
        return unpack_tokens(self.token_ids)

    def first_outside(self, vocab_size: int) -> int | None:
        """The first token id that the vocabulary lacks."""
        ids = np.frombuffer(self.token_ids, "<u4")
        outside = ids >= vocab_size
        return int(ids[outside.argmax()]) if outside.any() else None


def pack_prompts(given: str | Sequence[Any], field: str) -> list[str | bytes]:
    """The prompts of a body one by one: texts, or packed token ids. A list of token ids is one prompt.

    Raises RequestError for an empty list or a mixture.
    """
    if isinstance(given, str):
        return [given]
    if not given:
        raise RequestError(f"{field} is empty; give at least one token", field)
    if isinstance(given[0], str):
        texts = [item for item in given if isinstance(item, str)]
        if len(texts) == len(given):
            return [*texts]
    return [_pack_prompt(ids, field) for ids in (given if isinstance(given[0], list) else [given])]


def _pack_prompt(token_ids: Any, field: str) -> bytes:
    """Pack a JSON list of token ids. Raises RequestError for items that are no uint32."""
    try:
        return pack_tokens(token_ids)
    except TypeError as exc:
        raise RequestError(f"{field} must be a string, token ids, or a list of only one of these kinds", field) from exc
    except OverflowError as exc:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < 2**32)
        raise RequestError(f"token id {cut(str(wrong))} is outside the vocabulary; ids begin at 0", field) from exc
