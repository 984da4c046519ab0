"""OpenAI's response objects, whole and in chunks.

A chunk is put together from bytes that were encoded once per response and the JSON of the new text, because one is
written per token.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

import msgspec

from router.completions_api.logprob_formats import chat_logprobs, completion_logprobs, prompt_logprobs
from router.generation.prompt_scores import PromptScores
from router.generation.token_logprob import TokenLogprob
from router.generation.usage import Usage
from router.text.tokenizer import Tokenizer

DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.encode


def usage_json(usage: Usage) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }
    if usage.reasoning_tokens:
        fields["completion_tokens_details"] = {"reasoning_tokens": usage.reasoning_tokens}
    return fields


class FinishedChoice(msgspec.Struct):
    """Everything a whole response says of one choice. ``prompt`` is the index of its prompt."""

    index: int
    prompt: int
    text: str
    finish_reason: str
    token_ids: list[int]
    logprobs: list[TokenLogprob] | None


class Format(ABC):
    """Writes the chunks and the body of one response."""

    id_prefix: str
    whole_object: str
    chunk_object: str

    def __init__(self, tokenizer: Tokenizer, model: str, request_id: str, num_top: int, include_usage: bool) -> None:
        self._tokenizer = tokenizer
        self._num_top = num_top  # alternatives per token
        self._head = {"id": self.id_prefix + request_id, "created": int(time.time()), "model": model}
        opening = _encode({**self._head, "object": self.chunk_object})[:-1]
        self._chunk_head = b"data: " + opening + b',"choices":['
        self._no_usage = b'],"usage":null}\n\n' if include_usage else b"]}\n\n"
        self._goes_on = b',"logprobs":null,"finish_reason":null}' + self._no_usage

    @abstractmethod
    def _chunk_choice(self, index: int, text: str, finished: bool) -> bytes:
        """The beginning of a chunk's choice object, up to its text; without the closing brace."""

    @abstractmethod
    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Log-probabilities in this format."""

    @abstractmethod
    def _whole_choice(self, choice: FinishedChoice) -> dict[str, Any]:
        """What is particular to a choice of a whole response."""

    @abstractmethod
    def first(self, index: int, prompt_ids: Sequence[int] | None) -> bytes:
        """A chunk to open a choice with, where the format has one; ``prompt_ids`` where they were asked for."""

    def chunk(
        self,
        index: int,
        text: str,
        finish_reason: str,
        tokens: Sequence[TokenLogprob] | None = None,
        token_ids: Sequence[int] | None = None,
        usage: Usage | None = None,
    ) -> bytes:
        """New text of a choice, as one server-sent event."""
        reason = b'"%s"' % finish_reason.encode() if finish_reason else b"null"
        logprobs = b"null" if tokens is None else _encode(self._logprobs(tokens))
        parts = [self._chunk_head, self._chunk_choice(index, text, bool(finish_reason))]
        parts += [b',"logprobs":', logprobs, b',"finish_reason":', reason]
        if token_ids is not None:
            parts += [b',"token_ids":', _encode(token_ids)]
        parts.append(b"}")
        parts.append(self._no_usage if usage is None else b'],"usage":' + _encode(usage_json(usage)) + b"}\n\n")
        return b"".join(parts)

    def text_chunk(self, index: int, text: str) -> bytes:
        """``chunk`` of a choice that goes on, with nothing else to say: most of them."""
        return self._chunk_head + self._chunk_choice(index, text, False) + self._goes_on

    def usage_chunk(self, usage: Usage) -> bytes:
        """The last chunk before the end, without choices."""
        return self._chunk_head + b'],"usage":' + _encode(usage_json(usage)) + b"}\n\n"

    def prompt_logprobs(self, scores: PromptScores, num_top: int) -> list[dict[str, Any] | None]:
        return prompt_logprobs(self._tokenizer, scores, num_top)

    def whole(
        self,
        choices: Sequence[FinishedChoice],
        usage: Usage,
        prompts: Sequence[Sequence[int]] | None,
        prompt_logprobs: Sequence[Any] | None = None,
    ) -> bytes:
        """A response in one piece. ``prompts`` are their token ids, ``prompt_logprobs`` of each what
        ``prompt_logprobs`` makes of it; where they were asked for.
        """
        body: dict[str, Any] = {**self._head, "object": self.whole_object, "usage": usage_json(usage)}
        body["choices"] = []
        for choice in choices:
            entry = {"index": choice.index, "finish_reason": choice.finish_reason, **self._whole_choice(choice)}
            entry["logprobs"] = None if choice.logprobs is None else self._logprobs(choice.logprobs)
            if prompts is not None:
                entry["token_ids"] = choice.token_ids
            body["choices"].append(entry)
        if prompts is not None:
            self._add_of_prompts(body, choices, "prompt_token_ids", prompts)
        if prompt_logprobs is not None:
            self._add_of_prompts(body, choices, "prompt_logprobs", prompt_logprobs)
        return _encode(body)

    @abstractmethod
    def _add_of_prompts(
        self, body: dict[str, Any], choices: Sequence[FinishedChoice], name: str, values: Sequence[Any]
    ) -> None:
        """Put something of each prompt where this format has it."""


class CompletionFormat(Format):
    id_prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def _chunk_choice(self, index: int, text: str, finished: bool) -> bytes:
        return b'{"index":%d,"text":%b' % (index, _encode(text))

    def first(self, index: int, prompt_ids: Sequence[int] | None) -> bytes:
        if prompt_ids is None:
            return b""
        choice = {"index": index, "text": "", "logprobs": None, "finish_reason": None, "token_ids": []}
        return self._chunk_head + _encode({**choice, "prompt_token_ids": prompt_ids}) + self._no_usage

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return completion_logprobs(self._tokenizer, tokens, self._num_top)

    def _whole_choice(self, choice: FinishedChoice) -> dict[str, Any]:
        return {"text": choice.text}

    def _add_of_prompts(
        self, body: dict[str, Any], choices: Sequence[FinishedChoice], name: str, values: Sequence[Any]
    ) -> None:
        for entry, choice in zip(body["choices"], choices, strict=True):
            entry[name] = values[choice.prompt]


class ChatFormat(Format):
    id_prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def _chunk_choice(self, index: int, text: str, finished: bool) -> bytes:
        if finished and not text:
            return b'{"index":%d,"delta":{}' % index
        return b'{"index":%d,"delta":{"content":%b}' % (index, _encode(text))

    def first(self, index: int, prompt_ids: Sequence[int] | None) -> bytes:
        delta = {"role": "assistant", "content": ""}
        choice = _encode({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})
        end = self._no_usage
        if prompt_ids is not None and index == 0:
            end = b'],"prompt_token_ids":' + _encode(prompt_ids) + end[1:]
        return self._chunk_head + choice + end

    def _logprobs(self, tokens: Sequence[TokenLogprob]) -> dict[str, Any]:
        return chat_logprobs(self._tokenizer, tokens, self._num_top)

    def _whole_choice(self, choice: FinishedChoice) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": choice.text, "refusal": None}}

    def _add_of_prompts(
        self, body: dict[str, Any], choices: Sequence[FinishedChoice], name: str, values: Sequence[Any]
    ) -> None:
        body[name] = values[0]


def new_request_id() -> str:
    return uuid4().hex
