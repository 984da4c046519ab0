"""Takes the images out of the messages of a chat: the template gets parts without data, the workers get the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from pdserve.errors import RequestError
from pdserve.images import MAX_IMAGES
from router.images.source import ImageSource
from router.text.chat.image_parts import NOT_FETCHED, USER_OR_TOOL, ImagePart, image_of_part
from router.text.chat.messages import Message

_KINDS = ("image_url", "input_image")  # types of parts in a chat
_ROLES = ("user", "tool")


class ChatImages(msgspec.Struct, frozen=True):
    """Messages whose images are parts ``{"type": "image", "number": …}``, and the images by number."""

    messages: Sequence[Message]
    sources: tuple[ImageSource, ...] = ()
    warnings: tuple[str, ...] = ()  # about images that the model does not see


def take_images(messages: Sequence[Message], sees: bool, field: str = "messages", fetches: bool = False) -> ChatImages:
    """Take the images out of messages, whose data is gone afterwards. ``sees``: the model takes images.

    ``field`` is the field of the client's body with the conversation. ``fetches``: images by URL are fetched.
    Raises RequestError that names an image which cannot be used, or which a model that reads text only cannot see.
    """
    taken = _Taken(sees, field, fetches)
    new = [
        {**message, "content": taken.parts(message, f"messages[{index}]")}
        if isinstance(message.get("content"), list)
        else message
        for index, message in enumerate(messages)
    ]
    return ChatImages(new, tuple(taken.sources), tuple(taken.warnings))


class _Taken:
    def __init__(self, sees: bool, field: str, fetches: bool) -> None:
        self.sources: list[ImageSource] = []
        self._field = field
        self._sees = sees
        self._fetches = fetches
        self._unseen = 0
        self._lost = 0

    def parts(self, message: Message, where: str) -> list[Any]:
        role = message.get("role")
        return [self._part(part, role, f"{where}.content[{number}]") for number, part in enumerate(message["content"])]

    def _part(self, part: Any, role: Any, name: str) -> Any:
        if isinstance(part, ImagePart):
            return self._image(part)
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in _KINDS:
            image = image_of_part(part, name)
            return self._image(image if role in _ROLES else ImagePart(name, fault=USER_OR_TOOL))
        if kind == "image":  # the type that templates get
            raise RequestError(f"{name} has type 'image'; send images as parts of type 'image_url'", name)
        return part

    def _image(self, image: ImagePart) -> dict[str, Any]:
        if image.lost or not self._sees:
            if not image.instead:
                text = f"{image.name} is an image; the model reads text only: leave it out"
                raise RequestError(text, image.name)
            self._lost += image.lost and self._sees
            self._unseen += not self._sees
            return {"type": "text", "text": image.instead}
        if image.fault:
            raise RequestError(f"{image.name} {image.fault}", image.name)
        if image.url and not self._fetches:
            raise RequestError(f"{image.name} {NOT_FETCHED}", image.name)
        if len(self.sources) == MAX_IMAGES:
            text = f"the conversation has more than {MAX_IMAGES} images, the limit of a prompt; send fewer"
            raise RequestError(text, self._field)
        self.sources.append(ImageSource(image.take(), image.name, image.url))
        return {"type": "image", "number": len(self.sources) - 1}

    @property
    def warnings(self) -> list[str]:
        warnings = []
        if self._unseen:
            warnings.append(f"the model reads text only: {self._unseen} images are placeholders")
        if self._lost:
            warnings.append(f"the data of stored images is missing: {self._lost} images are placeholders")
        return warnings
