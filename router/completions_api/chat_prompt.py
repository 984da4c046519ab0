"""From a chat to its prompt: rendered, tokenized, with its images loaded and their placeholders expanded."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec

from pdserve.errors import NodeError
from router.completions_api.request_bodies import ChatBody
from router.images.chat_images import take_images
from router.images.loading import LoadedImage
from router.images.placeholders import expand
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
    accepted = model.fleet.image_input
    taking = partial(take_images, body.messages, sees=accepted is not None, field=body.prompt_field)
    chat = await asyncio.to_thread(taking) if _num_parts(body) > _INLINE_PARTS else taking()
    image_token = None if accepted is None else model.encoder.image_token(accepted.token_id)
    request = msgspec.structs.replace(body.render_request, messages=chat.messages)
    prompt = await model.encoder.encode_chat(request, body.add_special_tokens, image_token)
    if not chat.sources:
        return ChatPrompt(prompt, warnings=chat.warnings)
    assert accepted is not None
    if image_token is None:
        raise NodeError(
            f"the nodes of model {model.name!r} take images at token {accepted.token_id}, which the tokenizer of the "
            "router has not; start the router with the directory of the model that the nodes have"
        )
    pictures = tuple(await model.images.load(chat.sources, accepted))
    token_ids, spans = expand(prompt.token_ids, accepted, pictures)
    return ChatPrompt(Prompt(token_ids, prompt.text, images=spans), pictures, chat.warnings)


def _num_parts(body: ChatBody) -> int:
    contents = (message.get("content") for message in body.messages)
    return sum(len(content) for content in contents if isinstance(content, list))
