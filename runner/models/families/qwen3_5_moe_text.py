"""The text model of Qwen3.5 with experts in place of MLPs."""

from __future__ import annotations

from runner.models.families.qwen3_5_text import Qwen3_5ForCausalLM


class Qwen3_5MoeForCausalLM(Qwen3_5ForCausalLM):
    pass
