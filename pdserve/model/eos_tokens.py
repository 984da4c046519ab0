"""Tokens that end an answer."""

from __future__ import annotations

import os
from pathlib import Path

from pdserve.checkpoint.tokenizer_file import tokenizer_eos
from pdserve.errors import shown
from pdserve.model.config_fields import REMEDY, ConfigFields

_MAX_EOS_TOKENS = 64


def eos_token_ids(model_dir: Path, fields: ConfigFields, vocab_size: int) -> tuple[int, ...]:
    """Return the ids of generation_config.json, else config.json, and then that of the tokenizer.

    Files of one checkpoint may disagree: fine-tuned models end turns with a token that only their tokenizer names. Each
    of these tokens ends an answer, as in vLLM and SGLang. Raises CheckpointError.
    """
    ids = configured_eos_ids(model_dir, fields, vocab_size)
    of_tokenizer = tokenizer_eos(model_dir)
    if of_tokenizer is None or of_tokenizer in ids or of_tokenizer >= vocab_size:
        return ids
    return (*ids, of_tokenizer)


def configured_eos_ids(model_dir: Path, fields: ConfigFields, vocab_size: int) -> tuple[int, ...]:
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
