"""Pixtral, the vision tower of Mistral 3, with its projector to the text model.

    config.json   {"model_type": "mistral3", "image_token_index": 10, "vision_config": {"model_type": "pixtral", …},
                   "spatial_merge_size": 2, "projector_hidden_act": "gelu", "vision_feature_layer": -1, …}

transformers reads it in models/pixtral and models/mistral3.
"""

from __future__ import annotations

from typing import ClassVar

from pdserve.errors import shown
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.towers.vision_config import ACTIVATIONS, THETA, VisionConfig, check_image_token, check_tower

MISTRAL3 = "mistral3"  # model_type of the whole

_IMAGE_TOKEN = 10  # the library's
_ROPES = ("axial", "default")  # names of one kind


class PixtralVision(VisionConfig, frozen=True, kw_only=True, tag="pixtral"):
    """RMS norms, gated MLPs, no biases; positions are two-dimensional rotations alone."""

    tensors: ClassVar[tuple[str, ...]] = ("vision_tower.", "multi_modal_projector.")

    norm_eps: float  # in the projector; it is the text model's
    projector_activation: str  # one of ACTIVATIONS
    has_projector_bias: bool

    @property
    def num_weights(self) -> int:
        hidden = self.hidden_size
        layer = 4 * hidden * hidden + 3 * hidden * self.intermediate_size + 2 * hidden
        biases = 2 * self.out_hidden_size if self.has_projector_bias else 0
        projector = hidden + self.merged_size * hidden + (hidden + self.out_hidden_size) * self.out_hidden_size + biases
        return self.patch_values * hidden + hidden + self.depth * layer + projector

    def token_flops(self, patches: int) -> float:
        """Return the multiplications and additions that a token takes in an image of ``patches``."""
        hidden = self.hidden_size
        layer = self.attention_flops(patches) + 2 * 3 * hidden * self.intermediate_size
        patch = self.depth * layer + 2 * self.patch_values * hidden
        projector = 2 * (self.merged_size * hidden + (hidden + self.out_hidden_size) * self.out_hidden_size)
        return self.merge_size**2 * patch + projector


def read_pixtral(fields: ConfigFields, text: ConfigFields) -> PixtralVision:
    """Read the tower of a whole config, of which ``text`` is the text model's part. Raises CheckpointError."""
    part = fields.part("vision_config")
    part.choice("model_type", part.get("model_type", "pixtral"), ("pixtral",))
    if fields.get("vision_feature_layer", -1) != -1:
        raise fields.error(
            f"has vision_feature_layer = {shown(fields.get('vision_feature_layer'))}; supported is -1, the last layer. "
            f"{REMEDY}"
        )
    name = "image_token_id" if fields.given("image_token_id") is not None else "image_token_index"
    vision = PixtralVision(
        depth=part.integer("num_hidden_layers", 24),
        hidden_size=part.integer("hidden_size", 1024),
        intermediate_size=part.integer("intermediate_size", 4096),
        num_heads=part.integer("num_attention_heads", 16),
        patch_size=part.integer("patch_size", 16),
        merge_size=fields.integer("spatial_merge_size", 2),
        out_hidden_size=text.integer("hidden_size"),
        activation=part.choice("hidden_act", part.get("hidden_act", "gelu"), ACTIVATIONS),
        rope_theta=_theta(part),
        image_token_id=fields.integer(name, _IMAGE_TOKEN, least=0),
        norm_eps=text.number("rms_norm_eps", 1e-6, 1e-20, 1.0),
        projector_activation=fields.choice(
            "projector_hidden_act", fields.get("projector_hidden_act", "gelu"), ACTIVATIONS
        ),
        has_projector_bias=fields.flag("multimodal_projector_bias"),
    )
    check_tower(part, vision, "num_channels")
    if part.get("head_dim", vision.head_dim) != vision.head_dim:
        raise part.error(
            f"has head_dim = {shown(part.get('head_dim'))}; hidden_size {vision.hidden_size} and {vision.num_heads} "
            f"heads make {vision.head_dim}. {REMEDY}"
        )
    check_image_token(fields, text, name, vision.image_token_id)
    return vision


def _theta(part: ConfigFields) -> float:
    rope = part.part("rope_parameters")
    rope.choice("rope_type", rope.get("rope_type", _ROPES[0]), _ROPES)
    return rope.number("rope_theta", part.number("rope_theta", THETA, 2, 1e15), 2, 1e15)
