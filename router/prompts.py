"""From a body to token ids. Long texts are tokenized on a thread, so that they do not hold up other streams."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from pdserve.errors import RequestError
from router.chat.messages import check_messages
from router.chat.template import RESERVED
from router.job import Prompt
from router.requests import ChatBody, CompletionBody, GenerateBody
from router.tokenizer import Tokenizer

_INLINE_CHARS = 4096  # about a millisecond of tokenizing
_THREADS = 2

Result = TypeVar("Result")


class PromptEncoder:
    """Applies the chat template and the tokenizer."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode(self, body: GenerateBody) -> list[Prompt]:
        """The prompts of a body. Raises RequestError for messages that cannot become one."""
        if isinstance(body, ChatBody):
            return [await self.encode_chat(body)]
        assert isinstance(body, CompletionBody)
        prompts, special = body.prompts, body.add_special_tokens
        num_chars = sum(len(prompt) for prompt in prompts if isinstance(prompt, str))
        return await self._run(num_chars, lambda: [self._encode_one(prompt, special) for prompt in prompts])

    async def encode_text(self, text: str, add_special_tokens: bool) -> Prompt:
        return await self._run(len(text), lambda: self._encode_one(text, add_special_tokens))

    def _encode_one(self, prompt: str | list[int], add_special_tokens: bool) -> Prompt:
        if isinstance(prompt, str):
            return Prompt(self._tokenizer.encode(prompt, add_special_tokens), prompt)
        return Prompt(prompt)

    async def encode_chat(self, body: ChatBody) -> Prompt:
        template = self._tokenizer.chat_template
        if template is None:
            raise RequestError("the model has no chat template; use /v1/completions", "messages")
        reserved = RESERVED.intersection(body.chat_template_kwargs)
        if reserved:
            raise RequestError(f"chat_template_kwargs may not set {min(reserved)}", "chat_template_kwargs")
        messages = check_messages(body.messages)

        def render() -> Prompt:
            text = template.render(
                messages,
                body.opens_message,
                body.template_variables,
                tools=body.tool_use.tools,
                documents=body.documents,
                continue_final_message=body.continue_final_message,
            )
            return Prompt(self._tokenizer.encode(text, body.add_special_tokens), text)

        num_chars = sum(_length(message) for message in messages) + len(repr(body.tools))
        return await self._run(num_chars, render)

    async def _run(self, num_chars: int, work: Callable[[], Result]) -> Result:
        if num_chars <= _INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _length(message: Mapping[str, Any]) -> int:
    return len(message.get("content") or "")
