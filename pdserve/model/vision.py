"""The vision tower of a multimodal checkpoint as config.json describes it: Qwen3-VL, and Qwen3.5 with its successors.

    config.json   {"model_type": "qwen3_vl", "image_token_id": …, "text_config": {…}, "vision_config": {"depth": 27, …}}

transformers reads them in models/qwen3_vl and models/qwen3_5.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from math import isqrt
from typing import Any, NamedTuple

import msgspec

from pdserve.errors import shown
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.from_transformers.library_configs import library_defaults
from pdserve.model.text_part import text_kind

ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")
CHANNELS = 3  # red, green, blue


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A vision transformer, which attends to the patches of one image, and merges merge_size² patches into a token."""

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int  # pixels
    merge_size: int  # patches on a side of a token
    temporal_patch_size: int  # frames of a patch; an image is a video whose frames are equal
    num_positions: int  # learned positions, a square
    out_hidden_size: int  # hidden size of the text model
    deepstack: tuple[int, ...]  # layers of the tower whose merged outputs join those of text layers 0, 1 …
    activation: str  # in the MLPs, one of ACTIVATIONS
    rope_theta: float  # in the tower
    rope_sections: tuple[int, int, int]  # rotated pairs of the text model that take time, height and width
    image_token_id: int

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def patch_values(self) -> int:
        """Values of a patch: channels, frames, height, width."""
        return CHANNELS * self.temporal_patch_size * self.patch_size**2

    @property
    def merged_size(self) -> int:
        """Values of the patches that become a token."""
        return self.hidden_size * self.merge_size**2

    @property
    def num_weights(self) -> int:
        hidden = self.hidden_size
        attention = 4 * hidden * hidden + 4 * hidden
        mlp = 2 * hidden * self.intermediate_size + hidden + self.intermediate_size
        merger = self.merged_size**2 + self.merged_size + self.merged_size * self.out_hidden_size + self.out_hidden_size
        mergers = (1 + len(self.deepstack)) * merger + 2 * hidden + len(self.deepstack) * 2 * self.merged_size
        inputs = self.patch_values * hidden + hidden + self.num_positions * hidden
        return inputs + self.depth * (attention + mlp + 4 * hidden) + mergers

    def token_flops(self, patches: int) -> float:
        """Return the multiplications and additions that a token takes in an image of ``patches``.

        Each weight takes two per row that it is applied to. Attention takes four per pair of patches and value.
        """
        hidden = self.hidden_size
        layer = 2 * (4 * hidden * hidden + 2 * hidden * self.intermediate_size) + 4 * patches * hidden
        patch = self.depth * layer + 2 * self.patch_values * hidden
        merger = 2 * self.merged_size * (self.merged_size + self.out_hidden_size)
        return self.merge_size**2 * patch + (1 + len(self.deepstack)) * merger


class _Kind(NamedTuple):
    """Defaults of transformers' config classes for fields that config.json leaves out."""

    deepstack: tuple[int, ...] | None  # None: the tower has none, whatever the file says
    rope_sections: tuple[int, int, int]
    image_token_id: int


_KINDS: Mapping[str, _Kind] = {
    "qwen3_vl": _Kind((8, 16, 24), (24, 20, 20), 151655),
    "qwen3_vl_moe": _Kind((8, 16, 24), (24, 20, 20), 151655),
    "qwen3_5": _Kind(None, (11, 11, 10), 248056),
    "qwen3_5_moe": _Kind(None, (11, 11, 10), 248056),
}
_THETA = 10_000.0
_MOST_SECTIONS = 4096


