"""Multi-head latent attention (MLA, arXiv 2405.04434) as config.json describes it."""

from __future__ import annotations

import math

import msgspec

from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.rope import RopeConfig


class LatentConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes in elements, by their names in config.json.

    A token leaves one row for all heads: its latent, and behind it the part of keys that has a position. Each head's
    keys and values are linear functions of the latent.
    """

    kv_lora_rank: int  # latent of keys and values, per token
    q_lora_rank: int  # latent of queries; 0: queries are projected from the hidden state
    qk_nope_head_dim: int  # part without a position, per query and key head
    qk_rope_head_dim: int  # part with a position, per query head; all heads share one such key
    v_head_dim: int  # per value head
    rope_interleave: bool  # rotated pairs are neighbours in the checkpoint; else they are half a head apart

    @property
    def row_size(self) -> int:
        """Elements that a token leaves in each layer."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def qk_head_dim(self) -> int:
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def num_weights(self, hidden_size: int, num_heads: int) -> int:
        """Return the weights of the projections of a layer, without norms."""
        inputs = self.q_lora_rank or hidden_size
        queries = hidden_size * self.q_lora_rank + inputs * num_heads * self.qk_head_dim
        keys_and_values = self.kv_lora_rank * num_heads * (self.qk_nope_head_dim + self.v_head_dim)
        return queries + hidden_size * self.row_size + keys_and_values + num_heads * self.v_head_dim * hidden_size

    def scale(self, rope: RopeConfig) -> float:
        """Return the scale of scores. With ``mscale_all_dim``, YaRN multiplies it by the square of an mscale."""
        mscale = float(rope.params.get("mscale_all_dim", 0.0))
        factor = float(rope.params.get("factor", 1.0))
        if rope.rope_type == "default" or not mscale or factor <= 1:
            return 1 / math.sqrt(self.qk_head_dim)
        return (0.1 * mscale * math.log(factor) + 1.0) ** 2 / math.sqrt(self.qk_head_dim)


def read_latent(fields: ConfigFields) -> LatentConfig:
    """Raises CheckpointError for an odd rotated part, and for biases."""
    latent = LatentConfig(
        kv_lora_rank=fields.integer("kv_lora_rank"),
        q_lora_rank=fields.optional_integer("q_lora_rank") or 0,
        qk_nope_head_dim=fields.integer("qk_nope_head_dim"),
        qk_rope_head_dim=fields.integer("qk_rope_head_dim"),
        v_head_dim=fields.integer("v_head_dim"),
        rope_interleave=fields.flag("rope_interleave"),
    )
    if latent.qk_rope_head_dim % 2:
        raise fields.error(f"has qk_rope_head_dim {latent.qk_rope_head_dim}; rotary embeddings need an even one")
    for name in ("attention_bias", "mlp_bias"):
        if fields.flag(name):
            raise fields.error(f"has {name} = true; layers with latent attention have no biases here. {REMEDY}")
    for name in ("head_dim", "qk_head_dim", "num_key_value_heads"):
        fields.given(name)  # marks the field as read; the sizes above imply it
    return latent
