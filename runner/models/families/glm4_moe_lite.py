"""GLM-4.7-Flash: the layers of DeepSeek-V3 in other sizes."""

from __future__ import annotations

from runner.models.families.deepseek_v2 import DeepseekV2ForCausalLM


class Glm4MoeLiteForCausalLM(DeepseekV2ForCausalLM):
    """Its config differs."""
