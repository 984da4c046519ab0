"""Qwen3-MoE: Qwen3's attention, and experts in place of MLPs."""

from __future__ import annotations

from runner.models.families.qwen3 import Qwen3ForCausalLM


class Qwen3MoeForCausalLM(Qwen3ForCausalLM):
    pass
