"""The vision part of Gemma 4: a tower whose outputs are averages of patches, or in the 12B one layer without attention.

    config.json   {"model_type": "gemma4", "image_token_id": …, "boi_token_id": …, "eoi_token_id": …,
                   "vision_config": {"model_type": "gemma4_vision", …}, "text_config": {…}}
                  {"model_type": "gemma4_unified", …, "vision_config": {"model_type": "gemma4_unified_vision", …}}

transformers reads them in models/gemma4 and models/gemma4_unified.
"""

from __future__ import annotations

from typing import ClassVar

from pdserve.errors import shown
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.towers.vision_config import ACTIVATIONS, VisionConfig, check_image_token, check_tower

GEMMA4 = "gemma4"  # model_type of the whole
UNIFIED = "gemma4_unified"

_IMAGE_TOKEN = 258_880  # the library's, as those below
_BEFORE = 255_999
_BEHIND = 258_882
_THETA = 100.0


class Gemma4Vision(VisionConfig, frozen=True, kw_only=True, tag="gemma4"):
    """Norms before and behind attention and MLP, norms of heads, learned positions per axis and axial rotation."""

    tensors: ClassVar[tuple[str, ...]] = ("vision_tower.", "embed_vision.")

    before: int  # tokens of text around each image
    behind: int
    norm_eps: float
    num_positions: int  # learned ones of each axis
    clips: bool  # linear layers clip their inputs and outputs to stored limits
    standardizes: bool  # outputs are shifted and scaled by stored values

    @property
    def num_weights(self) -> int:
        hidden = self.hidden_size
        layer = 4 * hidden * hidden + 3 * hidden * self.intermediate_size + 4 * hidden + 2 * self.head_dim
        layer += 7 * 4 * self.clips
        inputs = self.patch_values * hidden + 2 * self.num_positions * hidden
        return inputs + self.depth * layer + 2 * hidden * self.standardizes + hidden * self.out_hidden_size

    def token_flops(self, patches: int) -> float:
        """Return the multiplications and additions that a token takes in an image of ``patches``."""
        hidden = self.hidden_size
        layer = self.attention_flops(patches) + 2 * 3 * hidden * self.intermediate_size
        patch = self.depth * layer + 2 * self.patch_values * hidden
        return self.merge_size**2 * patch + 2 * hidden * self.out_hidden_size


class Gemma4Embedder(VisionConfig, frozen=True, kw_only=True, tag="gemma4_unified"):
    """The 12B's: a product of each token's pixels between norms, with learned positions per axis. Its depth is 1.

    A patch is a token, so ``merge_size`` is 1 and ``patch_size`` its side.
    """

    tensors: ClassVar[tuple[str, ...]] = ("vision_embedder.", "embed_vision.")

    before: int
    behind: int
    norm_eps: float  # the last norm's
    num_positions: int

    @property
    def num_weights(self) -> int:
        hidden = self.hidden_size
        norms = 2 * self.patch_values + 4 * hidden
        dense = self.patch_values * hidden + hidden
        return norms + dense + 2 * self.num_positions * hidden + hidden * self.out_hidden_size

    def token_flops(self, patches: int) -> float:
        """Return the multiplications and additions of a token, however many ``patches`` its image has."""
        return 2 * self.hidden_size * (self.patch_values + self.out_hidden_size)


AnyGemma4Vision = Gemma4Vision | Gemma4Embedder


def read_gemma4(fields: ConfigFields, text: ConfigFields) -> AnyGemma4Vision:
    """Read the vision part of a whole config, of which ``text`` is the text model's part. Raises CheckpointError."""
    part = fields.part("vision_config")
    is_unified = fields.get("model_type") == UNIFIED
    vision = _read_embedder(fields, part, text) if is_unified else _read_tower(fields, part, text)
    check_image_token(fields, text, "image_token_id", vision.image_token_id)
    check_image_token(fields, text, "boi_token_id", vision.before)
    check_image_token(fields, text, "eoi_token_id", vision.behind)
    return vision


def _read_tower(fields: ConfigFields, part: ConfigFields, text: ConfigFields) -> Gemma4Vision:
    part.choice("model_type", part.get("model_type", "gemma4_vision"), ("gemma4_vision",))
    vision = Gemma4Vision(
        depth=part.integer("num_hidden_layers", 16),
        hidden_size=part.integer("hidden_size", 768),
        intermediate_size=part.integer("intermediate_size", 3072),
        num_heads=part.integer("num_attention_heads", 12),
        patch_size=part.integer("patch_size", 16),
        merge_size=part.integer("pooling_kernel_size", 3),
        out_hidden_size=text.integer("hidden_size"),
        activation=part.choice("hidden_activation", part.get("hidden_activation", ACTIVATIONS[0]), ACTIVATIONS),
        rope_theta=_theta(part),
        image_token_id=fields.integer("image_token_id", _IMAGE_TOKEN, least=0),
        before=fields.integer("boi_token_id", _BEFORE),
        behind=fields.integer("eoi_token_id", _BEHIND),
        norm_eps=part.number("rms_norm_eps", 1e-6, 1e-20, 1.0),
        num_positions=part.integer("position_embedding_size", 10 * 1024),
        clips=part.flag("use_clipped_linears"),
        standardizes=part.flag("standardize"),
    )
    check_tower(part, vision, "num_channels")
    for name, size in (("head_dim", vision.head_dim), ("num_key_value_heads", vision.num_heads)):
        given = part.get(name, 64 if name == "head_dim" else 12)
        if given != size:
            raise part.error(
                f"has {name} = {shown(given)}; hidden_size {vision.hidden_size} and {vision.num_heads} heads make "
                f"{size}. {REMEDY}"
            )
    return vision


def _read_embedder(fields: ConfigFields, part: ConfigFields, text: ConfigFields) -> Gemma4Embedder:
    kind = f"{UNIFIED}_vision"
    part.choice("model_type", part.get("model_type", kind), (kind,))
    width = part.integer("mm_embed_dim", 3840)
    given = part.get("output_proj_dims", 3840)
    if given != width:
        raise part.error(f"has output_proj_dims = {shown(given)}, but mm_embed_dim is {width}. {REMEDY}")
    return Gemma4Embedder(
        depth=1,
        hidden_size=width,
        intermediate_size=0,
        num_heads=1,
        patch_size=part.integer("patch_size", 16) * part.integer("pooling_kernel_size", 3),
        merge_size=1,
        out_hidden_size=text.integer("hidden_size"),
        activation="",
        rope_theta=0.0,
        image_token_id=fields.integer("image_token_id", _IMAGE_TOKEN, least=0),
        before=fields.integer("boi_token_id", _BEFORE),
        behind=fields.integer("eoi_token_id", _BEHIND),
        norm_eps=part.number("rms_norm_eps", 1e-6, 1e-20, 1.0),
        num_positions=part.integer("mm_posemb_size", 1120),
    )


def _theta(part: ConfigFields) -> float:
    rope = part.part("rope_parameters")
    rope.choice("rope_type", rope.get("rope_type", "axial"), ("axial", "default"))
    return rope.number("rope_theta", _THETA, 2, 1e15)
