"""MiMo: Qwen2 with a layer that predicts one token further."""

from __future__ import annotations

from runner.models.families.qwen2 import Qwen2ForCausalLM
from runner.models.layers.token_predictor import PredictorNames


class MiMoForCausalLM(Qwen2ForCausalLM):
    unused_tensors = ("model.mtp_layers.",)
    predictor_names = PredictorNames(
        embedding_norm="token_layernorm",
        hidden_norm="hidden_layernorm",
        projection="input_proj",
        norm="final_layernorm",
        hidden_first=True,
    )
