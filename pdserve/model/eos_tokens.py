"""Tokens that end an answer."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.checkpoint.files import MAX_TOKENIZER, MAX_TOKENIZER_CONFIG, read_file, read_object
from pdserve.errors import CheckpointError, shown
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.text_part import take_text_part
from pdserve.tokenizer_tokens import TokenizerTokens, token_text

_MAX_EOS_TOKENS = 64


def eos_token_ids(model_dir: Path, fields: ConfigFields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of generation_config.json, else config.json, and then that of the tokenizer.

    Files of one checkpoint may disagree: fine-tuned models end turns with a token that only their tokenizer names. Each
    of these tokens ends an answer, as in vLLM and SGLang. Raises CheckpointError.
    """
    ids = _configured(model_dir, fields, vocab_size)
    of_tokenizer = _tokenizer_eos(model_dir)
    if of_tokenizer is None or of_tokenizer in ids or of_tokenizer >= vocab_size:
        return ids
    return (*ids, of_tokenizer)


def unnamed_end_token(model_dir: Path, vocab_size: int) -> int | None:
    """Return the tokenizer's end token if no config of the checkpoint names it. Raises CheckpointError."""
    fields = ConfigFields(model_dir / "config.json")
    take_text_part(fields, native=True)
    unnamed = set(eos_token_ids(model_dir, fields, vocab_size)).difference(_configured(model_dir, fields, vocab_size))
    return next(iter(unnamed), None)


def _configured(model_dir: Path, fields: ConfigFields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of generation_config.json, else config.json. Raises CheckpointError."""
    path = model_dir / "generation_config.json"
    source = ConfigFields(path) if os.path.exists(path) else fields
    if source.get("eos_token_id") is None:
        source = fields
    value = source.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if len(ids) > _MAX_EOS_TOKENS:
        raise source.error(f"has {len(ids)} end-of-sequence tokens, the limit is {_MAX_EOS_TOKENS}. {REMEDY}")
    for token in ids:
        if not isinstance(token, int) or isinstance(token, bool) or not 0 <= token < vocab_size:
            raise source.error(
                f"has eos_token_id = {shown(token)}; it must be a token id below {vocab_size}, or a list. {REMEDY}"
            )
    return tuple(ids)


def _tokenizer_eos(model_dir: Path) -> int | None:
    """Return the id of tokenizer_config.json's ``eos_token``; None if it, or the tokenizer, is missing.

    Raises CheckpointError for a file that cannot be read.
    """
    config_path = model_dir / "tokenizer_config.json"
    path = model_dir / "tokenizer.json"
    if not config_path.exists() or not path.exists():
        return None
    config = read_object(config_path, MAX_TOKENIZER_CONFIG)
    text = token_text(config.get("eos_token"))
    if text is None:
        return None
    listed = config.get("added_tokens_decoder")  # may list tokens that tokenizer.json lacks
    for token_id, token in listed.items() if isinstance(listed, dict) else ():
        if token_text(token) == text and token_id.isdecimal():
            return int(token_id)
    try:
        return TokenizerTokens.decode(read_file(path, MAX_TOKENIZER)).find(text)
    except ValueError as exc:
        raise CheckpointError(f"{path}: {exc}; download the checkpoint again") from exc
