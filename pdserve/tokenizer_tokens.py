"""The tokens of a tokenizer.json, without the rest of it. The router alone encodes and decodes text."""

from __future__ import annotations

from typing import Any

import msgspec


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}  # by token, or in the order of ids


class TokenizerTokens(msgspec.Struct):
    """Ids and texts of tokens. https://huggingface.co/docs/tokenizers"""

    model: _Model
    added_tokens: list[_AddedToken] = []

    @classmethod
    def decode(cls, data: bytes | str) -> TokenizerTokens:
        """Raises ValueError."""
        try:
            return msgspec.json.decode(data, type=cls)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as exc:
            raise ValueError(f"its tokens cannot be read ({exc})") from exc

    @property
    def num_tokens(self) -> int:
        """Return the largest id plus 1."""
        vocab = self.model.vocab
        largest = len(vocab) - 1 if isinstance(vocab, list) else max(vocab.values(), default=-1)
        return 1 + max(largest, max((token.id for token in self.added_tokens), default=-1))

    def find(self, text: str) -> int | None:
        """Return the id of a token."""
        for token in self.added_tokens:
            if token.content == text:
                return token.id
        vocab = self.model.vocab
        if isinstance(vocab, dict):
            return vocab.get(text)
        return next((token_id for token_id, (token, _) in enumerate(vocab) if token == text), None)


def token_text(token: Any) -> str | None:
    """Return the text of a token in tokenizer_config.json: a string, or an object with ``content``; None for others."""
    text = token.get("content") if isinstance(token, dict) else token
    return text if isinstance(text, str) else None
