"""Inputs that images add to a decoder, and the null object of a decoder without images.

offsets      position - index of the tokens of a step on the axis of time; at a fixed address, for CUDA graphs
begin, end   rows of images, and offsets that differ by axis, of one eager step
"""

from __future__ import annotations

import torch
from torch import Tensor

from pdserve.model.towers.vision_config import VisionConfig
from runner.batch import LaterTokens
from runner.placement import TensorPlacement


class NoImageInputs:
    """The inputs of a step are its token ids and their indices."""

    @property
    def has_images(self) -> bool:
        """Whether the next step has tokens of images, so that it must not run as a CUDA graph."""
        return False

    @property
    def later(self) -> LaterTokens | None:
        """How many later tokens the next step's tokens see; None: none of them any."""
        return None

    def text_ids(self, token_ids: Tensor, padding: int) -> Tensor:
        """Return the token ids [tokens] of the step, with ``padding`` in place of those of images."""
        return token_ids

    def positions(self, indices: Tensor) -> Tensor:
        """Return the positions to rotate by, of tokens with ``indices`` [tokens]: [tokens], or [3, tokens] by axis."""
        return indices

    def times(self, indices: Tensor) -> Tensor:
        """Return the positions [tokens] of the step's tokens on the axis of time, with ``indices`` [tokens]."""
        return indices

    def times_behind(self, indices: Tensor, last: Tensor) -> Tensor:
        """Return the positions of tokens with ``indices`` [rows] that follow the tokens ``last`` [rows] of the step."""
        return indices

    def embed(self, embedded: Tensor) -> Tensor:
        """Return the embeddings [tokens, hidden_size] with the rows of images in their places; may change them."""
        return embedded

    def after_layer(self, layer: int, residual: Tensor) -> None:
        """Add what images have for the residual [tokens, hidden_size] after ``layer``, counted in the whole model."""


NO_IMAGE_INPUTS = NoImageInputs()


class ImageInputs(NoImageInputs):
    """``offsets`` are 0 for text and padded rows. The writer of the next step's offsets zeroes the others."""

    def __init__(self, config: VisionConfig, max_batch_tokens: int, placement: TensorPlacement, shard: int = 0) -> None:
        """``shard``: the shards of a stage add up their embeddings, so the first one alone has those of images."""
        self.offsets = torch.zeros(max_batch_tokens, dtype=torch.int64, device=placement.device)
        self._embeds = shard == 0
        no_rows = torch.empty(0, dtype=torch.int64, device=placement.device)
        no_values = torch.empty(0, config.out_hidden_size, dtype=placement.dtype, device=placement.device)
        self._nothing = no_rows, no_values, no_values.new_empty(len(config.deepstack), *no_values.shape)
        self._axes: Tensor | None = None
        self._later: LaterTokens | None = None
        self._rows, self._values, self._deepstack = self._nothing

    def begin(
        self,
        axes: Tensor | None,
        rows: Tensor,
        values: Tensor,
        deepstack: Tensor,
        later: LaterTokens | None = None,
    ) -> None:
        """Give the next step its images. It must not run as a CUDA graph.

        ``axes``: offsets [3 (time, height, width), tokens] int64 of all tokens of the step, in place of ``offsets``;
        None: these. ``rows`` [k] int64: tokens of the step that are of images, each once. ``values`` [k, hidden_size]:
        their embeddings. ``deepstack`` [deepstack layers, k, hidden_size]. All are on the device.
        """
        self._axes = axes
        self._later = later
        self._rows = rows
        self._values = values
        self._deepstack = deepstack

    def begin_positions(self, axes: Tensor | None, later: LaterTokens | None = None) -> None:
        """Give the next step the offsets of its images, on a stage without embeddings; see ``begin``."""
        self.begin(axes, *self._nothing, later)

    def end(self) -> None:
        """Forget what ``begin`` gave; ``offsets`` stay."""
        self._axes = None
        self._later = None
        self._rows, self._values, self._deepstack = self._nothing

    @property
    def has_images(self) -> bool:
        return self._axes is not None or self._later is not None or len(self._rows) > 0

    @property
    def later(self) -> LaterTokens | None:
        return self._later

    def text_ids(self, token_ids: Tensor, padding: int) -> Tensor:
        return token_ids.index_fill(0, self._rows, padding) if len(self._rows) else token_ids

    def positions(self, indices: Tensor) -> Tensor:
        return indices + (self.offsets[: len(indices)] if self._axes is None else self._axes)

    def times(self, indices: Tensor) -> Tensor:
        return indices + self.offsets[: len(indices)]

    def times_behind(self, indices: Tensor, last: Tensor) -> Tensor:
        # A row of padding has any last token.
        return (indices + self.offsets.index_select(0, last)).clamp_min_(0)

    def embed(self, embedded: Tensor) -> Tensor:
        if not len(self._rows):
            return embedded
        if not self._embeds:
            return embedded.index_fill_(0, self._rows, 0.0)
        return embedded.index_copy_(0, self._rows, self._values)

    def after_layer(self, layer: int, residual: Tensor) -> None:
        if len(self._rows) and layer < len(self._deepstack):
            residual.index_add_(0, self._rows, self._deepstack[layer])
