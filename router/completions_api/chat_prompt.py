"""From a chat to its prompt: rendered, tokenized, with its images loaded and their placeholders expanded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import msgspec

from pdserve.errors import NodeError
from pdserve.images import ImageInput
from router.completions_api.request_bodies import ChatBody
from router.images.chat_images import take_images
from router.images.loading import LoadedImage
from router.images.placeholders import Grid, expand
from router.images.source import ImageSource
from router.service import ServedModel
from router.text.prompt import Prompt

_INLINE_PARTS = 1000  # parts of contents; about a millisecond


class ChatPrompt(msgspec.Struct, frozen=True):
    """``pictures`` are the images of the prompt's spans, in their order."""

    prompt: Prompt
    pictures: tuple[LoadedImage, ...] = ()
    warnings: tuple[str, ...] = ()  # about images that the model does not see


async def read_chat(body: ChatBody, model: ServedModel) -> ChatPrompt:
    """Return the whole prompt of a chat. The images are taken out of the body, which cannot be read again.

    Raises RequestError, which names an image that cannot be used.
    """
    chat = await _read(body, model)
    if chat.accepted is None or not chat.sources:
        return ChatPrompt(chat.prompt, warnings=chat.warnings)
    pictures = tuple(await model.images.load(chat.sources, chat.accepted))
    return ChatPrompt(_expanded(chat.prompt, chat.accepted, pictures), pictures, chat.warnings)


async def count_chat(body: ChatBody, model: ServedModel) -> Prompt:
    """Return the prompt of a chat with images without digests: only their headers are read. Raises as ``read_chat``."""
    chat = await _read(body, model)
    if chat.accepted is None or not chat.sources:
        return chat.prompt
    return _expanded(chat.prompt, chat.accepted, await model.images.measure(chat.sources, chat.accepted))


class _Chat(msgspec.Struct, frozen=True):
    """A chat whose images are not loaded yet, and their placeholders not expanded."""

    prompt: Prompt
    sources: tuple[ImageSource, ...]
    accepted: ImageInput | None  # set if there are sources
    warnings: tuple[str, ...]


def _expanded(prompt: Prompt, accepted: ImageInput, images: Sequence[Grid]) -> Prompt:
    token_ids, spans = expand(prompt.token_ids, accepted, images)
    return Prompt(token_ids, prompt.text, images=spans)


async def _read(body: ChatBody, model: ServedModel) -> _Chat:
    accepted = model.fleet.image_input
    sees = accepted is not None
    taking = partial(take_images, body.messages, sees=sees, field=body.prompt_field, fetches=model.images.fetches)
    chat = await asyncio.to_thread(taking) if _num_parts(body) > _INLINE_PARTS else taking()
    image_token = None if accepted is None else model.encoder.image_token(accepted.token_id)
    request = msgspec.structs.replace(body.render_request, messages=chat.messages)
    prompt = await model.encoder.encode_chat(request, body.add_special_tokens, image_token)
    if chat.sources and accepted is not None and image_token is None:
        raise NodeError(
            f"the nodes of model {model.name!r} take images at token {accepted.token_id}, which the tokenizer of the "
            "router has not; start the router with the directory of the model that the nodes have"
        )
    return _Chat(prompt, chat.sources, accepted, chat.warnings)


def _num_parts(body: ChatBody) -> int:
    contents = (message.get("content") for message in body.messages)
    return sum(len(content) for content in contents if isinstance(content, list))
