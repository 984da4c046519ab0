"""The bytes behind each token id, for tokenizers whose decoder is a plain concatenation of bytes.

That is byte-level BPE (Llama 3, Qwen, Mistral's tekken) and SentencePiece with byte fallback (Llama 2, Mistral 7B).
With the table, decoding is exact and takes one look-up per token; part of a character is an incomplete UTF-8 sequence.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import tokenizers

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class ByteTable:
    """``strip_start`` is the number of spaces to remove at the beginning of a text."""

    def __init__(self, entries: list[bytes], strip_start: int) -> None:
        self._entries = entries
        self.strip_start = strip_start

    def of(self, token_id: int) -> bytes:
        """Return a token's bytes; empty for ids that exist only as padding of the model's vocabulary."""
        return self._entries[token_id] if token_id < len(self._entries) else b""


def byte_table(backend: tokenizers.Tokenizer) -> ByteTable | None:
    """Return the table, or None for other kinds of decoders."""
    rule = _rule_of(None if backend.decoder is None else json.loads(backend.decoder.__getstate__()))
    if rule is None:
        return None
    to_bytes, strip_start = rule
    vocabulary = backend.get_vocab(with_added_tokens=True)
    entries = [b""] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        entries[token_id] = to_bytes(token)
    return ByteTable(entries, strip_start)


def _rule_of(decoder: dict[str, Any] | None) -> tuple[Callable[[str], bytes], int] | None:
    if decoder is None:
        return None
    parts = decoder["decoders"] if decoder["type"] == "Sequence" else [decoder]
    if [part["type"] for part in parts] == ["ByteLevel"]:
        return _byte_level, 0
    return _byte_fallback(parts)


def _byte_fallback(parts: list[dict[str, Any]]) -> tuple[Callable[[str], bytes], int] | None:
    """Replace, ByteFallback, Fuse and perhaps Strip(start): SentencePiece as converted by Hugging Face."""
    if [part["type"] for part in parts[:3]] != ["Replace", "ByteFallback", "Fuse"]:
        return None
    old = parts[0]["pattern"].get("String")
    new = parts[0]["content"]
    if not old:
        return None
    strip_start = 0
    for part in parts[3:]:
        if part["type"] != "Strip" or part["content"] != " " or part["stop"] != 0:
            return None
        strip_start += part["start"]

    def to_bytes(token: str) -> bytes:
        match = _BYTE_TOKEN.fullmatch(token)
        return bytes([int(match.group(1), 16)]) if match else token.replace(old, new).encode()

    return to_bytes, strip_start


def _byte_level(token: str) -> bytes:
    """Undo GPT-2's byte-to-character map; a token with other characters is an added one, encoded as UTF-8."""
    try:
        return bytes(map(_BYTE_OF.__getitem__, token))
    except KeyError:
        return token.encode()


def _gpt2_bytes() -> dict[str, int]:
    """GPT-2's map: printable Latin-1 bytes are themselves, the others are shifted to U+0100 and up, in order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


_BYTE_OF = _gpt2_bytes()
