"""Trains a small MiMo with a layer that predicts further tokens, in minutes on a CPU, and drafts with it plainly."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from training.batches import Generator
from training.checkpoint import WEIGHTS, copy_settings, write_json

_SEED = 7
_LAYER = "model.mtp_layers.0."
_RATE = 4e-3  # Adam's learning rate
_WARM_UP = 20  # steps
_PREDICTOR_LOSS = 0.5  # weight of the loss of the predictor

CONFIG: dict[str, Any] = {
    "architectures": ["MiMoForCausalLM"],
    "model_type": "mimo",
    "vocab_size": 4096,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "use_sliding_window": False,
    "tie_word_embeddings": True,
    "num_nextn_predict_layers": 1,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "torch_dtype": "float32",
}


class PlainMiMo:
    """MiMo in plain torch, without a cache: all tokens of a row at once, in float32."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
        """``weights`` have their names in the checkpoint."""
        self.config = config
        self.weights = weights
        self._head_dim: int = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
        theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]
        self._frequencies = theta ** (-torch.arange(0, self._head_dim, 2, dtype=torch.float32) / self._head_dim)

    @classmethod
    def read(cls, directory: Path) -> PlainMiMo:
        weights: dict[str, Tensor] = {}
        for path in sorted(directory.glob("*.safetensors")):
            weights |= load_file(path)
        return cls(json.loads((directory / "config.json").read_text()), weights)

    def hidden(self, tokens: Tensor) -> Tensor:
        """Return the hidden states of tokens [rows, length], normed for the head: [rows, length, hidden_size]."""
        x = F.embedding(tokens, self.weights["model.embed_tokens.weight"])
        for layer in range(self.config["num_hidden_layers"]):
            x = self._layer(f"model.layers.{layer}.", x)
        return self._norm("model.norm", x)

    def predicted(self, next_tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return the predictor's results for the tokens that follow the tokens of ``hidden``, both [rows, length …]."""
        embedded = F.embedding(next_tokens, self.weights["model.embed_tokens.weight"])
        embedded = torch.cat((torch.zeros_like(embedded[:, :1]), embedded[:, 1:]), dim=1)
        both = self._norm(f"{_LAYER}hidden_layernorm", hidden), self._norm(f"{_LAYER}token_layernorm", embedded)
        x = torch.cat(both, dim=-1) @ self.weights[f"{_LAYER}input_proj.weight"].T
        return self._norm(f"{_LAYER}final_layernorm", self._layer(_LAYER, x))

    def logits(self, hidden: Tensor) -> Tensor:
        head = "model.embed_tokens.weight" if self.config["tie_word_embeddings"] else "lm_head.weight"
        return hidden @ self.weights[head].T

    @torch.inference_mode()
    def first_drafts(self, tokens: Sequence[int]) -> list[int]:
        """Return for each token but the last the draft behind the token after it."""
        row = torch.tensor([list(tokens)])
        return self.logits(self.predicted(row[:, 1:], self.hidden(row)[:, :-1]))[0].argmax(-1).tolist()

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return ``count`` drafts behind at least two tokens."""
        row = torch.tensor([list(tokens)])
        next_tokens = row[:, 1:]
        hidden = self.hidden(row)[:, :-1]
        drafts: list[int] = []
        while True:
            last = self.predicted(next_tokens, hidden)[:, -1:]
            drafts.append(int(self.logits(last).argmax()))
            if len(drafts) == count:
                return drafts
            next_tokens = torch.cat((next_tokens, torch.tensor([drafts[-1:]])), dim=1)
            hidden = torch.cat((hidden, last), dim=1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def _layer(self, prefix: str, x: Tensor) -> Tensor:
        w = self.weights
        normed = self._norm(f"{prefix}input_layernorm", x)
        q, k, v = (self._heads(F.linear(normed, w[f"{name}.weight"], w[f"{name}.bias"])) for name in
                   (f"{prefix}self_attn.{part}_proj" for part in "qkv"))  # fmt: skip
        q = self._rotated(q)
        k = self._rotated(k)
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + attended @ w[f"{prefix}self_attn.o_proj.weight"].T
        normed = self._norm(f"{prefix}post_attention_layernorm", x)
        gate, up = (normed @ w[f"{prefix}mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ w[f"{prefix}mlp.down_proj.weight"].T

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
        return heads

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float32), self._frequencies)
        cos = angles.cos()
        sin = angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


class FirstDrafts(Protocol):
    def first_drafts(self, tokens: Sequence[int]) -> list[int]:
        """Return for each token but the last the draft behind the token after it."""


def plain_acceptance(model: FirstDrafts, prompt: Sequence[int], output: Sequence[int]) -> tuple[int, int]:
    """Return the drafts and the accepted ones of a loop with one draft per step, behind the first output token."""
    tokens = [*prompt, *output]
    drafts = model.first_drafts(tokens)
    made = accepted = 0
    last = len(prompt) - 1  # the last token that is computed; the one after it is known
    while last + 2 < len(tokens):
        made += 1
        right = drafts[last] == tokens[last + 2]
        accepted += right
        last += 1 + right
    return made, accepted


def random_weights(config: dict[str, Any], seed: int = _SEED) -> dict[str, Tensor]:
    """Return weights to begin with: a small embedding, and layers that add little."""
    generator = torch.Generator().manual_seed(seed)
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    weights = {"model.embed_tokens.weight": 0.05 * torch.randn(config["vocab_size"], hidden, generator=generator)}

    def matrix(name: str, outputs: int, inputs: int, scale: float = 1.0) -> None:
        weights[f"{name}.weight"] = scale * torch.randn(outputs, inputs, generator=generator) / inputs**0.5

    for layer in (*(f"model.layers.{index}." for index in range(config["num_hidden_layers"])), _LAYER):
        for name, outputs in (("q", queries), ("k", keys), ("v", keys)):
            matrix(f"{layer}self_attn.{name}_proj", outputs, hidden)
            weights[f"{layer}self_attn.{name}_proj.bias"] = torch.zeros(outputs)
        matrix(f"{layer}self_attn.o_proj", hidden, queries, 0.3)
        matrix(f"{layer}mlp.gate_proj", inner, hidden)
        matrix(f"{layer}mlp.up_proj", inner, hidden)
        matrix(f"{layer}mlp.down_proj", hidden, inner, 0.3)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"{layer}{name}.weight"] = torch.ones(hidden)
    matrix(f"{_LAYER}input_proj", hidden, 2 * hidden)
    for name in ("model.norm", *(f"{_LAYER}{norm}_layernorm" for norm in ("token", "hidden", "final"))):
        weights[f"{name}.weight"] = torch.ones(hidden)
    return weights


def train(out: Path, steps: int, rows: int = 8, length: int = 320, settings: Path = EMBEDDED_MODEL) -> None:
    """Train on ``steps`` batches of rows, and write the checkpoint with the tokenizer of ``settings``."""
    torch.manual_seed(_SEED)
    source = Generator(settings / "tokenizer.json", _SEED)
    model = PlainMiMo(CONFIG, {name: tensor.requires_grad_() for name, tensor in random_weights(CONFIG).items()})
    optimizer = torch.optim.Adam(model.weights.values(), lr=_RATE, betas=(0.9, 0.95))
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        tokens = torch.from_numpy(source.batch([(rows, length)]).tokens.astype(np.int64)).view(rows, length)
        hidden = model.hidden(tokens)
        predicted = model.predicted(tokens[:, 1:-1], hidden[:, :-2])
        losses = [
            F.cross_entropy(model.logits(states).flatten(0, 1), targets.flatten())
            for states, targets in ((hidden[:, :-1], tokens[:, 1:]), (predicted, tokens[:, 2:]))
        ]
        optimizer.zero_grad()
        (losses[0] + _PREDICTOR_LOSS * losses[1]).backward()
        torch.nn.utils.clip_grad_norm_(model.weights.values(), 1.0)
        optimizer.step()
        if step % 20 == 19:
            of_both = ", ".join(f"{float(loss.detach()):.2f}" for loss in losses)
            print(f"{time.monotonic() - began:6.1f} s, step {step + 1}: losses {of_both}", flush=True)
    copy_settings(settings, out)
    write_json(out / "config.json", CONFIG)
    save_file({name: tensor.detach().contiguous() for name, tensor in model.weights.items()}, out / WEIGHTS)
