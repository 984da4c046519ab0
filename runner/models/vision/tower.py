"""The vision transformer of Qwen3-VL and Qwen3.5: full attention among the patches of one image.

    patches ─► patch_embed + positions ─► blocks ─► merger ─► embeddings, one row per token
                                            └─ after some: deepstack mergers ─► what joins the first text layers
    begin                                 ─► run    ─► end                    in steps of their own, if need be

The reference is Qwen3VLVisionModel of transformers (models/qwen3_vl/modeling_qwen3_vl.py). Modules and parameters have
the names that they have in checkpoints, behind "visual.".
"""

from __future__ import annotations

from collections.abc import Callable
from math import isqrt
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdserve.model.image_processor import ImageProcessor
from pdserve.model.towers.vision_config import CHANNELS, VisionConfig
from pdserve.model.vision import QwenVision
from runner.models.vision.attention import PatchAttention, Rotary
from runner.models.vision.patches import patches, value_table
from runner.placement import TensorPlacement

_EPS = 1e-6  # layer norms add it to the variance


class Features(NamedTuple):
    """The outputs of a tower for the tokens of an image, in the dtype of the tower."""

    embeddings: Tensor  # [tokens, out_hidden_size]
    deepstack: Tensor  # [deepstack layers, tokens, out_hidden_size]


class VisionTower(nn.Module):
    """``runner/loading/tower_weights.py`` fills the parameters; then images can be encoded."""

    name = "visual."  # first part of the parameters' names in checkpoints

    def __init__(
        self, config: QwenVision, processor: ImageProcessor, placement: TensorPlacement, attention: PatchAttention
    ) -> None:
        super().__init__()
        self.config = config
        self._processor = processor
        self._side = isqrt(config.num_positions)
        with torch.device("meta"):
            self.patch_embed = _PatchEmbedding(config)
            self.pos_embed = nn.Embedding(config.num_positions, config.hidden_size)
            self.blocks = nn.ModuleList(_Block(config, attention) for _ in range(config.depth))
            self.merger = _Merger(config, config.hidden_size)
            self.deepstack_merger_list = nn.ModuleList(_Merger(config, config.merged_size) for _ in config.deepstack)
        self.to(placement.dtype).to_empty(device=placement.device).requires_grad_(False)
        half = config.head_dim // 2  # half of a head for rows, half for columns
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=placement.device) / half
        self._inv_freq = 1.0 / config.rope_theta**exponents  # [head_dim / 4]
        self._table = value_table(processor).to(placement.device, placement.dtype)

    @torch.inference_mode()
    def begin(self, pixels: Tensor) -> Tensor:
        """Return the inputs of the first block: [patches, hidden_size].

        ``pixels``: uint8 [height, width, 3] of one image; its sides are multiples of a token's side. No call waits for
        the device, apart from the copy of pixels in the host's pageable memory.
        """
        inputs = patches(pixels.to(self._table.device), self._table, self._processor)
        rows, columns = patch_places(self.config, pixels.shape[0], pixels.shape[1], self._table.device)
        x: Tensor = self.patch_embed(inputs)
        return x + self._positions(rows, columns).to(x.dtype)

    @torch.inference_mode()
    def run(
        self, x: Tensor, height: int, width: int, first: int, last: int, keep: Callable[[int, Tensor], None]
    ) -> Tensor:
        """Run blocks ``first`` … ``last`` - 1 on the hidden states ``x``, which stay, of an image of these pixels.

        ``keep`` takes each deepstack layer with its rows [tokens, out_hidden_size].
        """
        rotary = self._rotary(*patch_places(self.config, height, width, self._table.device))
        for number in range(first, last):
            x = self.blocks[number](x, rotary)
            if number in self.config.deepstack:
                layer = self.config.deepstack.index(number)
                keep(layer, self.deepstack_merger_list[layer](x))
        return x

    @torch.inference_mode()
    def end(self, x: Tensor) -> Tensor:
        """Return the embeddings [tokens, out_hidden_size] of the hidden states behind the last block."""
        embeddings: Tensor = self.merger(x)
        return embeddings

    def _positions(self, rows: Axis, columns: Axis) -> Tensor:
        """Interpolate the learned positions to the grid of an image: [patches, hidden_size] float32."""
        result: Tensor | None = None
        for row, row_weight in rows.taps(self._side):
            for column, column_weight in columns.taps(self._side):
                part = self.pos_embed(row * self._side + column) * (row_weight * column_weight)[:, None]
                result = part if result is None else result.add_(part)
        assert result is not None
        return result

    def _rotary(self, rows: Axis, columns: Axis) -> Rotary:
        angles = torch.cat([axis.places[:, None].float() * self._inv_freq for axis in (rows, columns)], dim=1)
        return Rotary.of(angles)


