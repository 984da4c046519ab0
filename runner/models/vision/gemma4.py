"""The vision tower of Gemma 4: full attention among the patches of one image, whose averages become tokens.

    patches ─► input_proj + positions ─► layers ─► average of a token's patches ─► norm, projection ─► embeddings

The reference is Gemma4VisionModel of transformers with Gemma4MultimodalEmbedder (models/gemma4/modeling_gemma4.py).
Modules and parameters have the names that they have in checkpoints. The order of the patches changes nothing, so those
of a token are consecutive, as in other towers.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pdserve.model.image_processor import ImageProcessor
from pdserve.model.towers.gemma4 import Gemma4Vision
from pdserve.model.towers.vision_config import CHANNELS
from runner.models.vision.attention import PatchAttention, Rotary
from runner.models.vision.patches import patches, value_table
from runner.models.vision.tower import ACTIVATION_FUNCTIONS, patch_places
from runner.placement import TensorPlacement

_LIMITS = ("input_min", "input_max", "output_min", "output_max")


class Gemma4Tower(nn.Module):
    """``runner/loading/tower_weights.py`` fills the parameters; then images can be encoded."""

    name = ""  # first part of the parameters' names in checkpoints

    def __init__(
        self, config: Gemma4Vision, processor: ImageProcessor, placement: TensorPlacement, attention: PatchAttention
    ) -> None:
        super().__init__()
        self.config = config
        self._processor = processor
        with torch.device("meta"):
            self.vision_tower = _Encoder(config, attention)
            self.embed_vision = Projection(config.hidden_size, config.out_hidden_size, config.norm_eps)
        self.to(placement.dtype).to_empty(device=placement.device).requires_grad_(False)
        half = config.head_dim // 2  # half of a head for columns, half for rows
        exponents = torch.arange(0, half, 2, dtype=torch.float32, device=placement.device) / half
        self._inv_freq = 1.0 / config.rope_theta**exponents  # [head_dim / 4]
        self._table = value_table(processor).to(placement.device, placement.dtype)

    @torch.inference_mode()
    def begin(self, pixels: Tensor) -> Tensor:
        """Return the inputs of the first layer: [patches, hidden_size]. ``pixels`` as for VisionTower."""
        inputs = patches(pixels.to(self._table.device), self._table, self._processor)
        rows, columns = patch_places(self.config, pixels.shape[0], pixels.shape[1], self._table.device)
        x: Tensor = self.vision_tower.patch_embedder(inputs, rows.places, columns.places)
        return x

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
        angles = [axis.places[:, None].float() * self._inv_freq for axis in (columns, rows)]
        rotary = Rotary.of(torch.cat(angles, dim=1))
        for layer in self.vision_tower.encoder.layers[first:last]:
            x = layer(x, rotary)
        return x

    @torch.inference_mode()
    def end(self, x: Tensor) -> Tensor:
        """Return the embeddings [tokens, out_hidden_size] of the hidden states behind the last layer."""
        embeddings: Tensor = self.embed_vision(self.vision_tower.pooled(x))
        return embeddings


class Norm(nn.Module):
    """An RMS norm in float32; ``factor`` multiplies its results before they are rounded."""

    def __init__(self, size: int, eps: float, has_weight: bool = True, factor: float = 1.0) -> None:
        super().__init__()
        self._eps = eps
        self._factor = factor
        self.weight = nn.Parameter(torch.empty(size)) if has_weight else None

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.pow(wide.square().mean(-1, keepdim=True) + self._eps, -0.5)
        if self.weight is not None:
            normed = normed * self.weight.float()
        return (normed if self._factor == 1.0 else normed * self._factor).to(x.dtype)


class Projection(nn.Module):
    """Outputs of a tower to rows of the text model's width."""

    def __init__(self, size: int, out_size: int, eps: float) -> None:
        super().__init__()
        self.embedding_projection = nn.Linear(size, out_size, bias=False)
        self._norm = Norm(size, eps, has_weight=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.embedding_projection(self._norm(x))
        return y


class _Linear(nn.Module):
    """A product; with limits its inputs and outputs are clipped."""

    def __init__(self, config: Gemma4Vision, size: int, out_size: int) -> None:
        super().__init__()
        self._clips = config.clips
        self.linear = nn.Linear(size, out_size, bias=False)
        if config.clips:
            for name in _LIMITS:
                self.register_parameter(name, nn.Parameter(torch.empty(())))

    def forward(self, x: Tensor) -> Tensor:
        if not self._clips:
            y: Tensor = self.linear(x)
            return y
        clipped = torch.clamp(x, self.get_parameter("input_min"), self.get_parameter("input_max"))
        return torch.clamp(self.linear(clipped), self.get_parameter("output_min"), self.get_parameter("output_max"))


class _Encoder(nn.Module):
    def __init__(self, config: Gemma4Vision, attention: PatchAttention) -> None:
        super().__init__()
        self._patches = config.merge_size**2
        self._scale = config.hidden_size**0.5
        self.patch_embedder = _PatchEmbedding(config)
        self.encoder = _Layers(config, attention)
        self._standardizes = config.standardizes
        if config.standardizes:
            self.std_bias = nn.Parameter(torch.empty(config.hidden_size))
            self.std_scale = nn.Parameter(torch.empty(config.hidden_size))

    def pooled(self, x: Tensor) -> Tensor:
        """Return the averages [tokens, hidden_size] of the patches of each token."""
        averages = x.float().view(-1, self._patches, x.shape[-1]).mean(1).to(x.dtype)
        scaled: Tensor = averages.float() * self._scale
        if self._standardizes:
            scaled = (scaled - self.std_bias.float()) * self.std_scale.float()
        return scaled.to(x.dtype)


class _PatchEmbedding(nn.Module):
    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        self._side = config.patch_size
        self.input_proj = nn.Linear(config.patch_values, config.hidden_size, bias=False)
        self.position_embedding_table = nn.Parameter(torch.empty(2, config.num_positions, config.hidden_size))

    def forward(self, values: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """Embed patches [patches, 3 · side²] at these rows and columns [patches]."""
        by_pixel = values.view(-1, CHANNELS, self._side**2).transpose(1, 2).flatten(1)
        table = self.position_embedding_table
        embedded: Tensor = self.input_proj(by_pixel)
        positions = F.embedding(columns, table[0]) + F.embedding(rows, table[1])
        x: Tensor = embedded + positions
        return x


class _Layers(nn.Module):
    def __init__(self, config: Gemma4Vision, attention: PatchAttention) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Layer(config, attention) for _ in range(config.depth))


class _Layer(nn.Module):
    def __init__(self, config: Gemma4Vision, attention: PatchAttention) -> None:
        super().__init__()
        size = config.hidden_size
        self.input_layernorm = Norm(size, config.norm_eps)
        self.self_attn = _Attention(config, attention)
        self.post_attention_layernorm = Norm(size, config.norm_eps)
        self.pre_feedforward_layernorm = Norm(size, config.norm_eps)
        self.mlp = _MLP(config)
        self.post_feedforward_layernorm = Norm(size, config.norm_eps)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        x = x + self.post_attention_layernorm(self.self_attn(self.input_layernorm(x), rotary))
        y: Tensor = x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        return y


class _Attention(nn.Module):
    """Scores are not scaled: the norm of queries undoes the usual scale."""

    def __init__(self, config: Gemma4Vision, attention: PatchAttention) -> None:
        super().__init__()
        self._attention = attention
        self._num_heads = config.num_heads
        size = config.hidden_size
        eps = config.norm_eps
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (_Linear(config, size, size) for _ in range(4))
        self.q_norm = Norm(config.head_dim, eps, factor=config.head_dim**0.5)
        self.k_norm = Norm(config.head_dim, eps)
        self._v_norm = Norm(config.head_dim, eps, has_weight=False)

    def forward(self, x: Tensor, rotary: Rotary) -> Tensor:
        """Let all patches [patches, hidden_size] attend to each other."""
        q, k, v = (proj(x).view(len(x), self._num_heads, -1) for proj in (self.q_proj, self.k_proj, self.v_proj))
        q = _halves_together(self.q_norm(q))
        k = _halves_together(self.k_norm(k))
        y: Tensor = self.o_proj(self._attention(q, k, self._v_norm(v), rotary))
        return y


def _halves_together(x: Tensor) -> Tensor:
    """Return heads [patches, heads, head_dim] in the order in which Rotary rotates them.

    Each half of a head is of an axis, and is rotated within itself. Scores do not depend on the order.
    """
    patches, heads, size = x.shape
    return x.view(patches, heads, 2, 2, size // 4).transpose(2, 3).reshape(patches, heads, size)


class _MLP(nn.Module):
    def __init__(self, config: Gemma4Vision) -> None:
        super().__init__()
        self.gate_proj = _Linear(config, config.hidden_size, config.intermediate_size)
        self.up_proj = _Linear(config, config.hidden_size, config.intermediate_size)
        self.down_proj = _Linear(config, config.intermediate_size, config.hidden_size)
        self._activation = ACTIVATION_FUNCTIONS[config.activation]

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(self._activation(self.gate_proj(x)) * self.up_proj(x))
        return y
