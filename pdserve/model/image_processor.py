"""How a model wants its images, by its image processor's file. It imports neither torch nor an image library.

    router  an image of any size and mode ─► RGB ─► smart_size, bicubic ─► uint8 [height, width, 3]
    node    (pixel · rescale_factor - mean) / std ─► patches

transformers computes the same by Qwen2VLImageProcessorPil (models/qwen2_vl/image_processing_pil_qwen2_vl.py), and for
Mistral 3 by PixtralImageProcessorPil (models/pixtral/image_processing_pil_pixtral.py), for Gemma 4 by
Gemma4ImageProcessorPil (models/gemma4/image_processing_pil_gemma4.py).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import Any

import msgspec

from pdserve.checkpoint.files import MAX_TOKENIZER, read_file
from pdserve.errors import CheckpointError, RequestError, shown
from pdserve.images import MAX_GRID, ImageInput
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.towers.gemma4 import AnyGemma4Vision, Gemma4Embedder, Gemma4Vision
from pdserve.model.towers.pixtral import PixtralVision
from pdserve.model.towers.vision_config import CHANNELS, VisionConfig
from pdserve.tokenizer_tokens import TokenizerTokens

FILE = "preprocessor_config.json"
NESTED = "processor_config.json"  # may have these fields below "image_processor" (transformers 5); then they count
MAX_ASPECT = 200  # longer side / shorter side, as in the library

_KINDS = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
_PIXTRAL_KINDS = ("PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil")
_BICUBIC = 3  # Pillow's number
#: Steps that are built in, by their values here.
_STEPS = {
    "do_resize": True,
    "do_rescale": True,
    "do_normalize": True,
    "do_convert_rgb": True,
    "do_center_crop": False,
    "resample": _BICUBIC,
}
_NO_PADDING = {"do_pad": False}  # Pixtral's images are padded to those beside them, and cut again
_SIZE = {"shortest_edge": 56 * 56, "longest_edge": 28 * 28 * 1280}  # the library's, in pixels
_MEAN = (0.48145466, 0.4578275, 0.40821073)  # the library's: OpenAI's CLIP
_STD = (0.26862954, 0.26130258, 0.27577711)
_RESCALE = 1 / 255
_PIXTRAL_SIDE = 1024  # the library's
_MAX_PIXTRAL_SIDE = 1 << 13  # pixels
_TOKENIZER = "tokenizer.json"
_GEMMA4_KINDS = ("Gemma4ImageProcessor", "Gemma4ImageProcessorFast", "Gemma4ImageProcessorPil")
_UNIFIED_KINDS = ("Gemma4UnifiedImageProcessor", "Gemma4UnifiedImageProcessorFast", *_GEMMA4_KINDS)
_GEMMA4_STEPS = {**_STEPS, "do_normalize": False}  # the tower maps values of 0 … 1 to -1 … 1
_GEMMA4_TOKENS = (70, 140, 280, 560, 1120)  # most tokens of an image, as the library allows


class ImageProcessor(msgspec.Struct, frozen=True, kw_only=True):
    patch_size: int  # pixels
    merge_size: int  # patches on a side of a token
    temporal_patch_size: int
    min_pixels: int  # height × width, after resizing
    max_pixels: int
    max_side: int = 0  # pixels, in a fitted size; 0: smart_size is bounded by the number of pixels
    row_end: int = 0  # ids of ImageInput
    image_end: int = 0
    before: int = 0
    behind: int = 0
    fills: bool = False
    rescale_factor: float
    mean: tuple[float, float, float]  # red, green, blue, after rescaling
    std: tuple[float, float, float]

    @property
    def fingerprint(self) -> bytes:
        """SHA-256 of all fields: nodes of equal fingerprints make equal inputs of equal pixels."""
        return sha256(msgspec.json.encode(self, order="sorted")).digest()

    def image_input(self, token_id: int) -> ImageInput:
        """Return what routers and peers need to know."""
        return ImageInput(
            token_id=token_id,
            patch_size=self.patch_size,
            merge_size=self.merge_size,
            min_pixels=self.min_pixels,
            max_pixels=self.max_pixels,
            fingerprint=self.fingerprint,
            max_side=self.max_side,
            row_end=self.row_end,
            image_end=self.image_end,
            before=self.before,
            behind=self.behind,
            fills=self.fills,
        )


def smart_size(bounds: ImageInput, height: int, width: int) -> tuple[int, int]:
    """Return height and width in pixels that an image is resized to: multiples of a token's side, within the bounds.

    Raises RequestError for an image whose sides differ too much.
    """
    if bounds.max_side:
        return _fitted_size(bounds, height, width)
    if bounds.fills:
        return _filling_size(bounds, height, width)
    if max(height, width) > MAX_ASPECT * min(height, width):
        raise RequestError(
            f"the image has {width} × {height} pixels; one side may be at most {MAX_ASPECT} times as long as the other "
            "one. Crop it"
        )
    cell = bounds.cell
    rows = round(height / cell)
    columns = round(width / cell)
    if rows * columns * cell**2 > bounds.max_pixels:
        shrink = math.sqrt((height * width) / bounds.max_pixels)
        rows = max(1, math.floor(height / shrink / cell))
        columns = max(1, math.floor(width / shrink / cell))
    elif rows * columns * cell**2 < bounds.min_pixels:
        stretch = math.sqrt(bounds.min_pixels / (height * width))
        rows = math.ceil(height * stretch / cell)
        columns = math.ceil(width * stretch / cell)
    if rows * columns * cell**2 > bounds.max_pixels:  # one token high or wide; the library takes it
        raise RequestError(
            f"the image has {width} × {height} pixels, which become {columns * cell} × {rows * cell}; the limit is "
            f"{bounds.max_pixels} pixels. Crop it to a shape that is closer to a square"
        )
    return rows * cell, columns * cell


def _fitted_size(bounds: ImageInput, height: int, width: int) -> tuple[int, int]:
    """Return the sides of an image that fits into a square, rounded up to multiples of a token's side."""
    ratio = max(height / bounds.max_side, width / bounds.max_side)
    sides = (height, width) if ratio <= 1 else (math.floor(height / ratio), math.floor(width / ratio))
    if not min(sides):
        raise RequestError(
            f"the image has {width} × {height} pixels; one side may be at most {bounds.max_side} times as long as the "
            "other one. Crop it"
        )
    rows, columns = (math.ceil(side / bounds.cell) for side in sides)
    return rows * bounds.cell, columns * bounds.cell


