"""Response objects and chunks as JSON.

A chunk is assembled from bytes that are encoded once per response and the JSON of the new text: there is one per token.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
from msgspec import UNSET

from router.completions_api.response_objects import (
    ChatChoice,
    ChatCompletion,
    ChatMessage,
    Completion,
    CompletionChoice,
    TokenNames,
    UsageInfo,
    chat_logprobs,
    completion_logprobs,
    lazy_chat_logprobs,
    lazy_completion_logprobs,
)
from router.dialect.events import Event
from router.dialect.json_pieces import json_chunks, json_pieces, lazy_numbers
from router.generation.choice import Choice
from router.generation.logprob_table import LogprobTable
from router.generation.token_logprob import TokenLogprob
from router.generation.usage import Usage

DONE = Event("", b"[DONE]")
_encode = msgspec.json.encode


class FinishedChoice(msgspec.Struct):
    """A choice of a full response. ``prompt`` is the index of its prompt; ``message`` is set for parsed chats.

    ``token_ids`` are a lazy list.
    """

    choice: Choice
    prompt: int
    text: str
    token_ids: list[int] | None
    logprobs: list[LogprobTable] | None
    message: ChatMessage | None = None


class ResponseEncoder(ABC):
    """Encode the chunks or the full body of one response."""

    id_prefix: str
    chunk_object: str
    choice_format: bytes  # a chunk's choice object up to its text, without the closing brace: index, JSON of the text
    text_json: Callable[[str], bytes] = staticmethod(_encode)
    format_logprobs: Callable[[TokenNames, Sequence[TokenLogprob], int], Any]
    format_tables: Callable[[TokenNames, Sequence[LogprobTable], int], Any]  # from tables, with lazy lists

    def __init__(self, names: TokenNames, model: str, request_id: str, num_top: int, include_usage: bool) -> None:
        self.names = names
        self.warnings: list[str] = []  # about the whole response; sent in its first chunk
        self._num_top = num_top  # alternatives per token
        self._head: dict[str, Any] = {"id": self.id_prefix + request_id, "created": int(time.time()), "model": model}
        self._no_usage = b'],"usage":null}' if include_usage else b"]}"
        self.use_weights("")

    def use_weights(self, weights: str) -> None:
        """Set the version of the weights for later chunks; "" if unknown."""
        self._head["system_fingerprint"] = f"fp_{weights}" if weights else None
        head = _encode({**self._head, "object": self.chunk_object})[:-1]
        self._chunk_head = head + b',"choices":['
        tail = b',"logprobs":null,"finish_reason":null}' + self._no_usage
        self._text_chunk = b"%b%b%b" % (self._chunk_head.replace(b"%", b"%%"), self.choice_format, tail)

    def _chunk_choice(self, index: int, text: str, finished: bool) -> bytes:
        return self.choice_format % (index, self.text_json(text))

    @abstractmethod
    def first_chunk(self, index: int, prompt_ids: Sequence[int] | None, usage: Usage | None) -> Iterator[bytes]:
        """The chunk that opens a choice, in pieces, if there is one. ``prompt_ids`` are set for return_token_ids."""

    @abstractmethod
    def full_response(
        self, choices: Sequence[FinishedChoice], usage: Usage, prompts: Sequence[dict[str, Any]]
    ) -> Iterator[bytes]:
        """The body of a response that is not streamed, in pieces; ``prompts`` are requested fields of each prompt."""

    def chunk(
        self,
        choice: Choice,
        text: str,
        tokens: Sequence[TokenLogprob] | None = None,
        token_ids: Sequence[int] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """New text of a choice."""
        reason = b"null"
        if choice.finish_reason:
            stops = (choice.finish_reason.encode(), _encode(choice.stop_reason), _encode(choice.matched_stop))
            reason = b'"%s","stop_reason":%b,"matched_stop":%b' % stops
        parts = [self._chunk_head, self._chunk_choice(choice.index, text, bool(choice.finish_reason))]
        parts += [b',"logprobs":', _encode(self._logprobs(tokens)), b',"finish_reason":', reason]
        if token_ids is not None:
            parts += [b',"token_ids":', _encode(token_ids)]
        parts += [b"}", self._end(usage)]
        return b"".join(parts)

    def echo_chunk(self, index: int, text: str, table: LogprobTable | None, usage: Usage | None) -> Iterator[bytes]:
        """A chunk with the text of a prompt and its log-probabilities, in pieces."""
        yield self._chunk_head + self._chunk_choice(index, text, False) + b',"logprobs":'
        yield from json_pieces(self._table_logprobs(None if table is None else [table]))
        yield b',"finish_reason":null}' + self._end(usage)

    def text_chunk(self, index: int, text: str) -> bytes:
        """A chunk with text only, the most frequent kind."""
        return self._text_chunk % (index, self.text_json(text))

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk before [DONE], without choices."""
        return self._chunk_head + self._usage(usage)

    def _end(self, usage: Usage | None) -> bytes:
        return self._no_usage if usage is None else self._usage(usage)

    def _usage(self, usage: Usage) -> bytes:
        return b'],"usage":' + _encode(UsageInfo.of(usage)) + b"}"

    def _logprobs(self, tokens: Sequence[TokenLogprob] | None) -> Any:
        return None if tokens is None else self.format_logprobs(self.names, tokens, self._num_top)

    def _table_logprobs(self, tables: Sequence[LogprobTable] | None) -> Any:
        return None if tables is None else self.format_tables(self.names, tables, self._num_top)


