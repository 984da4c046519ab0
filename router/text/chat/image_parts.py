"""Images in the contents of chat messages, before it is known whether the model sees.

    part of a request ──► ImagePart ──► {"type": "image"} for the chat template, and the data for the image workers
                              └───────► its placeholder, or an error, where the model reads text only

router/images/chat_images.py does the second step.
"""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.errors import shown

DETAILS = ("auto", "low", "high", "original")  # values of ``detail``, which has no effect
USER_OR_TOOL = "is an image in a message of another role; send it in a message of the user or in the output of a tool"

_SCHEME = "data:"
_BASE64 = ";base64"
_MAX_HEADER = 256  # characters of a data: URL before its data
_MAX_URL = 28 << 20  # characters: the largest file as base64, and some; the data of longer ones is not even copied
_MAX_HTTP_URL = 8192  # characters
_HTTP = ("http", "https")
_AS_DATA = "send the image itself as 'data:image/png;base64,…'"
NOT_FETCHED = f"has an http URL; no image is fetched here: {_AS_DATA}"  # the fault of such a URL by default


class ImagePart(msgspec.Struct):
    """``data`` is base64, or empty where there is a ``url``, or a ``fault``: an error for models that see.

    Its repr has no data. A model without images reads ``instead``; without that, the request is refused. ``lost`` is
    for images of stored responses whose data is not there: all models read ``instead``.
    """

    name: str  # its place in the request, for errors: "messages[2].content[1]"
    data: str = ""
    fault: str = ""  # what is wrong with it: it follows the name in an error
    instead: str = ""
    lost: bool = False
    url: str = ""  # http or https

    def take(self) -> str:
        """Return the data, and forget it: the body of a request outlives the decoding of its images."""
        data = self.data
        self.data = ""
        return data

    def __repr__(self) -> str:
        return f"ImagePart({self.name!r})"


Part = str | ImagePart  # text or image in a content


def image_of_url(url: Any, name: str, detail: Any = None, instead: str = "") -> ImagePart:
    """Read a ``data:`` URL. An http or https URL stays one; everything else is a fault."""
    if detail is not None and detail not in DETAILS:
        return ImagePart(name, fault=f"has detail {shown(detail)}; use one of {', '.join(DETAILS)}", instead=instead)
    if not isinstance(url, str):
        return ImagePart(name, fault=f"has no URL; {_AS_DATA}", instead=instead)
    if url[: len(_SCHEME)].lower() != _SCHEME:
        if url[:_MAX_HEADER].partition(":")[0].lower() not in _HTTP:
            return ImagePart(name, fault=f"has a URL without the scheme data; {_AS_DATA}", instead=instead)
        if len(url) > _MAX_HTTP_URL:
            fault = f"has an http URL of {len(url)} characters; the limit is {_MAX_HTTP_URL}, {_AS_DATA}"
            return ImagePart(name, fault=fault, instead=instead)
        return ImagePart(name, url=url, instead=instead)
    if len(url) > _MAX_URL:
        fault = f"has a URL of {len(url)} characters; the limit is {_MAX_URL}, send a smaller file"
        return ImagePart(name, fault=fault, instead=instead)
    comma = url.find(",", 0, _MAX_HEADER)
    if comma < 0 or not url[:comma].lower().endswith(_BASE64):
        return ImagePart(name, fault=f"has a data: URL without base64; {_AS_DATA}", instead=instead)
    return image_of_base64(url[comma + 1 :], name, instead)


def image_of_base64(data: Any, name: str, instead: str = "") -> ImagePart:
    """Take base64 text. Its length and letters are checked where it is decoded."""
    if not isinstance(data, str) or not data:
        return ImagePart(name, fault="is an image without data; give its bytes as base64", instead=instead)
    return ImagePart(name, data, instead=instead)


def image_of_part(part: dict[str, Any], name: str, instead: str = "", keep: bool = False) -> ImagePart:
    """Read a part of the APIs of OpenAI, of type ``image_url``, ``input_image`` or ``computer_screenshot``.

    Without ``keep`` the URL is taken out of the part, so that its memory is freed with the ImagePart.
    """
    url = part.get("image_url") if keep else part.pop("image_url", None)
    detail = part.get("detail")
    if isinstance(url, dict):
        detail = url.get("detail", detail)
        url = url.get("url")
    if url is None and part.get("file_id") is not None:
        return ImagePart(name, fault=f"names a file; no files are kept here: {_AS_DATA}", instead=instead)
    return image_of_url(url, name, detail, instead)