def _filling_size(bounds: ImageInput, height: int, width: int) -> tuple[int, int]:
    """Return the sides of an image of ``max_pixels``, rounded down to multiples of a token's side."""
    cell = bounds.cell
    factor = math.sqrt(bounds.max_pixels / (height * width))
    rows = math.floor(factor * height / cell)
    columns = math.floor(factor * width / cell)
    most = bounds.max_pixels // cell**2
    if not rows and columns:
        rows = 1
        columns = min(width // height, most)
    elif rows and not columns:
        columns = 1
        rows = min(height // width, most)
    if not 0 < rows * columns <= most:
        raise RequestError(
            f"the image has {width} × {height} pixels, which no size of at most {most} tokens of {cell} × {cell} "
            "pixels has room for. Crop it to a shape that is closer to a square"
        )
    return rows * cell, columns * cell


def token_count(bounds: ImageInput, height: int, width: int) -> int:
    """Return the tokens of an image of any size. Raises RequestError."""
    rows, columns = bounds.grid(*smart_size(bounds, height, width))
    return rows * columns


def read_image_processor(model_dir: Path, vision: VisionConfig) -> ImageProcessor | None:
    """Read the processor's file; None if there is none. Raises CheckpointError for what is not supported."""
    fields = _find_fields(model_dir)
    if fields is None:
        return None
    if isinstance(vision, PixtralVision):
        return _read_pixtral(model_dir, fields, vision)
    if isinstance(vision, Gemma4Vision | Gemma4Embedder):
        return _read_gemma4(fields, vision)
    _check_steps(fields, _KINDS, {**_STEPS, **_NO_PADDING})
    size = fields.part("size")
    shortest = size.integer("shortest_edge", _SIZE["shortest_edge"])
    longest = size.integer("longest_edge", _SIZE["longest_edge"])
    processor = ImageProcessor(
        patch_size=fields.integer("patch_size", 14),
        merge_size=fields.integer("merge_size", 2),
        temporal_patch_size=fields.integer("temporal_patch_size", 2),
        min_pixels=fields.integer("min_pixels", shortest),
        max_pixels=fields.integer("max_pixels", longest),
        rescale_factor=fields.number("rescale_factor", _RESCALE, 1e-6, 1e3),
        mean=_channels(fields, "image_mean", _MEAN, least=-1e3),
        std=_channels(fields, "image_std", _STD, least=1e-6),
    )
    _check(fields, processor, vision)
    return processor


def _read_pixtral(model_dir: Path, fields: ConfigFields, vision: PixtralVision) -> ImageProcessor:
    """Read Pixtral's processor: its sizes are the tower's, and its tokens those of the tokenizer."""
    _check_steps(fields, _PIXTRAL_KINDS, _STEPS)
    whole = ConfigFields(model_dir / NESTED) if (model_dir / NESTED).exists() else fields
    for name, size in (("patch_size", vision.patch_size), ("spatial_merge_size", vision.merge_size)):
        given = whole.given(name)
        if given is not None and given not in (size, {"height": size, "width": size}):
            raise whole.error(
                f"has {name} = {shown(given)}, but the tower in config.json has {size}; the two belong to different "
                "models"
            )
    side = fields.part("size").integer("longest_edge", _PIXTRAL_SIDE)
    cell = vision.patch_size * vision.merge_size
    most = min(_MAX_PIXTRAL_SIDE, (MAX_GRID - 1) * cell)
    if not cell <= side <= most:
        raise fields.error(
            f"asks for sides of at most {side} pixels; it must be a number from {cell} to {most}. {REMEDY}"
        )
    tokens = _read_tokens(model_dir)
    return ImageProcessor(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=cell**2,
        max_pixels=(math.ceil(side / cell) * cell) ** 2,
        max_side=side,
        row_end=_token_id(whole, tokens, "image_break_token", "[IMG_BREAK]"),
        image_end=_token_id(whole, tokens, "image_end_token", "[IMG_END]"),
        rescale_factor=fields.number("rescale_factor", _RESCALE, 1e-6, 1e3),
        mean=_channels(fields, "image_mean", _MEAN, least=-1e3),
        std=_channels(fields, "image_std", _STD, least=1e-6),
    )


def _read_gemma4(fields: ConfigFields, vision: AnyGemma4Vision) -> ImageProcessor:
    """Read Gemma 4's processor: its sizes are the tower's."""
    _check_steps(fields, _UNIFIED_KINDS if isinstance(vision, Gemma4Embedder) else _GEMMA4_KINDS, _GEMMA4_STEPS)
    cell = vision.patch_size * vision.merge_size
    side = fields.integer("patch_size", 16) * fields.integer("pooling_kernel_size", 3)
    if side != cell:
        raise fields.error(
            f"has patches and a pooling kernel of {side} pixels, but the tower in config.json has {cell}; the two "
            "belong to different models"
        )
    tokens = fields.get("max_soft_tokens", 280)
    if tokens not in _GEMMA4_TOKENS:
        raise fields.error(
            f"has max_soft_tokens = {shown(tokens)}; it must be one of {', '.join(map(str, _GEMMA4_TOKENS))}. {REMEDY}"
        )
    if tokens * vision.merge_size > vision.num_positions:
        raise fields.error(
            f"has max_soft_tokens = {tokens}, so an image may be {tokens * vision.merge_size} patches wide; the tower "
            f"has positions for {vision.num_positions}. {REMEDY}"
        )
    mean, std = (0.0, 1.0) if isinstance(vision, Gemma4Embedder) else (0.5, 0.5)
    return ImageProcessor(
        patch_size=vision.patch_size,
        merge_size=vision.merge_size,
        temporal_patch_size=vision.temporal_patch_size,
        min_pixels=cell**2,
        max_pixels=tokens * cell**2,
        before=vision.before,
        behind=vision.behind,
        fills=True,
        rescale_factor=fields.number("rescale_factor", _RESCALE, 1e-6, 1e3),
        mean=(mean, mean, mean),
        std=(std, std, std),
    )


def _check_steps(fields: ConfigFields, kinds: tuple[str, ...], steps: Mapping[str, Any]) -> None:
    """Compare the kind of a processor and its steps with those that are built in."""
    kind = fields.get("image_processor_type")
    if kind is not None:
        fields.choice("image_processor_type", kind, kinds)
    for name, value in steps.items():
        if fields.get(name, value) != value:
            raise fields.error(f"has {name} = {shown(fields.get(name))}; supported is {value}. {REMEDY}")


def _read_tokens(model_dir: Path) -> TokenizerTokens:
    path = model_dir / _TOKENIZER
    try:
        return TokenizerTokens.decode(read_file(path, MAX_TOKENIZER))
    except (CheckpointError, ValueError) as exc:
        raise CheckpointError(
            f"{path}, which has the tokens that end rows of images, cannot be read ({exc}); download it again"
        ) from exc


def _token_id(fields: ConfigFields, tokens: TokenizerTokens, name: str, default: str) -> int:
    text = str(fields.get(name, default))
    token_id = tokens.find(text)
    if not token_id:  # 0 stands for no token
        raise fields.error(f"has {name} = {shown(text)}, which is no token of {_TOKENIZER}. {REMEDY}")
    return token_id


def _find_fields(model_dir: Path) -> ConfigFields | None:
    if (model_dir / NESTED).exists():
        whole = ConfigFields(model_dir / NESTED)
        if whole.given("image_processor") is not None:
            return whole.part("image_processor")
    return ConfigFields(model_dir / FILE) if (model_dir / FILE).exists() else None


def _check(fields: ConfigFields, processor: ImageProcessor, vision: VisionConfig) -> None:
    for name in ("patch_size", "merge_size", "temporal_patch_size"):
        mine = getattr(processor, name)
        towers = getattr(vision, name)
        if mine != towers:
            raise fields.error(
                f"has {name} = {mine}, but the tower in config.json has {towers}; the two belong to different models"
            )
    if processor.min_pixels > processor.max_pixels:
        raise fields.error(
            f"asks for at least {processor.min_pixels} and at most {processor.max_pixels} pixels. {REMEDY}"
        )
    cell = processor.patch_size * processor.merge_size
    most = (MAX_GRID * cell) ** 2 // MAX_ASPECT
    if not cell**2 <= processor.max_pixels <= most:
        raise fields.error(
            f"asks for at most {processor.max_pixels} pixels; it must be a number from {cell**2} to {most}. {REMEDY}"
        )


def _channels(
    fields: ConfigFields, name: str, default: tuple[float, float, float], least: float
) -> tuple[float, float, float]:
    given: Any = fields.get(name, default)
    values = given if isinstance(given, list | tuple) else [given] * CHANNELS
    if len(values) != CHANNELS:
        raise fields.error(f"has {name} = {shown(given)}; it must have {CHANNELS} numbers. {REMEDY}")
    red, green, blue = (float(fields.check_number(name, value, least, 1e3)) for value in values)
    return red, green, blue
