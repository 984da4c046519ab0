"""Pixtral with Mistral 3's projector: full attention among the patches of one image.

    patches ─► patch_conv, ln_pre ─► layers ─► norm ─► merging_layer ─► linear_1, linear_2 ─► embeddings

The references in transformers are PixtralVisionModel (models/pixtral/modeling_pixtral.py), and for the projector
Mistral3MultiModalProjector (models/mistral3/modeling_mistral3.py). Modules and parameters have the names that they have
in checkpoints. The order of the patches changes nothing, so those of a token are consecutive, as in other towers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdserve.model.image_processor import ImageProcessor
from pdserve.model.towers.pixtral import PixtralVision
from pdserve.model.towers.vision_config import CHANNELS
from runner.models.vision.attention import PatchAttention, Rotary
from runner.models.vision.patches import patches, value_table
from runner.models.vision.tower import ACTIVATION_FUNCTIONS, patch_places
from runner.placement import TensorPlacement

_EPS = 1e-5  # RMS norms of the tower add it to the mean square


class PixtralTower(nn.Module):
    """``runner/loading/tower_weights.py`` fills the parameters; then images can be encoded."""

    name = ""  # first part of the parameters' names in checkpoints

    def __init__(
        self, config: PixtralVision, processor: ImageProcessor, placement: TensorPlacement, attention: PatchAttention
    ) -> None:
        super().__init__()
        self.config = config
        self._processor = processor
        with torch.device("meta"):
            self.vision_tower = _Encoder(config, attention)
            self.multi_modal_projector = _Projector(config)
        self.to(placement.dtype).to_empty(device=placement.device).requires_grad_(False)
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device=placement.device) / config.head_dim
        self._inv_freq = 1.0 / config.rope_theta**exponents  # [head_dim / 2]: rows and columns take turns
        self._table = value_table(processor).to(placement.device, placement.dtype)

    @torch.inference_mode()
    def begin(self, pixels: Tensor) -> Tensor:
        """Return the inputs of the first layer: [patches, hidden_size]. ``pixels`` as for VisionTower."""
        return self.vision_tower.embed(patches(pixels.to(self._table.device), self._table, self._processor))

    @torch.inference_mode()
    def run(
        self,
        x: Tensor,
        height: int,
        width: int,
        first: int,
        last: int,
        keep: Callable[[int, Tensor], None],
    ) -> Tensor:
        """Run layers ``first`` … ``last`` - 1 on the hidden states ``x``, which stay, of an image of these pixels.

        ``keep`` is VisionTower's; this tower has no deepstack layers.
        """
        rows, columns = patch_places(self.config, height, width, self._table.device)
        angles = torch.cat(
            [rows.places[:, None] * self._inv_freq[0::2], columns.places[:, None] * self._inv_freq[1::2]], dim=1
        )
        rotary = Rotary.of(angles)
        for layer in self.vision_tower.transformer.layers[first:last]:
            x = layer(x, rotary)
        return x

    @torch.inference_mode()
    def end(self, x: Tensor) -> Tensor:
        """Return the embeddings [tokens, out_hidden_size] of the hidden states behind the last layer."""
        embeddings: Tensor = self.multi_modal_projector(x)
        return embeddings


class _Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self._eps = eps
        self.weight = nn.Parameter(torch.empty(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self._eps)
        y: Tensor = self.weight * scaled.to(x.dtype)
        return y


class _Encoder(nn.Module):
    def __init__(self, config: PixtralVision, attention: PatchAttention) -> None:
        super().__init__()
        size = config.patch_size
        self.patch_conv = nn.Conv2d(CHANNELS, config.hidden_size, size, stride=size, bias=False)
        self.ln_pre = _Norm(config.hidden_size, _EPS)
        self.transformer = _Transformer(config, attention)

    def embed(self, values: Tensor) -> Tensor:
        """Return the inputs of the first layer."""
        x: Tensor = self.ln_pre(F.linear(values, self.patch_conv.weight.flatten(1)))
        return x


class _Transformer(nn.Module):
    def __init__(self, config: PixtralVision, attention: PatchAttention) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config, attention) for _ in range(config.depth))


class _Layer(nn.Module):
    def __init__(self, config: PixtralVision, attention: PatchAttention) -> None:
        super().__init__()
        self.attention_norm = _Norm(config.hidden_size, _EPS)
        self.attention = _Attention(config, attention)
        self.ffn_norm = _Norm(config.hidden_size, _EPS)
        self.feed_forward = _MLP(config)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotary)
        y: Tensor = x + self.feed_forward(self.ffn_norm(x))
        return y


class _Attention(nn.Module):
    def __init__(self, config: PixtralVision, attention: PatchAttention) -> None:
        super().__init__()
        self._attention = attention
        size = config.hidden_size
        self._num_heads = config.num_heads
        self.q_proj = nn.Linear(size, size, bias=False)
        self.k_proj = nn.Linear(size, size, bias=False)
        self.v_proj = nn.Linear(size, size, bias=False)
        self.o_proj = nn.Linear(size, size, bias=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Let all patches [patches, hidden_size] attend to each other."""
        q, k, v = (proj(x).view(len(x), self._num_heads, -1) for proj in (self.q_proj, self.k_proj, self.v_proj))
        y: Tensor = self.o_proj(self._attention(q, k, v, rotary))
        return y


class _MLP(nn.Module):
    def __init__(self, config: PixtralVision) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)
        self._activation = ACTIVATION_FUNCTIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return y


class _Projector(nn.Module):
    """The patches of a token to one row of the text model's width."""

    def __init__(self, config: PixtralVision) -> None:
        super().__init__()
        self._patches = config.merge_size**2
        self._activation = ACTIVATION_FUNCTIONS[config.projector_activation]
        bias = config.has_projector_bias
        self.norm = _Norm(config.hidden_size, config.norm_eps)
        self.patch_merger = _PatchMerger(config)
        self.linear_1 = nn.Linear(config.hidden_size, config.out_hidden_size, bias=bias)
        self.linear_2 = nn.Linear(config.out_hidden_size, config.out_hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        merged = normed.view(-1, self._patches, normed.shape[-1]).transpose(1, 2).flatten(1)  # by value, then patch
        y: Tensor = self.linear_2(self._activation(self.linear_1(self.patch_merger.merging_layer(merged))))
        return y


class _PatchMerger(nn.Module):
    def __init__(self, config: PixtralVision) -> None:
        super().__init__()
        self.merging_layer = nn.Linear(config.merged_size, config.hidden_size, bias=False)
