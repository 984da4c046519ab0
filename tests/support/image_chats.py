"""Random conversations with images, as clients send them, and their prompts as the library has them.

chats = RandomChats(random.Random(1))
messages = chats.draw(longest=200)
ids, images = library_prompt(ImageReference(checkpoint), messages)
"""

from __future__ import annotations

import base64
import io
import random
from collections.abc import Mapping, Sequence
from typing import Any

from image_checkpoints import CELL, ImageReference, random_image
from PIL import Image, ImageOps

Message = dict[str, Any]

MOST_IMAGES = 4  # in a conversation
LETTERS = "QXZJKVWY"  # no merge of the tokenizer begins or ends with one: each is a token
PLACEHOLDER = "<|image_pad|>"
_WORDS = ("the", " quick", " dog", "\n", " 7 €", "日本語", " 🙂", "naïve", " def main():", "1234", " Tokens", "  ")
_ORIENTATION = 0x0112  # EXIF
_UNMERGED = 6  # tokens
#: Modes and formats of files, with the arguments of ``save``.
_FILES: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("RGB", "PNG", {}),
    ("RGB", "JPEG", {"quality": 85}),
    ("RGB", "WEBP", {"lossless": True}),
    ("RGB", "WEBP", {"quality": 70}),
    ("L", "PNG", {}),
    ("L", "JPEG", {}),
    ("RGBA", "PNG", {}),
    ("RGBA", "WEBP", {"lossless": True}),
    ("P", "PNG", {}),
    ("P", "GIF", {}),
    ("1", "PNG", {}),
    ("CMYK", "JPEG", {}),
)


def random_file(rng: random.Random, *, small: bool = False) -> bytes:
    """Return an image file of an odd size, aspect ratio and mode; some photographs lie on their side.

    ``small``: it has 4 to 9 tokens.
    """
    height, width = (rng.randint(1, 100), rng.randint(1, 100)) if small else _random_size(rng)
    mode, kind, arguments = rng.choice(_FILES)
    image = random_image(height, width, seed=rng.getrandbits(32), mode="RGB" if mode == "RGBA" else mode)
    if mode == "RGBA":
        image.putalpha(random_image(height, width, seed=rng.getrandbits(32), mode="L"))
    if kind == "JPEG" and rng.random() < 0.5:
        exif = Image.Exif()
        exif[_ORIENTATION] = rng.randint(1, 8)
        arguments = {**arguments, "exif": exif}
    file = io.BytesIO()
    image.save(file, kind, **arguments)
    return file.getvalue()


def data_url(file: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(file).decode()}"  # the bytes decide, not the type


def image_part(url: str) -> Message:
    return {"type": "image_url", "image_url": {"url": url}}


