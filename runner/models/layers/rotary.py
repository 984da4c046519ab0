"""Rotary position embeddings: default, linear, dynamic NTK, YaRN and Llama 3, as transformers defines them.

The reference for every formula is ``transformers/modeling_rope_utils.py``; YaRN: arXiv 2309.00071.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model.rope import RopeConfig
from runner.batch import RotaryCosSin


class RotaryEmbedding:
    """cos and sin of a step's positions, in float32."""

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        max_positions: int,
        device: torch.device,
        sections: tuple[int, int, int] | None = None,
    ) -> None:
        """``sections``: rotated pairs that take time, height and width of images; None: no image has positions here."""
        self._rope = rope
        rotated = rope.rotary_dim or head_dim
        self._unrotated = (head_dim - rotated) // 2  # pairs
        self._exponents = torch.arange(0, rotated, 2, dtype=torch.float32, device=device) / rotated
        inv_freq, self._attention_factor = inverse_frequencies(rope, rotated)
        self.depends_on_length = rope.rope_type == "dynamic"
        positions = torch.arange(0 if self.depends_on_length else max_positions, device=device)
        # [max_positions, head_dim]: cos, then sin
        self._table = torch.cat(self._cos_sin(positions, inv_freq.to(device)), dim=1)
        self._query_scales = _query_scales(rope, positions) if rope.query_beta else None  # [max_positions]
        self._axes = None if sections is None else _axes(sections, head_dim // 2).repeat(2).to(device)

    def __call__(self, positions: Tensor, lengths: Tensor | None) -> RotaryCosSin:
        """Return cos and sin of positions [tokens] int64 or int32, or [3 (time, height, width), tokens] int64.

        Only dynamic NTK uses ``lengths`` [tokens] int64: the sequence's length when the token is first computed, that
        is the prompt's length within a prompt and position + 1 after it. transformers does the same for one sequence:
        it never rotates cached keys again.
        """
        if self.depends_on_length:
            assert lengths is not None, "dynamic rope needs lengths"
            return RotaryCosSin(*self._cos_sin(positions, self._dynamic(lengths)))
        if positions.dim() == 2:
            assert self._axes is not None, "positions by axis need sections"
            cos, sin = self._table.gather(0, positions[self._axes].t()).chunk(2, dim=1)
        else:
            cos, sin = self._table.index_select(0, positions).chunk(2, dim=1)
        if self._query_scales is None:
            return RotaryCosSin(cos, sin)
        return RotaryCosSin(cos, sin, self._query_scales.index_select(0, positions)[:, None, None])

    def _cos_sin(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        """Return both [tokens, head_dim / 2], from inverse frequencies of rotated pairs that broadcast against them."""
        angles = positions[:, None].float() * inv_freq
        cos = angles.cos() * self._attention_factor
        sin = angles.sin() * self._attention_factor
        if self._unrotated:  # by an angle of 0
            return F.pad(cos, (0, self._unrotated), value=1.0), F.pad(sin, (0, self._unrotated))
        return cos, sin

    def _dynamic(self, lengths: Tensor) -> Tensor:
        """Return inverse frequencies [tokens, rotated / 2]: theta grows with the length beyond the trained one."""
        trained = self._rope.params["original_max_position_embeddings"]
        factor = self._rope.params["factor"]
        dim = 2 * self._exponents.shape[0]
        stretch = factor * lengths.clamp(min=trained).float() / trained - (factor - 1)
        theta = self._rope.theta * stretch ** (dim / (dim - 2))
        inv_freq: Tensor = 1.0 / theta[:, None] ** self._exponents
        return inv_freq


def scale_queries(queries: Tensor, rotary: RotaryCosSin) -> Tensor:
    """Multiply queries [tokens, num_heads, head_dim] in place by the scales of their positions, if there are any."""
    return queries if rotary.query_scale is None else queries.mul_(rotary.query_scale)


def _query_scales(rope: RopeConfig, positions: Tensor) -> Tensor:
    """Return the scale of queries at ``positions`` [tokens], float32, as in the library's models/ministral3."""
    periods = torch.floor(positions / rope.params["original_max_position_embeddings"])
    return 1 + rope.query_beta * torch.log(1 + periods)


def _axes(sections: tuple[int, int, int], pairs: int) -> Tensor:
    """Return the axis whose position rotates each of a head's pairs: [pairs] int64; 0 time, 1 height, 2 width.

    They take turns, and the longest runs on: pairs that are not rotated take time, too.
    """
    axes = torch.zeros(pairs, dtype=torch.int64)
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = axis
    return axes


def rotary_order(rope: RopeConfig, head_dim: int) -> Tensor | None:
    """Return the order in which a head's values [head_dim] stand in memory, if only the first of them are rotated.

    Value i is rotated with value i + rotary_dim / 2. In this order it is rotated with the value at i + head_dim / 2, as
    in models that rotate whole heads; the values that are not rotated form pairs of angle 0. Scores of attention stay
    equal, because queries and keys have the same order. None: the order of the checkpoint.
    """
    if not rope.rotary_dim:
        return None
    rotated = torch.arange(rope.rotary_dim).chunk(2)
    others = torch.arange(rope.rotary_dim, head_dim).chunk(2)
    return torch.cat((rotated[0], others[0], rotated[1], others[1]))


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[Tensor, float]:
    """Return inverse frequencies [head_dim / 2] float32 and the factor of cos and sin."""
    frequencies = rope.theta ** (torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim)
    inv_freq = 1.0 / frequencies
    if rope.rope_type == "none":  # all angles are 0
        return torch.zeros_like(inv_freq), 1.0
    if rope.rope_type == "proportional":  # the first pairs rotate, the others have an angle of 0
        pairs = torch.arange(head_dim // 2)
        rotates = pairs < int(rope.params["partial_rotary_factor"] * head_dim // 2)
        return torch.where(rotates, inv_freq, 0.0) / rope.params["factor"], 1.0
    if rope.rope_type == "linear":
        return inv_freq / rope.params["factor"], 1.0
    if rope.rope_type == "yarn":
        return _yarn(rope.theta, frequencies, rope.params), _yarn_attention_factor(rope.params)
    if rope.rope_type == "llama3":
        return _llama3(inv_freq, rope.params), 1.0
    assert rope.rope_type in ("default", "dynamic"), rope.rope_type
    return inv_freq, 1.0


def _yarn(theta: float, frequencies: Tensor, params: Mapping[str, float]) -> Tensor:
    """Interpolate low frequencies by ``factor``, keep high ones, with a linear ramp between (eq. 23 ff.)."""
    dim = 2 * frequencies.shape[0]
    trained = params["original_max_position_embeddings"]

    def dimension_of(rotations: float) -> float:
        """Return the dimension with this number of rotations within the trained length."""
        return dim * math.log(trained / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low = dimension_of(params.get("beta_fast") or 32)
    high = dimension_of(params.get("beta_slow") or 1)
    if params.get("truncate", True):
        low = math.floor(low)
        high = math.ceil(high)
    low = max(low, 0)
    high = min(high, dim - 1)
    if low == high:
        high += 0.001  # a ramp of no width would divide by zero
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    kept = 1 - ramp
    return (1.0 / (params["factor"] * frequencies)) * (1 - kept) + (1.0 / frequencies) * kept


def _yarn_attention_factor(params: Mapping[str, float]) -> float:
    if "attention_factor" in params:
        return params["attention_factor"]

    def scale(mscale: float) -> float:
        return 1.0 if params["factor"] <= 1 else 0.1 * mscale * math.log(params["factor"]) + 1.0

    if params.get("mscale") and params.get("mscale_all_dim"):
        return scale(params["mscale"]) / scale(params["mscale_all_dim"])
    return scale(1.0)


def _llama3(inv_freq: Tensor, params: Mapping[str, float]) -> Tensor:
    """Stretch long wavelengths by ``factor``, keep short ones, blend those between."""
    factor = params["factor"]
    low = params["low_freq_factor"]
    high = params["high_freq_factor"]
    trained = params["original_max_position_embeddings"]
    wavelengths = 2 * math.pi / inv_freq
    blend = (trained / wavelengths - low) / (high - low)
    blended = (1 - blend) * inv_freq / factor + blend * inv_freq
    stretched = torch.where(wavelengths > trained / low, inv_freq / factor, blended)
    return torch.where(wavelengths < trained / high, inv_freq, stretched)