class CompletionEncoder(ResponseEncoder):
    id_prefix = "cmpl-"
    chunk_object = "text_completion"
    choice_format = b'{"index":%d,"text":%b'
    format_logprobs = staticmethod(completion_logprobs)
    format_tables = staticmethod(lazy_completion_logprobs)

    def first_chunk(self, index: int, prompt_ids: Sequence[int] | None, usage: Usage | None) -> Iterator[bytes]:
        if prompt_ids is not None:
            choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
            yield self._chunk_head + _encode(choice)[:-1] + b',"prompt_token_ids":'
            yield from json_pieces(lazy_numbers(prompt_ids))
            yield b"}" + self._end(usage)

    def full_response(
        self, choices: Sequence[FinishedChoice], usage: Usage, prompts: Sequence[dict[str, Any]]
    ) -> Iterator[bytes]:
        entries = [
            CompletionChoice(
                index=end.choice.index,
                finish_reason=end.choice.finish_reason,  # type: ignore[arg-type]
                text=end.text,
                logprobs=self._table_logprobs(end.logprobs),
                stop_reason=end.choice.stop_reason,
                matched_stop=end.choice.matched_stop,
                token_ids=end.token_ids,
                **prompts[end.prompt],
            )
            for end in choices
        ]
        head = {**self._head, "object": "text_completion"}
        return json_chunks(Completion(**head, usage=UsageInfo.of(usage), choices=entries))


class ChatEncoder(ResponseEncoder):
    """Every delta has ``reasoning_content``, null where there is none: clients read it as with DeepSeek and SGLang."""

    id_prefix = "chatcmpl-"
    chunk_object = "chat.completion.chunk"
    choice_format = b'{"index":%d,"delta":{"content":%b,"reasoning_content":null}'
    format_logprobs = staticmethod(chat_logprobs)
    format_tables = staticmethod(lazy_chat_logprobs)

    def _chunk_choice(self, index: int, text: str, finished: bool) -> bytes:
        if finished and not text:
            return b'{"index":%d,"delta":{"reasoning_content":null}' % index
        return super()._chunk_choice(index, text, finished)

    def first_chunk(self, index: int, prompt_ids: Sequence[int] | None, usage: Usage | None) -> Iterator[bytes]:
        delta = {"role": "assistant", "content": "", "reasoning_content": None}
        choice = self._chunk_head + _encode({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        end = self._end(usage)
        if self.warnings and not index:
            end = b'],"warnings":' + _encode(self.warnings) + end[1:]
        if prompt_ids is None or index:
            yield choice + end
        else:
            yield choice + b'],"prompt_token_ids":'
            yield from json_pieces(lazy_numbers(prompt_ids))
            yield end[1:]

    def full_response(
        self, choices: Sequence[FinishedChoice], usage: Usage, prompts: Sequence[dict[str, Any]]
    ) -> Iterator[bytes]:
        entries = [
            ChatChoice(
                index=end.choice.index,
                finish_reason=end.choice.finish_reason,  # type: ignore[arg-type]
                message=end.message or ChatMessage("assistant", end.text, None),
                logprobs=self._table_logprobs(end.logprobs),
                stop_reason=end.choice.stop_reason,
                matched_stop=end.choice.matched_stop,
                token_ids=end.token_ids,
            )
            for end in choices
        ]
        head = {**self._head, "object": "chat.completion", "warnings": self.warnings or UNSET}
        return json_chunks(ChatCompletion(**head, usage=UsageInfo.of(usage), choices=entries, **prompts[0]))
