"""The items of a conversation as JSON, one behind the other, and an index: each is read and decoded alone.

Images lie beside the JSON, under their digests, so that many items and responses share one. Only fields that mean
something here are kept, so a conversation takes little more memory decoded than as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from hashlib import sha256
from typing import Any

import msgspec

from pdserve.errors import RequestError
from router.responses_api.input_items import OF_PROVIDERS, Item, new_id
from router.responses_api.output_objects import ItemStatus, OutputItem, OutputMessage
from router.text.json_bounds import MAX_ITEMS

PLACE_BYTES = 256  # bytes per item beside its JSON, roughly

_ID_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc", "function_call_output": "fco"}
_ID_PREFIXES |= {"compaction": "cmp", "custom_tool_call": "ctc", "custom_tool_call_output": "ctco"}
_ID_PREFIXES |= {"local_shell_call": "lsh", "local_shell_call_output": "lsho"}
_TEXTS = {  # fields of items, by type
    "message": ("role",),
    "function_call": ("call_id", "name", "arguments", "namespace"),
    "function_call_output": ("call_id",),
    "custom_tool_call": ("call_id", "name", "input", "namespace"),
    "custom_tool_call_output": ("call_id",),
    "local_shell_call": ("call_id",),
    "local_shell_call_output": ("call_id",),
    "compaction": ("encrypted_content",),
}
# Fields with a text or a list of parts.
_PARTS = {"message": ("content",), "reasoning": ("content", "summary")}
_PARTS |= {f"{call}_output": ("output",) for call in ("function_call", "custom_tool_call", "local_shell_call")}
# Fields with any value: actions, and fields of calls that ran elsewhere.
_VALUES = {**OF_PROVIDERS, "local_shell_call": ("action",)}
_TEXTS_OF_PARTS = ("type", "text", "refusal", "image_url", "detail")
_SHARED_FROM = 1024  # characters of an image's URL that lies beside the JSON
_DIGEST = "digest"  # field in place of such a URL; clients' parts have none, as it is not among _TEXTS_OF_PARTS
_STATUSES = ItemStatus.__args__  # type: ignore[attr-defined]


class Place(msgspec.Struct, frozen=True, array_like=True):
    """The place of an item: its JSON begins at the end of the one before."""

    id: str
    end: int
    num_values: int  # keys of the item and items of its lists, at all levels
    image_bytes: int = 0  # images beside its JSON, each as often as the item has it


class StoredItems(msgspec.Struct, frozen=True):
    data: bytes
    places: list[Place]
    images: dict[str, str] = {}  # URLs, by digest

    @property
    def json_bytes(self) -> int:
        """The memory of the items without their images."""
        return len(self.data) + PLACE_BYTES * len(self.places)

    @property
    def num_bytes(self) -> int:
        """The memory of the items, with each image once."""
        return self.json_bytes + sum(map(len, self.images.values()))

    @property
    def image_bytes(self) -> int:
        """The images of all items, each as often as an item has it."""
        return sum(place.image_bytes for place in self.places)

    def decoded(self) -> list[Item]:
        return list(decode_items(self.data, self.places, self.images))

    def followed_by(self, items: StoredItems) -> StoredItems:
        start = len(self.data)
        moved = [msgspec.structs.replace(place, end=start + place.end) for place in items.places]
        return StoredItems(self.data + items.data, self.places + moved, self.images | items.images)


def start_of(places: Sequence[Place], at: int) -> int:
    """Return the begin of item ``at`` in the JSON, or the end of all items."""
    return places[at - 1].end if at else 0


class ConversationBudget:
    """Bounds the conversation that a request names. An item counts as often as it is named."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = self._num_values = 0

    def take(self, places: Sequence[Place], first: int, end: int, field: str) -> None:
        """Count items ``first`` … ``end`` - 1. Raises RequestError."""
        self._num_bytes += start_of(places, end) - start_of(places, first)
        self._num_bytes += sum(place.image_bytes for place in places[first:end])
        self._num_values += sum(place.num_values for place in places[first:end])
        if self._num_bytes > self._max_bytes:
            text = f"the named items have more than {self._max_bytes} bytes; compact the conversation, or begin another"
            raise RequestError(text, field)
        if self._num_values > MAX_ITEMS:
            text = f"the named items have more than {MAX_ITEMS} values; compact the conversation, or begin another"
            raise RequestError(text, field)


def encode_items(items: Iterable[Item]) -> StoredItems:
    """An id that comes again is replaced, since pages of items begin behind an id."""
    data = bytearray()
    places = list[Place]()
    images = dict[str, str]()
    ids = set[str]()
    for item in map(stored_item, items):
        if item["id"] in ids:
            item["id"] = new_id(_ID_PREFIXES.get(item["type"], "item"))
        ids.add(item["id"])
        image_bytes = _move_images(item, images)
        data += msgspec.json.encode(item)
        places.append(Place(item["id"], len(data), num_values(item), image_bytes))
    return StoredItems(bytes(data), places, images)


