"""Text ↔ token ids, from a checkpoint's ``tokenizer.json`` and ``tokenizer_config.json``, without transformers."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import tokenizers
from msgspec import UNSET, UnsetType

from pdserve.checkpoint.files import MAX_TOKENIZER, MAX_TOKENIZER_CONFIG, read_file, read_object, read_text
from pdserve.errors import CheckpointError, shown
from pdserve.tokenizer_tokens import token_text
from router.text.chat.template import MAX_SOURCE, ChatTemplate, either_template
from router.text.detokenizer import Detokenizer, StreamDetokenizer, WindowDetokenizer
from router.text.token_bytes import byte_table

_MAX_TOKEN_ID = 1 << 22

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class _ListedToken(msgspec.Struct):
    """An entry of ``added_tokens_decoder``."""

    content: str
    single_word: bool | UnsetType = UNSET
    lstrip: bool | UnsetType = UNSET
    rstrip: bool | UnsetType = UNSET
    normalized: bool | UnsetType = UNSET
    special: bool | UnsetType = UNSET


class _NamedTemplate(msgspec.Struct):
    name: str
    template: str


class TokenizerConfig(msgspec.Struct):
    """The fields of tokenizer_config.json that are used. A token is a string or an object with ``content``."""

    bos_token: Any = None
    eos_token: Any = None
    unk_token: Any = None
    sep_token: Any = None
    pad_token: Any = None
    cls_token: Any = None
    mask_token: Any = None
    additional_special_tokens: list[Any] | dict[str, Any] | None = None
    extra_special_tokens: list[Any] | dict[str, Any] | None = None
    added_tokens_decoder: dict[int, _ListedToken] | None = None
    chat_template: str | list[_NamedTemplate] | None = None


class Tokenizer:
    """Encodes prompts, decodes outputs. Thread-safe.

    tokenizer.json's post-processor decides whether a text begins with BOS. As in transformers 5, ``add_bos_token`` of
    the config counts only without tokenizer.json.
    """

    def __init__(self, backend: tokenizers.Tokenizer, config: TokenizerConfig, template: str | None) -> None:
        """Raises CheckpointError."""
        self._backend = backend
        self.named_tokens = special_tokens = _named_tokens(config)
        _add_missing_tokens(backend, config)
        backend.no_padding()
        backend.no_truncation()
        self.chat_template = None if template is None else ChatTemplate(template, special_tokens)
        vocabulary = backend.get_vocab()
        ids = vocabulary.values()
        if not ids or max(ids) > _MAX_TOKEN_ID:
            raise CheckpointError(
                f"tokenizer.json has {len(ids)} tokens with ids up to {max(ids, default=0)}; it needs at least one, "
                f"and the limit of ids is {_MAX_TOKEN_ID}. Download the checkpoint again"
            )
        self.longest_token = max(len(token.encode()) for token in vocabulary)  # bytes of UTF-8, an upper bound
        self._special_ids = frozenset(id for id, token in backend.get_added_tokens_decoder().items() if token.special)
        self._bytes = byte_table(backend)

    @classmethod
    def load(cls, model_dir: Path, template: str | None = None) -> Tokenizer:
        """``template`` replaces the checkpoint's chat template. Raises CheckpointError without a usable tokenizer."""
        path = model_dir / "tokenizer.json"
        if not os.path.exists(path):
            raise CheckpointError(f"{model_dir} has no tokenizer.json; convert its tokenizer to the fast format")
        data = read_file(path, MAX_TOKENIZER)
        try:
            backend = tokenizers.Tokenizer.from_buffer(data)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:  # the library raises bare Exception; a panic in Rust is a BaseException
            raise CheckpointError(f"{path} cannot be read: {exc}; download the checkpoint again") from exc
        config = _read_config(model_dir / "tokenizer_config.json")
        try:
            return cls(backend, config, template or _find_template(model_dir, config))
        except CheckpointError as exc:
            raise CheckpointError(f"{model_dir}: {exc}") from exc

    def to_json(self) -> str:
        """Return tokenizer.json, with the tokens that only the configuration names."""
        return str(self._backend.to_str())

    def encode(self, text: str | tuple[str, str], add_special_tokens: bool = True) -> list[int]:
        """Tokenize a text or a pair. ``encode_batch_fast`` has no offsets and, unlike ``encode``, releases the GIL."""
        encodings = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encodings[0].ids
        return ids

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return where in the text, in characters, each token of ``encode`` begins; added tokens have no width.

        Some tokenizers assign the space before a word to no token; here it belongs to the word.
        """
        encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
        offsets = []
        end = 0
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

    def special_tokens(self) -> dict[str, int]:
        """Return the ids of special tokens that are found as they are written, without spaces around them."""
        tokens = self._backend.get_added_tokens_decoder().items()
        plain = (pair for pair in tokens if pair[1].special and not (pair[1].normalized or pair[1].single_word))
        return {token.content: token_id for token_id, token in plain if not (token.lstrip or token.rstrip)}

    def token_bytes(self, token_id: int) -> bytes:
        """Return a token's bytes, which may be part of a character."""
        if self._bytes is not None:
            return self._bytes.of(token_id)
        once = self.decode([token_id])
        return self.decode([token_id, token_id])[len(once) :].encode()  # as inside a text, with a leading space

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


