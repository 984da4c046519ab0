"""Decodes an image file and resizes it as a model takes it. Only this file imports Pillow.

    file ─► size from its header ─► pixels, upright by EXIF ─► RGB on white ─► smart_size, bicubic ─► RGB, uint8

The pixels are those of transformers' Qwen2VLImageProcessorPil: it puts transparent images on white, as vLLM and Qwen's
own tools do. Its caller turns photographs upright (``load_image``).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import NamedTuple

from PIL import ExifTags, Image, ImageOps, UnidentifiedImageError, WebPImagePlugin  # the plugin registers WebP

from pdserve.errors import RequestError, cut
from pdserve.images import ImageInput
from pdserve.model.image_processor import smart_size

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
#: In a file. Photographs of 64 megapixels fit. A decoded copy of this size takes 256 MiB, and up to five exist at once.
MAX_FILE_PIXELS = 1 << 26

_PNG_ORIENTATIONS = (b"eXIf", b"Raw profile type", b"XML:com.adobe.xmp")  # chunks and keywords that may tell it
_ON_ITS_SIDE = (5, 6, 7, 8)  # orientations of EXIF whose sides change places
_STRIP_ROWS = 256  # rows that are put on white at once
_WHITE = (255, 255, 255, 255)
_STILL = ("JPEG", "MPO")  # cameras add previews to a JPEG file, which becomes MPO; its first image is the photograph

assert WebPImagePlugin.SUPPORTED, "wheels of Pillow bring WebP"


class Pixels(NamedTuple):
    height: int  # pixels
    width: int
    data: bytes  # uint8 [height, width, 3], RGB


def decode(file: bytes, accepted: ImageInput) -> Pixels:
    """Return an image as the model takes it. Raises RequestError with what is wrong with the file; MemoryError."""
    with _errors_named():
        image = _opened(file, accepted)
        ImageOps.exif_transpose(image, in_place=True)
        rgb = _on_white(image)
        del image
    height, width = smart_size(accepted, rgb.height, rgb.width)
    resized = rgb.resize((width, height), Image.Resampling.BICUBIC)
    return Pixels(height, width, resized.tobytes())


def measure(file: bytes, accepted: ImageInput) -> tuple[int, int]:
    """Return height and width of an image as the model takes it, by its header. The errors are those of ``decode``.

    A file that is damaged behind its header has a size, too.
    """
    with _errors_named():
        image = _opened(file, accepted)
        if image.format == "PNG" and not any(mark in file for mark in _PNG_ORIENTATIONS):
            orientation = 1  # Pillow would decode all pixels to look behind them
        else:
            orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    if orientation in _ON_ITS_SIDE:
        return smart_size(accepted, image.width, image.height)
    return smart_size(accepted, image.height, image.width)


@contextmanager
def _errors_named() -> Iterator[None]:
    """Raise RequestError for what is wrong with a file. MemoryError passes."""
    try:
        yield
    except (RequestError, MemoryError):
        raise
    except UnidentifiedImageError as exc:
        raise RequestError("the file is no complete PNG, JPEG, WebP or GIF image; send one of these") from exc
    except Exception as exc:  # Pillow lets errors of many kinds pass
        reason = cut(" ".join(str(exc).split())) or type(exc).__name__
        raise RequestError(f"the image cannot be decoded: {reason}; send a complete file") from exc


def _opened(file: bytes, accepted: ImageInput) -> Image.Image:
    """Return an image of acceptable size whose pixels are not decoded yet."""
    Image.MAX_IMAGE_PIXELS = None  # checked here, with an error that says what to do
    image = Image.open(BytesIO(file), formats=FORMATS)
    _check(image)
    smart_size(accepted, image.height, image.width)  # the sides may change places
    return image


def _check(image: Image.Image) -> None:
    """Raise RequestError for an image that is too large, or for several."""
    width, height = image.size
    if not 0 < width * height <= MAX_FILE_PIXELS:
        raise RequestError(
            f"the image has {width} × {height} pixels, the limit is {MAX_FILE_PIXELS} in all; send it in a smaller size"
        )
    if getattr(image, "is_animated", False) and image.format not in _STILL:
        raise RequestError("the image is animated; send the frame that the model shall see as an image of its own")


def _on_white(image: Image.Image) -> Image.Image:
    """Return the image in RGB. Transparent pixels show white behind them."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image if image.mode == "RGB" else image.convert("RGB")
    rgb = Image.new("RGB", image.size)
    width, height = image.size
    for top in range(0, height, _STRIP_ROWS):  # each in turn: copies of the whole would take four times the memory
        strip = image.crop((0, top, width, min(top + _STRIP_ROWS, height))).convert("RGBA")
        white = Image.new("RGBA", strip.size, _WHITE)
        rgb.paste(Image.alpha_composite(white, strip).convert("RGB"), (0, top))
    return rgb