class RandomChats:
    """Draws conversations. Some have images of earlier ones, or continue the begin of one."""

    def __init__(self, rng: random.Random, *, like_placeholders: bool = False, small: bool = False) -> None:
        """``like_placeholders``: some texts look like an image's placeholder. ``small``: images have few tokens."""
        self._rng = rng
        self._small = small
        self._like_placeholders = like_placeholders
        self._urls: list[str] = []
        self._earlier: list[list[Message]] = []

    def draw(self, longest: int) -> list[Message]:
        """Return messages that the assistant answers next, with texts of ``longest`` tokens together at most."""
        rng = self._rng
        messages: list[Message] = []
        if self._earlier and rng.random() < 0.3:
            earlier = rng.choice(self._earlier)
            messages = list(earlier[: rng.randrange(1, len(earlier) + 1)])
        elif rng.random() < 0.3:
            messages = [{"role": "system", "content": self._text(longest // 8)}]
        turns = rng.choice((1, 1, 2, 3))
        images = max(0, rng.randint(0, MOST_IMAGES) - num_images(messages))
        for turn in range(turns):
            here = images if turn == turns - 1 else rng.randint(0, images)
            images -= here
            messages += self._turn(here, longest // (2 * turns), asked=_asks(messages))
        self._earlier.append(messages)
        return messages

    def user(self, longest: int, images: int = 1) -> Message:
        """Return a message of the user."""
        return {"role": "user", "content": self._content(images, longest)}

    def _turn(self, images: int, longest: int, asked: bool) -> list[Message]:
        """Return what follows: an answer to what has been asked, then a question or the result of a tool."""
        rng = self._rng
        if asked and rng.random() < 0.4:
            number = rng.randrange(1000)
            function = {"name": "look", "arguments": f'{{"at": {number}}}'}
            call = {"id": f"call_{number}", "type": "function", "function": function}
            result = {"role": "tool", "tool_call_id": call["id"], "content": self._content(images, longest)}
            return [{"role": "assistant", "content": None, "tool_calls": [call]}, result]
        answer = [{"role": "assistant", "content": self._text(longest // 4)}] if asked else []
        return [*answer, self.user(longest, images)]

    def _content(self, images: int, longest: int) -> str | list[Message]:
        rng = self._rng
        if not images:
            return self._text(longest)
        parts = [image_part(self._url()) for _ in range(images)]
        for _ in range(rng.randint(0, 2)):
            parts.insert(rng.randint(0, len(parts)), {"type": "text", "text": self._text(longest // 2)})
        return parts

    def _url(self) -> str:
        rng = self._rng
        if self._urls and rng.random() < 0.3:
            return rng.choice(self._urls)
        self._urls.append(data_url(random_file(rng, small=self._small)))
        return self._urls[-1]

    def _text(self, longest: int) -> str:
        rng = self._rng
        text = "".join(rng.choices(LETTERS, k=rng.randint(1, max(1, longest - _UNMERGED))))
        text += "".join(rng.choices(_WORDS, k=rng.randint(0, 3)))
        return text + PLACEHOLDER if self._like_placeholders and rng.random() < 0.1 else text


def num_images(messages: Sequence[Message]) -> int:
    return sum(part["type"] == "image_url" for message in messages for part in _parts(message))


def lengthened(messages: Sequence[Message], num_tokens: int) -> list[Message]:
    """Return the conversation with so many more tokens at the begin of its last message."""
    *earlier, last = messages
    text = LETTERS[0] * num_tokens
    content = last["content"]
    longer = text + content if isinstance(content, str) else [{"type": "text", "text": text}, *content]
    return [*earlier, {**last, "content": longer}]


def library_prompt(reference: ImageReference, messages: Sequence[Message]) -> tuple[list[int], list[Image.Image]]:
    """Return token ids, with a placeholder for each token of an image, and the images, upright."""
    images = [opened(part["image_url"]["url"]) for message in messages for part in _parts(message) if _is_image(part)]
    text = reference.tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=True)
    expanded = map(reference.tokens_of, images)
    ids: list[int] = []
    for token in reference.tokenizer.encode(text, add_special_tokens=False):
        ids += next(expanded) if token == reference.image_token_id else [token]
    return ids, images


def opened(url: str) -> Image.Image:
    """Return the image of a data: URL, as ``load_image`` of the library returns it: upright."""
    file = base64.b64decode(url.partition(",")[2])
    return ImageOps.exif_transpose(Image.open(io.BytesIO(file)))


def _random_size(rng: random.Random) -> tuple[int, int]:
    """Return height and width: 4 … 40 tokens mostly, of bounds 4 … 256."""
    kind = rng.random()
    if kind < 0.25:
        return CELL * rng.randint(1, 6), CELL * rng.randint(1, 6)
    if kind < 0.4:
        long = rng.randint(100, 900)
        short = rng.randint(max(1, -(-long // 190)), 40)
        return (long, short) if rng.random() < 0.5 else (short, long)
    if kind < 0.5:
        return rng.randint(1, 20), rng.randint(1, 20)
    if kind < 0.6:
        return rng.randint(300, 800), rng.randint(300, 800)
    return rng.randint(30, 220), rng.randint(30, 220)


def _asks(messages: Sequence[Message]) -> bool:
    return bool(messages) and messages[-1]["role"] in ("user", "tool")


def _parts(message: Mapping[str, Any]) -> list[Message]:
    content = message.get("content")
    return content if isinstance(content, list) else []


def _is_image(part: Message) -> bool:
    return bool(part["type"] == "image_url")
