"""Fields of LFM2's config.json under the names of other families.

An earlier name replaces the usual one, as in transformers: ``tie_embedding``, ``block_ff_dim``.
"""

from __future__ import annotations

from pdserve.model.config_fields import LARGEST, ConfigFields


def rename(fields: ConfigFields) -> None:
    """Write the fields of experts' and dense models under their usual names."""
    values = fields.values
    values["rms_norm_eps"] = fields.get("norm_eps")
    if fields.given("tie_embedding") is not None:
        values["tie_word_embeddings"] = fields.flag("tie_embedding")


def rename_dense(fields: ConfigFields) -> None:
    """Write the fields of dense models under their usual names, and the size of MLPs that their file implies.

    With ``block_auto_adjust_ff_dim`` an MLP has two thirds of the given size, times a factor, rounded up.
    """
    rename(fields)
    size = fields.integer("intermediate_size" if fields.given("block_ff_dim") is None else "block_ff_dim")
    adjusts = fields.flag("block_auto_adjust_ff_dim")
    factor = fields.number("block_ffn_dim_multiplier", 1.0, 1e-3, 1e3)
    multiple = fields.integer("block_multiple_of")
    if adjusts:
        size = -(-int(factor * int(2 * size / 3)) // multiple) * multiple
    if not 1 <= size <= LARGEST["intermediate_size"]:
        raise fields.error(f"implies MLPs of {size}; the size must be from 1 to {LARGEST['intermediate_size']}")
    values = fields.values
    values["intermediate_size"] = size
