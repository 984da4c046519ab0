"""Text ↔ token ids, from a checkpoint's ``tokenizer.json`` and ``tokenizer_config.json``, without transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from pdserve.errors import CheckpointError
from router.text.chat.template import ChatTemplate, either_template
from router.text.detokenizer import Detokenizer, StreamDetokenizer, WindowDetokenizer
from router.text.token_bytes import byte_table

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_TOKEN_LISTS = ("additional_special_tokens", "extra_special_tokens")


class Tokenizer:
    """Encodes prompts, decodes outputs. Thread-safe.

    tokenizer.json's post-processor decides whether a text begins with BOS. As in transformers 5, ``add_bos_token`` of
    the config counts only without tokenizer.json.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: dict[str, Any], template: str | None) -> None:
        self._backend = backend
        special_tokens = _named_tokens(config)
        _add_missing_tokens(backend, config)
        backend.no_padding()
        backend.no_truncation()
        self.chat_template = None if template is None else ChatTemplate(template, special_tokens)
        self._special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes = byte_table(backend)

    @classmethod
    def load(cls, model_dir: Path) -> Tokenizer:
        """Raises CheckpointError when there is no usable tokenizer."""
        path = model_dir / "tokenizer.json"
        if not path.is_file():
            raise CheckpointError(f"{model_dir} has no tokenizer.json; convert its tokenizer to the fast format")
        try:
            backend = tokenizers.Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise CheckpointError(f"{path} cannot be read: {exc}; download the checkpoint again") from exc
        config = _read_config(model_dir / "tokenizer_config.json")
        return cls(backend, config, _find_template(model_dir, config))

    @cached_property
    def longest_token(self) -> int:
        """Characters of the longest token: an upper bound of characters per token."""
        return max(map(len, self._backend.get_vocab()))

    def to_json(self) -> str:
        """Return tokenizer.json, with the tokens that only the configuration names."""
        return str(self._backend.to_str())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Tokenize. ``encode_batch_fast`` computes no offsets and, unlike ``encode``, releases the GIL."""
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return where in the text, in characters, each token of ``encode`` begins; added tokens have no width.

        Some tokenizers assign the space before a word to no token; here it belongs to the word.
        """
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        offsets, end = [], 0
        for (start, stop), added in zip(encoding.offsets, encoding.special_tokens_mask, strict=True):
            offsets.append(end if added else min(start, end))
            end = end if added else max(stop, end)
        return offsets

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """Detokenize. ``decode_batch``, unlike ``decode``, releases the GIL."""
        return str(self._backend.decode_batch([list(token_ids)], skip_special_tokens=skip_special_tokens)[0])

    def token(self, token_id: int) -> str:
        """Return the vocabulary's spelling, such as "Ġthe"; empty for an unknown id."""
        return self._backend.id_to_token(token_id) or ""

    def added_token_id(self, text: str) -> int | None:
        """Return the id of an added token, special or not; None if it is not an added token."""
        token_id = self._backend.token_to_id(text)
        return token_id if token_id in self._backend.get_added_tokens_decoder() else None

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        if self._bytes is not None:
            return self._bytes.of(token_id)
        once = self.decode([token_id])
        return self.decode([token_id, token_id])[len(once) :].encode()  # as inside a text, with its space

    def detokenizer(self, context: Sequence[int] = (), visible: Sequence[str] | None = ()) -> Detokenizer:
        """Return a new detokenizer for text that follows ``context``, the last tokens of the prompt.

        Special tokens have no text, except those in ``visible``; None: all are visible.
        """
        hidden = self._special_ids if visible is not None else frozenset()
        if visible:
            hidden -= {self._backend.token_to_id(token) for token in visible}
        decoder: Detokenizer
        if self._bytes is not None:
            decoder = StreamDetokenizer(self._bytes, hidden)
        else:
            decoder = WindowDetokenizer(self._backend, hidden)
        for token_id in context:
            decoder.push(token_id)
        return decoder


def _read_config(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as exc:
        raise CheckpointError(f"{path} cannot be read: {exc}; download the checkpoint again") from exc
    if not isinstance(config, dict):
        raise CheckpointError(f"{path} is not a JSON object; download the checkpoint again")
    return config


def _find_template(model_dir: Path, config: dict[str, Any]) -> str | None:
    """Find ``chat_template.jinja``, else ``chat_template`` of the config: one template, or a list with names.

    A template named "tool_use" renders requests with tools, as in transformers.
    """
    path = model_dir / "chat_template.jinja"
    if path.is_file():
        tool_use = model_dir / "additional_chat_templates" / "tool_use.jinja"
        source = path.read_text(encoding="utf-8")
        return either_template(tool_use.read_text(encoding="utf-8"), source) if tool_use.is_file() else source
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {entry["name"]: entry["template"] for entry in template}
        if "default" not in named:
            names = ", ".join(sorted(named))
            raise CheckpointError(f"{model_dir} has chat templates named {names}; name one 'default'")
        template = named["default"]
        if "tool_use" in named:
            template = either_template(named["tool_use"], template)
    return template if isinstance(template, str) else None


def _content(token: Any) -> str | None:
    """A token of the config is a string or a dict with ``content``."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _named_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {name: _content(config.get(name)) for name in _NAMED_TOKENS}
    return {name: token for name, token in found.items() if token is not None}


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: dict[str, Any]) -> None:
    """Add tokens that only ``tokenizer_config.json`` lists, in id order, and mark special ones."""
    known = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    decoder = config.get("added_tokens_decoder") or {}
    for _, entry in sorted(decoder.items(), key=lambda item: int(item[0])):
        if entry["content"] not in known:
            fields = {k: entry[k] for k in ("single_word", "lstrip", "rstrip", "normalized", "special") if k in entry}
            backend.add_tokens([tokenizers.AddedToken(entry["content"], **fields)])
    special = list(_named_tokens(config).values())
    for name in _TOKEN_LISTS:
        listed = config.get(name) or []
        special += [c for c in map(_content, listed.values() if isinstance(listed, dict) else listed) if c is not None]
    for content in dict.fromkeys(special):
        if content not in known or not known[content].special:
            backend.add_special_tokens([tokenizers.AddedToken(content, special=True, normalized=False)])
