"""Mixtral: Mistral's attention, and experts in place of MLPs, with names of its own."""

from __future__ import annotations

from runner.models.decoder import Decoder

_NAMES = {".mlp.": ".block_sparse_moe.", ".gate_proj.": ".w1.", ".down_proj.": ".w2.", ".up_proj.": ".w3."}


class MixtralForCausalLM(Decoder):
    def checkpoint_name(self, name: str) -> str:
        for usual, own in _NAMES.items():
            name = name.replace(usual, own)
        return name
