"""Tells the placeholders that a chat template writes from text of a client that looks like one.

    template  <|vision_start|><|image_pad|><|vision_end|>      its source is rendered with a mark for <|image_pad|>
    rendered  <|vision_start|>MARK<|vision_end|>What does <|image_pad|> mean?
    encoded   [start] [image] [end] What does <| image _pad |> mean ?

The mark becomes the placeholder again. A placeholder of the client's is cut by a special token that the text does not
have otherwise; its id is dropped after tokenizing, so the pieces are text, which decodes to what the client wrote.
"""

from __future__ import annotations

from itertools import islice
from secrets import token_hex
from typing import Protocol

import msgspec

from pdserve.errors import RequestError, shown

#: Stands for a placeholder in the templates of this process. A client that found it out would confuse only itself.
MARK = f"\ue000image {token_hex(16)}\ue001"
_MAX_KNIVES = 32  # special tokens that are tried; a tokenizer may have thousands, and a hostile text all of them


class MarkTokenizer(Protocol):
    """A Tokenizer."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]: ...

    def special_tokens(self) -> dict[str, int]: ...


class ImageToken(msgspec.Struct, frozen=True):
    """The placeholder of an image."""

    text: str
    token_id: int


def restored(rendered: str, token: ImageToken) -> str:
    """Return a rendered text with placeholders for its marks."""
    return rendered.replace(MARK, token.text)


def encode_marked(tokenizer: MarkTokenizer, rendered: str, token: ImageToken, add_special_tokens: bool) -> list[int]:
    """Tokenize a rendered text: each mark becomes the placeholder's id, and nothing else does.

    Raises RequestError for a text that cannot be told from placeholders.
    """
    num_images = rendered.count(MARK)
    text = rendered
    cut_id = None
    num_cuts = rendered.count(token.text)
    if num_cuts:
        text, cut_id = _cut(tokenizer, rendered, token)
    ids = tokenizer.encode(restored(text, token), add_special_tokens)
    if cut_id is not None:
        if ids.count(cut_id) != num_cuts:
            raise _refusal(token)
        ids = [token_id for token_id in ids if token_id != cut_id]
    if ids.count(token.token_id) != num_images:
        raise _refusal(token)
    return ids


def _cut(tokenizer: MarkTokenizer, rendered: str, token: ImageToken) -> tuple[str, int]:
    """Return the text with placeholders of the client's cut in two by a token, and the id of that token."""
    middle = len(token.text) // 2
    for knife, knife_id in islice(tokenizer.special_tokens().items(), _MAX_KNIVES):
        if knife_id == token.token_id or knife in rendered:
            continue
        text = rendered.replace(token.text, token.text[:middle] + knife + token.text[middle:])
        if token.text not in text:
            return text, knife_id
    raise _refusal(token)


def _refusal(token: ImageToken) -> RequestError:
    return RequestError(
        f"the conversation has the text {shown(token.text)}, which stands for an image in this model; leave it out"
    )
