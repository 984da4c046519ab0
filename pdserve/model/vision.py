"""The vision tower of a multimodal checkpoint as config.json describes it: Qwen3-VL, and Qwen3.5 with its successors.

Mistral's tower is in towers/pixtral.py, Gemma's in towers/gemma4.py.

    config.json   {"model_type": "qwen3_vl", "image_token_id": …, "text_config": {…}, "vision_config": {"depth": 27, …}}

transformers reads them in models/qwen3_vl and models/qwen3_5.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from itertools import pairwise
from math import isqrt
from typing import Any, ClassVar, NamedTuple

from pdserve.errors import shown
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.from_transformers.library_configs import library_defaults
from pdserve.model.text_part import text_kind
from pdserve.model.towers.gemma4 import GEMMA4, UNIFIED, Gemma4Embedder, Gemma4Vision, read_gemma4
from pdserve.model.towers.pixtral import MISTRAL3, PixtralVision, read_pixtral
from pdserve.model.towers.vision_config import (
    ACTIVATIONS,
    THETA,
    VisionConfig,
    check_image_token,
    check_tower,
)


class QwenVision(VisionConfig, frozen=True, kw_only=True, tag="qwen"):
    """The tower of Qwen3-VL, and of Qwen3.5 with its successors."""

    tensors: ClassVar[tuple[str, ...]] = ("visual.",)

    num_positions: int  # learned positions, a square

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
        layer = self.attention_flops(patches) + 2 * 2 * self.hidden_size * self.intermediate_size
        patch = self.depth * layer + 2 * self.patch_values * self.hidden_size
        merger = 2 * self.merged_size * (self.merged_size + self.out_hidden_size)
        return self.merge_size**2 * patch + (1 + len(self.deepstack)) * merger


AnyVision = QwenVision | PixtralVision | Gemma4Vision | Gemma4Embedder


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
_READERS: Mapping[str, Callable[[ConfigFields, ConfigFields], AnyVision]] = {
    GEMMA4: read_gemma4,
    MISTRAL3: read_pixtral,
    UNIFIED: read_gemma4,
}
_MOST_SECTIONS = 4096


def read_vision(fields: ConfigFields) -> AnyVision | None:
    """Read the tower of a whole multimodal config; None if its kind has no native one.

    Raises CheckpointError for a tower that cannot be used; the text model can be served nevertheless.
    """
    model_type = str(fields.get("model_type"))
    kind = _KINDS.get(model_type)
    read = _READERS.get(model_type)
    if (
        (kind is None and read is None)
        or not isinstance(fields.get("vision_config"), dict)
        or not fields.get("text_config")
    ):
        return None
    text = fields.part("text_config")
    text.defaults = library_defaults(text_kind(fields.values))
    if read is not None:
        return read(fields, text)
    assert kind is not None
    return _read_qwen(fields, text, kind)


def _read_qwen(fields: ConfigFields, text: ConfigFields, kind: _Kind) -> QwenVision:
    part = fields.part("vision_config")
    vision = QwenVision(
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
        rope_theta=part.part("rope_parameters").number("rope_theta", THETA, 2, 1e15),
        rope_sections=_sections(text, kind.rope_sections),
        image_token_id=fields.integer("image_token_id", kind.image_token_id, least=0),
    )
    _check(part, text, vision)
    check_image_token(fields, text, "image_token_id", vision.image_token_id)
    return vision


def _check(part: ConfigFields, text: ConfigFields, vision: QwenVision) -> None:
    check_tower(part, vision, "in_channels")
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
