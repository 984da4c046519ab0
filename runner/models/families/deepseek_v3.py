"""DeepSeek-V3, R1 and Kimi K2: DeepSeek-V2 with experts chosen by sigmoid."""

from __future__ import annotations

from runner.models.families.deepseek_v2 import DeepseekV2ForCausalLM


class DeepseekV3ForCausalLM(DeepseekV2ForCausalLM):
    """Its config differs."""
