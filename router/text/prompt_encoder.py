"""Renders chats, tokenizes prompts, and decodes prompts for ``echo``.

Long texts are tokenized and decoded on a thread, so that other streams go on.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

import msgspec

from pdserve.errors import RequestError, RequestTooLong
from pdserve.rpc.protobuf import pack_tokens
from router.text.chat.template import RESERVED, ChatTemplate, RenderRequest
from router.text.chat.template_renderer import TemplateRenderers
from router.text.fair_slots import FairSlots
from router.text.image_marks import MARK, ImageToken, encode_marked, restored
from router.text.prompt import Prompt
from router.text.tokenizer import Tokenizer

_INLINE_CHARS = 4096  # about a millisecond of tokenizing
_INLINE_TOKENS = 1024  # about a millisecond of decoding
_THREADS = 3  # threads; a client gets at most two
_BYTES_PER_TOKEN = 16  # at most, on average; natural languages and code have 2 – 6
_MIN_LIMIT = 1024 * 1024  # bytes that /tokenize accepts for any model

Source = str | bytes | tuple[str, str]  # a text, packed token ids, or a pair of texts
Result = TypeVar("Result")


class PromptEncoder:
    """``max_tokens`` returns the current limit of prompt tokens. ``trusts_templates``: requests may have one."""

    def __init__(self, tokenizer: Tokenizer, max_tokens: Callable[[], int], trusts_templates: bool = False) -> None:
        self._tokenizer = tokenizer
        self._max_tokens = max_tokens
        self._trusts_templates = trusts_templates
        template = tokenizer.chat_template
        if template is None and trusts_templates:
            template = ChatTemplate("", tokenizer.named_tokens)  # requests bring their own template
        self._renderers = None if template is None else TemplateRenderers(template)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="tokenize")
        self._slots = FairSlots(_THREADS)

    async def close(self) -> None:
        if self._renderers is not None:
            await self._renderers.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def encode_all(self, sources: Sequence[Source], add_special_tokens: bool, field: str) -> list[Prompt]:
        """Tokenize texts and pairs of texts; other sources are packed token ids. Raises RequestTooLong."""
        for source in sources:
            self._check_length(_num_bytes(source), field)
        encoded: list[Prompt] = []
        for group in _groups(sources):
            inline = len(group) == len(sources) and sum(map(_num_chars, group)) <= _INLINE_CHARS
            encoded += await self._run(inline, partial(self._encode_group, group, add_special_tokens))
        return encoded

    def _encode_group(self, sources: Sequence[Source], add_special_tokens: bool) -> list[Prompt]:
        return [self._encode_one(source, add_special_tokens) for source in sources]

    async def encode_text(self, text: str, add_special_tokens: bool) -> Prompt:
        """Tokenize a text that may be longer than a prompt. Raises RequestTooLong."""
        limit = max(_MIN_LIMIT, self._max_bytes())
        num_bytes = len(text.encode())
        if num_bytes > limit:
            raise RequestTooLong(f"the text has {num_bytes} bytes; at most {limit} are tokenized, send parts", "prompt")
        return await self._encode_text(text, add_special_tokens)

    async def _encode_text(self, text: str, add_special_tokens: bool) -> Prompt:
        return await self._run(len(text) <= _INLINE_CHARS, partial(self._encode_one, text, add_special_tokens))

    def _max_bytes(self) -> int:
        return self._max_tokens() * min(self._tokenizer.longest_token, _BYTES_PER_TOKEN)

    def _check_length(self, num_bytes: int, field: str) -> None:
        """Raises RequestTooLong, before the cost of tokenizing, for text that cannot fit with long tokens."""
        limit = self._max_bytes()
        if num_bytes > limit:
            problem = f"the prompt has {num_bytes} bytes; the {self._max_tokens()} tokens of the model hold at most"
            raise RequestTooLong(f"{problem} {limit}; shorten it", field, "context_length_exceeded")

    def _encode_one(self, source: Source, add_special_tokens: bool) -> Prompt:
        if isinstance(source, bytes):
            return Prompt(source)
        text = source if isinstance(source, str) else None
        return Prompt(pack_tokens(self._tokenizer.encode(source, add_special_tokens)), text)

    def image_token(self, token_id: int) -> ImageToken | None:
        """Return the placeholder of images with this id; None if it is no added token of the tokenizer."""
        text = self._tokenizer.token(token_id)
        return ImageToken(text, token_id) if text and self._tokenizer.added_token_id(text) == token_id else None

    async def encode_chat(
        self, request: RenderRequest, add_special_tokens: bool, image_token: ImageToken | None = None
    ) -> Prompt:
        """Render and tokenize a chat. Raises RequestError.

        With ``image_token`` the prompt has its id once for each image of the messages, and nowhere else.
        """
        if request.template and not self._trusts_templates:
            text = "chat_template needs a router that was started with --trust-request-chat-template; leave it out"
            raise RequestError(text, "chat_template")
        if self._renderers is None or not (self.template or request.template):
            raise RequestError("the model has no chat template; use /v1/completions", "messages")
        reserved = RESERVED.intersection(request.variables)
        if reserved:
            raise RequestError(f"chat_template_kwargs may not set {min(reserved)}", "chat_template_kwargs")
        contents = (message.get("content") for message in request.messages)
        num_chars = sum(len(content) for content in contents if isinstance(content, str))
        self._check_length(num_chars, request.field)  # checked before the cost of the template
        if image_token is not None:
            request = msgspec.structs.replace(request, image_token=image_token.text, image_mark=MARK)
        text = await self._renderers.render(request)
        self._check_length(len(text.encode()), request.field)
        if image_token is None:
            return await self._encode_text(text, add_special_tokens)
        encode = partial(self._encode_marked, text, image_token, add_special_tokens)
        return await self._run(len(text) <= _INLINE_CHARS, encode)

    def _encode_marked(self, text: str, image_token: ImageToken, add_special_tokens: bool) -> Prompt:
        ids = encode_marked(self._tokenizer, text, image_token, add_special_tokens)
        return Prompt(pack_tokens(ids), restored(text, image_token))

    async def add_echo(self, prompts: list[Prompt], scored: bool, special: bool) -> list[Prompt]:
        """Add the texts, and token offsets where ``scored``. ``special``: they were encoded with special tokens.

        Special tokens among token ids become text, as they are where a client sends a text with them.
        """
        inline = sum(prompt.num_tokens for prompt in prompts) <= _INLINE_TOKENS
        return await self._run(inline, lambda: [self._with_echo(prompt, scored, special) for prompt in prompts])

    async def decode(self, token_ids: Sequence[int], check: Callable[[Sequence[int]], None]) -> str:
        """Return the text of token ids. Raises the errors of ``check``."""

        def decode() -> str:
            check(token_ids)
            return self._tokenizer.decode(token_ids)

        return await self._run(len(token_ids) <= _INLINE_TOKENS, decode)

    async def decode_all(self, texts: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of lists of token ids."""
        inline = sum(map(len, texts)) <= _INLINE_TOKENS
        return await self._run(inline, lambda: [self._tokenizer.decode(token_ids) for token_ids in texts])

    def _with_echo(self, prompt: Prompt, scored: bool, special: bool) -> Prompt:
        if prompt.text is not None:
            offsets = self._tokenizer.offsets(prompt.text, special) if scored else ()
            return msgspec.structs.replace(prompt, offsets=offsets)
        token_ids = prompt.unpacked()
        text = self._tokenizer.decode(token_ids)
        return Prompt(prompt.token_ids, text, self._decoded_offsets(token_ids) if scored else ())

    def _decoded_offsets(self, token_ids: Sequence[int]) -> list[int]:
        """Return where each token begins in the decoded text."""
        decoder = self._tokenizer.detokenizer(visible=None)
        offsets = []
        length = 0
        for token_id in token_ids:
            offsets.append(length)
            length += len(decoder.push(token_id))
        return offsets

    @property
    def template(self) -> str:
        """The source of the chat template; empty if there is none."""
        return "" if self._tokenizer.chat_template is None else self._tokenizer.chat_template.source

    async def _run(self, inline: bool, work: Callable[[], Result]) -> Result:
        if inline:
            return work()
        async with self._slots.slot():
            return await asyncio.get_running_loop().run_in_executor(self._threads, work)


def _groups(sources: Sequence[Source]) -> Iterator[Sequence[Source]]:
    """Split, so that a thread is free for other requests after about a millisecond, or after a single long text."""
    start = num_chars = 0
    for index, source in enumerate(sources):
        num_chars += _num_chars(source)
        if index > start and num_chars > _INLINE_CHARS:
            yield sources[start:index]
            start = index
            num_chars = _num_chars(source)
    yield sources[start:]


def _num_chars(source: Source) -> int:
    return 0 if isinstance(source, bytes) else sum(map(len, _texts(source)))


def _num_bytes(source: Source) -> int:
    return 0 if isinstance(source, bytes) else sum(len(text.encode()) for text in _texts(source))


def _texts(source: str | tuple[str, str]) -> tuple[str, ...]:
    return (source,) if isinstance(source, str) else source