def _read_config(path: Path) -> TokenizerConfig:
    if not os.path.exists(path):
        return TokenizerConfig()
    try:
        return msgspec.convert(read_object(path, MAX_TOKENIZER_CONFIG), TokenizerConfig, str_keys=True)
    except msgspec.ValidationError as exc:
        raise CheckpointError(f"{path} cannot be used: {exc}; correct it or download the checkpoint again") from exc


def _find_template(model_dir: Path, config: TokenizerConfig) -> str | None:
    """Find ``chat_template.jinja``, else ``chat_template`` of the config: one template, or a list with names.

    A template named "tool_use" renders requests with tools, as in transformers.
    """
    path = model_dir / "chat_template.jinja"
    if os.path.exists(path):
        tool_use = model_dir / "additional_chat_templates" / "tool_use.jinja"
        source = read_text(path, MAX_SOURCE)
        return either_template(read_text(tool_use, MAX_SOURCE), source) if os.path.exists(tool_use) else source
    template = config.chat_template
    if not isinstance(template, list):
        return template
    named = {entry.name: entry.template for entry in template}
    if "default" not in named:
        raise CheckpointError(f"it has chat templates named {shown(', '.join(sorted(named)))}; name one 'default'")
    default = named["default"]
    return either_template(named["tool_use"], default) if "tool_use" in named else default


def _named_tokens(config: TokenizerConfig) -> dict[str, str]:
    tokens = {name: token_text(getattr(config, name)) for name in _NAMED_TOKENS}
    return {name: token for name, token in tokens.items() if token is not None}


def _add_missing_tokens(backend: tokenizers.Tokenizer, config: TokenizerConfig) -> None:
    """Add tokens that only ``tokenizer_config.json`` lists, in id order, and mark special ones."""
    added = {token.content: token for token in backend.get_added_tokens_decoder().values()}
    listed = [token for _, token in sorted((config.added_tokens_decoder or {}).items())]
    backend.add_tokens(
        [
            tokenizers.AddedToken(**msgspec.to_builtins(token))  # without unset fields
            for token in listed
            if token.content not in added
        ]
    )
    special = list(_named_tokens(config).values())
    for names in (config.additional_special_tokens or [], config.extra_special_tokens or []):
        contents = map(token_text, names.values() if isinstance(names, dict) else names)
        special += [content for content in contents if content is not None]
    backend.add_special_tokens(
        [
            tokenizers.AddedToken(content, special=True, normalized=False)
            for content in dict.fromkeys(special)
            if content not in added or not added[content].special
        ]
    )