class Axis(NamedTuple):
    places: Tensor  # [patches] int64: row or column of each patch
    size: int  # rows or columns of the image

    def taps(self, side: int) -> list[tuple[Tensor, Tensor]]:
        """Return two neighbours of each patch in a line of ``side`` positions with their weights; corners align."""
        place = self.places.float() * (side - 1) / max(1, self.size - 1)
        low = place.floor()
        above = place - low
        first = low.long()
        return [(first, 1 - above), ((first + 1).clamp_(max=side - 1), above)]


def patch_places(config: VisionConfig, height: int, width: int, device: torch.device) -> tuple[Axis, Axis]:
    """Return row and column of each patch of an image of so many pixels, in the order of ``patches``."""
    merge = config.merge_size
    rows = height // config.patch_size
    columns = width // config.patch_size
    order = torch.arange(rows * columns, device=device).view(rows, columns)
    order = order.view(rows // merge, merge, columns // merge, merge).transpose(1, 2).flatten()
    return Axis(order // columns, rows), Axis(order % columns, columns)


class _PatchEmbedding(nn.Module):
    """A convolution whose kernels cover a patch each, as a product."""

    def __init__(self, config: QwenVision) -> None:
        super().__init__()
        kernel = (config.temporal_patch_size, config.patch_size, config.patch_size)
        self.proj = nn.Conv3d(CHANNELS, config.hidden_size, kernel, stride=kernel)

    def forward(self, values: Tensor) -> Tensor:
        return F.linear(values, self.proj.weight.flatten(1), self.proj.bias)


class _Block(nn.Module):
    def __init__(self, config: QwenVision, attention: PatchAttention) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.hidden_size, _EPS)
        self.norm2 = nn.LayerNorm(config.hidden_size, _EPS)
        self.attn = _Attention(config, attention)
        self.mlp = _MLP(config)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attn(self.norm1(x), rotary)
        y: Tensor = x + self.mlp(self.norm2(x))
        return y


class _Attention(nn.Module):
    def __init__(self, config: QwenVision, attention: PatchAttention) -> None:
        super().__init__()
        self._attention = attention
        self._num_heads = config.num_heads
        self.qkv = nn.Linear(config.hidden_size, 3 * config.hidden_size)
        self.proj = nn.Linear(config.hidden_size, config.hidden_size)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Let all patches [patches, hidden_size] attend to each other."""
        q, k, v = self.qkv(x).view(len(x), 3, self._num_heads, -1).unbind(1)
        y: Tensor = self.proj(self._attention(q, k, v, rotary))
        return y


class _MLP(nn.Module):
    def __init__(self, config: QwenVision) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(config.hidden_size, config.intermediate_size)
        self.linear_fc2 = nn.Linear(config.intermediate_size, config.hidden_size)
        self._activation = ACTIVATION_FUNCTIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear_fc2(self._activation(self.linear_fc1(x)))
        return y


class _Merger(nn.Module):
    """The patches of a token side by side, to one row of the text model's width."""

    def __init__(self, config: QwenVision, norm_size: int) -> None:
        """``norm_size``: the norm is of each patch (hidden_size), or of all patches of a token (merged_size)."""
        super().__init__()
        self._norm_size = norm_size
        self._merged_size = config.merged_size
        self.norm = nn.LayerNorm(norm_size, _EPS)
        self.linear_fc1 = nn.Linear(config.merged_size, config.merged_size)
        self.linear_fc2 = nn.Linear(config.merged_size, config.out_hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x.view(-1, self._norm_size)).view(-1, self._merged_size)
        y: Tensor = self.linear_fc2(F.gelu(self.linear_fc1(normed)))
        return y


def _gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


ACTIVATION_FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_pytorch_tanh": _gelu_tanh,
    "gelu": F.gelu,
    "silu": F.silu,
}
