"""The text model of Qwen3.5: Qwen3-Next's layers with MLPs, and a projection for each input of gated delta nets."""

from __future__ import annotations

from runner.models.families.qwen3_next import Qwen3NextForCausalLM


class Qwen3_5ForCausalLM(Qwen3NextForCausalLM):
    merged_inputs = False
