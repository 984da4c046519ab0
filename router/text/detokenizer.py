"""Incremental detokenizer: token ids in, text out, never part of a character.

The joined results of ``push`` … ``flush`` are the text. With a byte table, that is the tokens' bytes decoded as UTF-8,
with U+FFFD for each maximal invalid part (the Unicode standard's "substitution of maximal subparts"), as
``tokenizers`` does for byte-level BPE. With byte fallback, ``tokenizers`` turns a whole run of byte tokens into U+FFFD
when any byte of it is invalid. A stream cannot take back text, so here only the invalid part is replaced.
"""

from __future__ import annotations

import codecs
from typing import Protocol

import tokenizers

from router.text.token_bytes import ByteTable

_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_Utf8Decoder = codecs.getincrementaldecoder("utf-8")


class Detokenizer(Protocol):
    """Decodes one choice. Hidden tokens have no text."""

    def push(self, token_id: int) -> str:
        """Return the characters that this token completes; may be empty."""

    def flush(self) -> str:
        """Return U+FFFD for an incomplete character at the end, else nothing."""


class StreamDetokenizer:
    """For byte tables: one look-up per token, and at most three bytes held back."""

    def __init__(self, table: ByteTable, hidden_ids: frozenset[int]) -> None:
        self._of = table.of
        self._hidden_ids = hidden_ids
        self._decoder = _Utf8Decoder(errors="replace")
        self._strip = table.strip_start

    def push(self, token_id: int) -> str:
        if token_id in self._hidden_ids:
            return ""
        text = self._decoder.decode(self._of(token_id))
        if self._strip and text:
            return self._strip_start(text)
        return text

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)

    def _strip_start(self, text: str) -> str:
        stripped = text[: self._strip].lstrip(" ") + text[self._strip :]
        removed = len(text) - len(stripped)
        self._strip = self._strip - removed if removed and not stripped else 0
        return stripped


class WindowDetokenizer:
    """For other decoders: decode a short window of tokens with and without the new ones, and return the difference.

    The window begins with the latest decoded tokens, because some decoders treat the first token specially (WordPiece,
    Metaspace). Text is held back while it ends in U+FFFD, for no more tokens than a character can take.
    """

    _MAX_HELD = 8  # tokens; a character takes at most four bytes

    def __init__(self, backend: tokenizers.Tokenizer, hidden_ids: frozenset[int]) -> None:
        self._backend = backend
        self._hidden_ids = hidden_ids
        self._sent: list[int] = []
        self._held: list[int] = []

    def push(self, token_id: int) -> str:
        if token_id in self._hidden_ids or self._backend.id_to_token(token_id) is None:
            return ""
        self._held.append(token_id)
        text = self._new_text()
        if text.endswith(_REPLACEMENT) and len(self._held) < self._MAX_HELD:
            return ""
        return self._send(text)

    def flush(self) -> str:
        return self._send(self._new_text()) if self._held else ""

    def _new_text(self) -> str:
        whole = self._decode(self._sent + self._held)
        return whole[len(self._decode(self._sent)) :]

    def _send(self, text: str) -> str:
        self._sent = (self._sent + self._held)[-self._MAX_HELD :]
        self._held = []
        return text

    def _decode(self, token_ids: list[int]) -> str:
        return str(self._backend.decode(token_ids, skip_special_tokens=False)) if token_ids else ""
