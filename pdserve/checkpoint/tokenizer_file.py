"""What a node needs of a checkpoint's tokenizer: how many tokens it has, and which one ends an answer.

Only ids and texts of tokens are decoded; the router alone encodes and decodes text.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from pdserve.checkpoint.files import DECODE_ERRORS, MAX_TOKENIZER, read_file, read_object
from pdserve.errors import CheckpointError

_MAX_CONFIG = 16 << 20  # bytes of tokenizer_config.json


class _AddedToken(msgspec.Struct):
    id: int
    content: str


class _Model(msgspec.Struct):
    vocab: dict[str, int] | list[tuple[str, float]] = {}  # by token, or in the order of ids


class TokenizerFile(msgspec.Struct):
    """The tokens of a tokenizer.json. https://huggingface.co/docs/tokenizers"""

    model: _Model
    added_tokens: list[_AddedToken] = []

    @classmethod
    def decode(cls, data: bytes | str) -> TokenizerFile:
        """Raises ValueError."""
        try:
            return msgspec.json.decode(data, type=cls)
        except DECODE_ERRORS as exc:
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


def tokenizer_eos(model_dir: Path) -> int | None:
    """Return the id of tokenizer_config.json's ``eos_token``; None if it, or the tokenizer, is missing.

    Raises CheckpointError for a file that cannot be read.
    """
    config_path, path = model_dir / "tokenizer_config.json", model_dir / "tokenizer.json"
    if not config_path.exists() or not path.exists():
        return None
    config = read_object(config_path, _MAX_CONFIG)
    token: Any = config.get("eos_token")
    text = token.get("content") if isinstance(token, dict) else token
    if not isinstance(text, str):
        return None
    try:
        return TokenizerFile.decode(read_file(path, MAX_TOKENIZER)).find(text)
    except ValueError as exc:
        raise CheckpointError(f"{path}: {exc}; download the checkpoint again") from exc
