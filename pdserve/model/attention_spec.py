"""The kind of attention of one layer, as plain values."""

from __future__ import annotations

import msgspec


class AttentionSpec(msgspec.Struct, frozen=True):
    """Attention of one layer to earlier tokens: softmax(soft_cap(scale * q kᵀ) + mask) v.

    A back end is built with the specs of its layers. ``attention_backends.py`` lists what each back end lacks, and a
    node refuses at start a back end that lacks something the model needs.
    """

    scale: float  # factor of scores, usually head_dim ** -0.5
    window: int | None = None  # a token sees itself and the window - 1 tokens before it; None: all before it
    soft_cap: float | None = None  # scores become soft_cap * tanh(scores / soft_cap)
    has_sinks: bool = False  # each head has a learned score that takes part in the softmax and has no value
    whole_images: bool = False  # tokens of an image also see the later tokens of their image