def read_vision(fields: ConfigFields) -> VisionConfig | None:
    """Read the tower of a whole multimodal config; None if its kind has no native one.

    Raises CheckpointError for a tower that cannot be used; the text model can be served nevertheless.
    """
    kind = _KINDS.get(str(fields.get("model_type")))
    if kind is None or not isinstance(fields.get("vision_config"), dict) or not fields.get("text_config"):
        return None
    part = fields.part("vision_config")
    text = fields.part("text_config")
    text.defaults = library_defaults(text_kind(fields.values))
    vision = VisionConfig(
        depth=part.integer("depth", 27),
        hidden_size=part.integer("hidden_size", 1152),
        intermediate_size=part.integer("intermediate_size", 4304),
        num_heads=part.integer("num_heads", 16),
        patch_size=part.integer("patch_size", 16),
        merge_size=part.integer("spatial_merge_size", 2),
        temporal_patch_size=part.integer("temporal_patch_size", 2),
        num_positions=part.integer("num_position_embeddings", 2304),
        out_hidden_size=part.integer("out_hidden_size", 3584),
        deepstack=() if kind.deepstack is None else _layers(part, kind.deepstack),
        activation=part.choice("hidden_act", part.get("hidden_act", ACTIVATIONS[0]), ACTIVATIONS),
        rope_theta=part.part("rope_parameters").number("rope_theta", _THETA, 2, 1e15),
        rope_sections=_sections(text, kind.rope_sections),
        image_token_id=fields.integer("image_token_id", kind.image_token_id, least=0),
    )
    _check(part, text, vision)
    vocab_size = text.integer("vocab_size", vision.image_token_id + 1)
    if vision.image_token_id >= vocab_size:
        raise fields.error(
            f"has image_token_id = {vision.image_token_id}, but a vocabulary of {vocab_size} tokens. {REMEDY}"
        )
    return vision


def _check(part: ConfigFields, text: ConfigFields, vision: VisionConfig) -> None:
    if part.get("in_channels", CHANNELS) != CHANNELS:
        raise part.error(f"has in_channels = {shown(part.get('in_channels'))}; supported is {CHANNELS}. {REMEDY}")
    if vision.hidden_size % (4 * vision.num_heads):
        raise part.error(
            f"has hidden_size {vision.hidden_size} and {vision.num_heads} heads; the size of a head must be a multiple "
            f"of 4. {REMEDY}"
        )
    if isqrt(vision.num_positions) ** 2 != vision.num_positions:
        raise part.error(
            f"has num_position_embeddings = {vision.num_positions}; it must be the square of a whole number. {REMEDY}"
        )
    width = text.integer("hidden_size", vision.out_hidden_size)
    if vision.out_hidden_size != width:
        raise part.error(f"has out_hidden_size = {vision.out_hidden_size}, but text_config has {width}. {REMEDY}")
    num_layers = text.integer("num_hidden_layers", len(vision.deepstack) + 1)
    if len(vision.deepstack) >= num_layers:
        raise part.error(
            f"has {len(vision.deepstack)} deepstack_visual_indexes; the text model has {num_layers} layers, and needs "
            f"one more than these. {REMEDY}"
        )
    if any(layer >= vision.depth for layer in vision.deepstack):
        raise part.error(f"has deepstack_visual_indexes {vision.deepstack}; the depth is {vision.depth}. {REMEDY}")


def _layers(part: ConfigFields, default: tuple[int, ...]) -> tuple[int, ...]:
    given = part.get("deepstack_visual_indexes", default)
    layers = _whole_numbers(given)
    if layers is None or any(after <= before for before, after in pairwise(layers)):
        raise part.error(
            f"has deepstack_visual_indexes = {shown(given)}; it must be a list of layers in ascending order. {REMEDY}"
        )
    return layers


def _sections(text: ConfigFields, default: tuple[int, int, int]) -> tuple[int, int, int]:
    """Return how many rotated pairs take time, height and width; as in transformers, they always take turns."""
    name = "rope_scaling" if text.given("rope_scaling") else "rope_parameters"
    rope = text.part(name)
    given = rope.get("mrope_section", default)
    sections = _whole_numbers(given)
    if sections is None or len(sections) != 3 or max(sections) > _MOST_SECTIONS:
        limits = f"it must be a list of three whole numbers up to {_MOST_SECTIONS}"
        raise rope.error(f"has mrope_section = {shown(given)}; {limits}. {REMEDY}")
    return sections[0], sections[1], sections[2]


def _whole_numbers(given: Any) -> tuple[int, ...] | None:
    if not isinstance(given, list | tuple) or len(given) > _MOST_SECTIONS:
        return None
    return tuple(given) if all(type(value) is int and value >= 0 for value in given) else None
