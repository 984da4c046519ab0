"""Mistral: no biases; all layers may have a sliding window."""

from __future__ import annotations

from runner.models.decoder import Decoder


class MistralForCausalLM(Decoder):
    pass
