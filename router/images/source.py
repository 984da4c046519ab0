"""An image as a request brings it."""

from __future__ import annotations

import msgspec

MAX_FILE_BYTES = 20 << 20  # an encoded image, without base64; OpenAI's limit
MAX_BASE64 = 4 * MAX_FILE_BYTES // 3 + 4  # characters


class ImageSource(msgspec.Struct, frozen=True):
    """An encoded image: PNG, JPEG, WebP or GIF. Its base64 is decoded in a worker process, like the image itself."""

    data: str | bytes  # base64 text as the client sent it, or the file
    name: str  # its place in the request, for errors: "messages[2].content[1].image_url"
    url: str = ""  # http or https, where to fetch the file; without ``data``
