"""Tokenizes prompts and renders chats. Long texts are tokenized on a thread, so that other streams go on."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from pdserve.errors import RequestError, RequestTooLong
from pdserve.rpc.protobuf import pack_tokens
from router.text.chat.template import RESERVED, RenderRequest
from router.text.chat.template_renderer import TemplateRenderers
from router.text.prompt import Prompt
from router.text.tokenizer import Tokenizer

_INLINE_CHARS = 4096  # about a millisecond of tokenizing
_THREADS = 2

Result = TypeVar("Result")


class PromptEncoder:
    """``max_tokens`` returns the model's current limit of prompt tokens."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: Callable[[], int]) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._renderers = None if tokenizer.chat_template is None else TemplateRenderers(tokenizer.chat_template)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    async def close(self) -> None:
        if self._renderers is not None:
            await self._renderers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_completion(self, prompts: Sequence[str | bytes], add_special_tokens: bool) -> list[Prompt]:
        """Tokenize the prompts that are text; the others are packed token ids. Raises RequestTooLong."""
        texts = [prompt for prompt in prompts if isinstance(prompt, str)]
        for text in texts:
            self._check_length(text, "prompt")
        num_chars = sum(map(len, texts))
        return await self._run(num_chars, lambda: [self._encode_one(prompt, add_special_tokens) for prompt in prompts])

    async def encode_text(self, text: str, add_special_tokens: bool) -> Prompt:
        """Tokenize a text of any length."""
        return await self._run(len(text), lambda: self._encode_one(text, add_special_tokens))

    def _check_length(self, text: str, field: str) -> None:
        """Raises RequestTooLong, before the cost of tokenizing, for text that cannot fit with the longest tokens."""
        limit = self._max_tokens() * self._tokenizer.longest_token
        if len(text) > limit:
            what = f"the prompt has {len(text)} characters; the {self._max_tokens()} tokens of the model hold at most"
            raise RequestTooLong(f"{what} {limit}; shorten it", field, "context_length_exceeded")

    def _encode_one(self, prompt: str | bytes, add_special_tokens: bool) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(pack_tokens(self._tokenizer.encode(prompt, add_special_tokens)), prompt)
        return Prompt(prompt)

    async def encode_chat(self, request: RenderRequest, add_special_tokens: bool) -> Prompt:
        """Render and tokenize a chat. Raises RequestError."""
        if self._renderers is None:
            raise RequestError("the model has no chat template; use /v1/completions", "messages")
        reserved = RESERVED.intersection(request.variables)
        if reserved:
            raise RequestError(f"chat_template_kwargs may not set {min(reserved)}", "chat_template_kwargs")
        text = await self._renderers.render(request)
        self._check_length(text, "messages")
        return await self._run(len(text), lambda: self._encode_one(text, add_special_tokens))

    async def _run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        if num_chars <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)