def encode_output(output: Iterable[OutputItem]) -> StoredItems:
    """Encode output items without log-probabilities, which no later response reads."""
    return encode_items(msgspec.to_builtins(_without_logprobs(item)) for item in output)


def decode_items(data: bytes, places: Iterable[Place], images: Mapping[str, str], start: int = 0) -> Iterator[Item]:
    """Decode items one by one, so that other threads run in between. ``data`` begins at ``start`` of the items.

    Equal images share the string of ``images``, which has all of them by digest.
    """
    view = memoryview(data)
    at = start
    for place in places:
        item = msgspec.json.decode(view[at - start : place.end - start])
        for part in _parts(item):
            if (digest := part.pop(_DIGEST, None)) is not None:
                part["image_url"] = images[digest]
        yield item
        at = place.end


def image_digests(data: bytes, places: Iterable[Place], start: int = 0) -> set[str]:
    """Return the digests of the images that lie beside the JSON of items."""
    view = memoryview(data)
    digests = set[str]()
    at = start
    for place in places:
        if place.image_bytes:
            item = msgspec.json.decode(view[at - start : place.end - start])
            digests |= {part[_DIGEST] for part in _parts(item) if _DIGEST in part}
        at = place.end
    return digests


def _move_images(item: Item, images: dict[str, str]) -> int:
    """Move the long URLs of a stored item's images to ``images``. Return their characters."""
    num_bytes = 0
    for part in _parts(item):
        url = part.get("image_url", "")
        if len(url) >= _SHARED_FROM:
            del part["image_url"]
            part[_DIGEST] = sha256(url.encode("utf-8", "surrogatepass")).hexdigest()
            images[part[_DIGEST]] = url
            num_bytes += len(url)
    return num_bytes


def _parts(item: Item) -> Iterator[dict[str, Any]]:
    """Yield the parts of a stored item."""
    for name in _PARTS.get(item.get("type", ""), ()):
        value = item.get(name)
        if isinstance(value, list):
            yield from value


def stored_item(item: Item) -> Item:
    """Return an item as clients read it: with an id, a status, content in parts, and no unknown fields."""
    kind = item.get("type", "message")
    given = item.get("id")
    status = item.get("status")
    item_id = given if isinstance(given, str) else new_id(_ID_PREFIXES.get(kind, "item"))
    stored: Item = {"type": kind, "id": item_id, "status": status if status in _STATUSES else "completed"}
    stored |= {name: item[name] for name in _TEXTS.get(kind, ()) if isinstance(item.get(name), str)}
    stored |= {name: item[name] for name in _VALUES.get(kind, ()) if item.get(name) is not None}
    for name in _PARTS.get(kind, ()):
        value = item.get(name)
        if isinstance(value, list):
            parts = [_stored_part(part) for part in value if isinstance(part, dict)]
            stored[name] = [part for part in parts if part]  # a part without a known field is dropped
        elif isinstance(value, str):
            stored[name] = value
    if kind == "function_call" and isinstance(item.get("arguments"), dict):
        stored["arguments"] = msgspec.json.encode(item["arguments"]).decode()
    if kind == "message" and isinstance(stored.get("content"), str):
        part = "output_text" if item.get("role") == "assistant" else "input_text"
        stored["content"] = [_stored_part({"type": part, "text": stored["content"]})]
    return stored


def num_values(item: Item) -> int:
    """Count keys and items of lists at all levels."""
    total = 0
    level: list[dict[str, Any] | list[Any]] = [item]
    while level:
        total += sum(map(len, level))
        values = [
            value for container in level for value in (container.values() if isinstance(container, dict) else container)
        ]
        level = [value for value in values if isinstance(value, dict | list)]
    return total


def image_bytes(items: Iterable[Item]) -> int:
    """Return the characters of the images in items."""
    return sum(
        len(part["image_url"])
        for item in items
        for name in _PARTS.get(item.get("type", "message"), ())
        if isinstance(item.get(name), list)
        for part in map(_with_url, item[name])
        if isinstance(part, dict) and isinstance(part.get("image_url"), str)
    )


def _with_url(part: Any) -> Any:
    """Return a part whose image is a URL: that of chats is an object."""
    image = part.get("image_url") if isinstance(part, dict) else None
    if not isinstance(image, dict):
        return part
    return {**part, "image_url": image.get("url"), "detail": image.get("detail", part.get("detail"))}


def _stored_part(part: dict[str, Any]) -> dict[str, Any]:
    part = _with_url(part)
    stored: dict[str, Any] = {name: part[name] for name in _TEXTS_OF_PARTS if isinstance(part.get(name), str)}
    return {**stored, "annotations": []} if stored.get("type") == "output_text" else stored


def _without_logprobs(item: OutputItem) -> OutputItem:
    if not isinstance(item, OutputMessage):
        return item
    return msgspec.structs.replace(item, content=[msgspec.structs.replace(part, logprobs=[]) for part in item.content])
