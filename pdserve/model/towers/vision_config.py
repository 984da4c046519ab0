"""The common fields of vision towers, and the checks of their configuration."""

from __future__ import annotations

from typing import ClassVar

import msgspec

from pdserve.errors import shown
from pdserve.model.config_fields import REMEDY, ConfigFields

ACTIVATIONS = ("gelu_pytorch_tanh", "gelu", "silu")
CHANNELS = 3  # red, green, blue
THETA = 10_000.0  # the library's, in towers


class VisionConfig(msgspec.Struct, frozen=True, kw_only=True):
    """A vision transformer, which attends to the patches of one image, and merges merge_size² patches into a token."""

    tensors: ClassVar[tuple[str, ...]]  # first parts of the names of its tensors, behind "model." in newer checkpoints

    depth: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    patch_size: int  # pixels
    merge_size: int  # patches on a side of a token
    temporal_patch_size: int = 1  # frames of a patch; an image is a video whose frames are equal
    out_hidden_size: int  # hidden size of the text model
    deepstack: tuple[int, ...] = ()  # layers of the tower whose merged outputs join those of text layers 0, 1 …
    activation: str  # in the MLPs, one of ACTIVATIONS
    rope_theta: float  # in the tower
    # Rotated pairs of the text model that take time, height and width; None: the position of a token is its index.
    rope_sections: tuple[int, int, int] | None = None
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

    def attention_flops(self, patches: int) -> float:
        """Return the multiplications and additions of a patch in the attention of a layer."""
        return 2 * 4 * self.hidden_size**2 + 4 * patches * self.hidden_size


def check_tower(part: ConfigFields, vision: VisionConfig, channels: str) -> None:
    """Compare the sizes of a tower. ``channels`` is the field with their number. Raises CheckpointError."""
    if part.get(channels, CHANNELS) != CHANNELS:
        raise part.error(f"has {channels} = {shown(part.get(channels))}; supported is {CHANNELS}. {REMEDY}")
    if vision.hidden_size % (4 * vision.num_heads):
        raise part.error(
            f"has hidden_size {vision.hidden_size} and {vision.num_heads} heads; the size of a head must be a multiple "
            f"of 4. {REMEDY}"
        )


def check_image_token(fields: ConfigFields, text: ConfigFields, name: str, token_id: int) -> None:
    """Raise CheckpointError unless the vocabulary has the placeholder."""
    vocab_size = text.integer("vocab_size", token_id + 1)
    if token_id >= vocab_size:
        raise fields.error(f"has {name} = {token_id}, but a vocabulary of {vocab_size} tokens. {REMEDY}")
