"""Trains an EAGLE-3 head for a small model, in a few minutes on a CPU, and drafts with it plainly."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from training.batches import Generator
from training.checkpoint import WEIGHTS, write_json

STEPS = 160  # batches of four rows of 320 tokens
_SEED = 11
_RATE = 3e-3  # Adam's learning rate
_WARM_UP = 20  # steps
_COUNTED = 8  # batches, whose most frequent tokens the head can draft

_SIZES = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")


def head_config(target: Path) -> dict[str, Any]:
    """Return the config.json of a head for the model in ``target``; it can draft half of the tokens."""
    model = json.loads((target / "config.json").read_text())
    layers = model["num_hidden_layers"]
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        **{name: model[name] for name in _SIZES},
        "draft_vocab_size": model["vocab_size"] // 2,
        "num_hidden_layers": 1,
        "hidden_act": "silu",
        "max_position_embeddings": model["max_position_embeddings"],
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": sorted({0, (layers - 1) // 2, layers - 1})},
    }


class PlainTarget:
    """The model whose tokens a head drafts, through transformers in float32, without a cache."""

    def __init__(self, directory: Path) -> None:
        from transformers import AutoModelForCausalLM, Qwen2ForCausalLM  # takes seconds

        is_mimo = json.loads((directory / "config.json").read_text())["model_type"] == "mimo"
        model_class: Any = Qwen2ForCausalLM if is_mimo else AutoModelForCausalLM  # the library lacks MiMo
        model: Any = model_class.from_pretrained(directory, dtype=torch.float32)
        self._model = model.eval().requires_grad_(False)
        self._behind_last: Tensor | None = None
        model.model.layers[-1].register_forward_hook(self._keep)
        self.embedding: Tensor = model.get_input_embeddings().weight.detach()

    @torch.no_grad()
    def states(self, tokens: Tensor) -> Sequence[Tensor]:
        """Return the hidden states [rows, length, hidden_size] of tokens before each layer, and behind the last."""
        hidden = self._model.model(tokens, output_hidden_states=True).hidden_states[:-1]  # the last one is normed
        assert self._behind_last is not None
        return [*hidden, self._behind_last]

    def _keep(self, layer: Any, inputs: Any, output: Any) -> None:
        self._behind_last = output[0] if isinstance(output, tuple) else output


class PlainEagle3:
    """A head in plain torch, without a cache: all tokens of a row at once, in float32."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], target: PlainTarget) -> None:
        """``weights`` have their names in the checkpoint. ``config`` names the layers as SGLang does."""
        self.config = config
        self.weights = weights
        self._target = target
        self._behind = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        head_dim = config["head_dim"]
        self._frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)

    @classmethod
    def read(cls, directory: Path, target: Path) -> PlainEagle3:
        config = json.loads((directory / "config.json").read_text())
        return cls(config, load_file(directory / WEIGHTS), PlainTarget(target))

    def combined(self, tokens: Tensor) -> Tensor:
        """Return the hidden states that the first draft of each token is made of: [rows, length, hidden_size]."""
        states = self._target.states(tokens)
        parts = [states[layer + 1] for layer in self._behind]
        if self.config.get("fc_norm"):
            parts = [self._norm(f"fc_norm.{index}", part) for index, part in enumerate(parts)]
        x = torch.cat(parts, dim=-1)
        if self.config.get("norm_before_fc"):
            x = self._norm("input_norm", x)
        return F.linear(x, self.weights["fc.weight"])

    def result(self, next_tokens: Tensor, hidden: Tensor) -> Tensor:
        """Return its hidden states at the tokens of ``hidden`` [rows, length …], whose next ones are given."""
        embedded = F.embedding(next_tokens, self.weights.get("embed_tokens.weight", self._target.embedding))
        w = self.weights
        normed = self._norm("midlayer.hidden_norm", hidden)
        x = torch.cat((self._norm("midlayer.input_layernorm", embedded), normed), dim=-1)
        q, k, v = (self._heads(self._linear(f"midlayer.self_attn.{part}_proj", x)) for part in "qkv")
        q = self._rotated(q)
        k = self._rotated(k)
        k, v = (heads.repeat_interleave(q.shape[1] // heads.shape[1], dim=1) for heads in (k, v))
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        residual = normed if self.config.get("norm_before_residual") else hidden
        x = residual + self._linear("midlayer.self_attn.o_proj", attended)
        normed = self._norm("midlayer.post_attention_layernorm", x)
        gate, up = (F.linear(normed, w[f"midlayer.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        x = x + F.linear(F.silu(gate) * up, w["midlayer.mlp.down_proj.weight"])
        return self._norm("norm", x) if self.config.get("norm_output") else x

    def logits(self, result: Tensor) -> Tensor:
        """Return the logits of the tokens that it can draft, [rows, length, draft_vocab_size]."""
        normed = result if self.config.get("norm_output") else self._norm("norm", result)
        return F.linear(normed, self.weights["lm_head.weight"])

    def likeliest(self, result: Tensor) -> Tensor:
        drafts = self.logits(result).argmax(-1)
        return drafts + self.weights["d2t"][drafts] if "d2t" in self.weights else drafts

    @torch.inference_mode()
    def first_drafts(self, tokens: Sequence[int]) -> list[int]:
        """Return for each token but the last the draft behind the token after it."""
        row = torch.tensor([list(tokens)])
        drafts: list[int] = self.likeliest(self.result(row[:, 1:], self.combined(row)[:, :-1]))[0].tolist()
        return drafts

    @torch.inference_mode()
    def drafts(self, tokens: Sequence[int], count: int) -> list[int]:
        """Return ``count`` drafts behind at least two tokens."""
        row = torch.tensor([list(tokens)])
        next_tokens = row[:, 1:]
        hidden = self.combined(row)[:, :-1]
        drafts: list[int] = []
        while True:
            last = self.result(next_tokens, hidden)[:, -1:]
            drafts.append(int(self.likeliest(last)))
            if len(drafts) == count:
                return drafts
            next_tokens = torch.cat((next_tokens, torch.tensor([drafts[-1:]])), dim=1)
            hidden = torch.cat((hidden, last), dim=1)

    def _norm(self, name: str, x: Tensor) -> Tensor:
        variance = x.square().mean(-1, keepdim=True)
        return x * torch.rsqrt(variance + self.config["rms_norm_eps"]) * self.weights[f"{name}.weight"]

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.weights[f"{name}.weight"], self.weights.get(f"{name}.bias"))

    def _heads(self, x: Tensor) -> Tensor:
        heads: Tensor = x.unflatten(-1, (-1, self.config["head_dim"])).transpose(1, 2)
        return heads

    def _rotated(self, x: Tensor) -> Tensor:
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float32), self._frequencies)
        cos = angles.cos()
        sin = angles.sin()
        first, second = x.chunk(2, dim=-1)
        return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def random_weights(config: dict[str, Any], target_size: int, seed: int = _SEED) -> dict[str, Tensor]:
    """Return weights to begin with, of all that ``config`` names, for a model with hidden states of ``target_size``."""
    generator = torch.Generator().manual_seed(seed)
    hidden = config["hidden_size"]
    inner = config["intermediate_size"]
    drafted = config["draft_vocab_size"]
    queries, keys = (config[name] * config["head_dim"] for name in ("num_attention_heads", "num_key_value_heads"))
    number = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    shapes = {
        "fc": (hidden, number * target_size),
        "midlayer.self_attn.q_proj": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj": (hidden, queries),
        "midlayer.mlp.gate_proj": (inner, hidden),
        "midlayer.mlp.up_proj": (inner, hidden),
        "midlayer.mlp.down_proj": (hidden, inner),
        "lm_head": (drafted, hidden),
    }
    norms = dict.fromkeys(
        ("midlayer.input_layernorm", "midlayer.hidden_norm", "midlayer.post_attention_layernorm", "norm"), hidden
    )
    norms |= {"input_norm": number * target_size} if config.get("norm_before_fc") else {}
    norms |= {f"fc_norm.{index}": target_size for index in range(number if config.get("fc_norm") else 0)}
    weights = {f"{name}.weight": torch.ones(size) for name, size in norms.items()}
    for name, shape in shapes.items():
        scale = 0.3 if name.endswith(("o_proj", "down_proj")) else 1.0
        weights[f"{name}.weight"] = scale * torch.randn(shape, generator=generator) / shape[1] ** 0.5
        if config.get("attention_bias") and "self_attn" in name:
            weights[f"{name}.bias"] = 0.3 * torch.randn(shape[0], generator=generator)
    if drafted < config["vocab_size"]:
        weights |= token_tables(torch.randperm(config["vocab_size"], generator=generator)[:drafted], config)
    return weights


def token_tables(tokens: Tensor, config: dict[str, Any]) -> dict[str, Tensor]:
    """Return d2t and t2d of the tokens that a head can draft."""
    tokens = tokens.sort().values
    can_draft = torch.zeros(config["vocab_size"], dtype=torch.bool)
    can_draft[tokens] = True
    return {"d2t": tokens - torch.arange(len(tokens)), "t2d": can_draft}


def write_head(out: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> None:
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / "config.json", config)
    save_file({name: tensor.detach().contiguous() for name, tensor in weights.items()}, out / WEIGHTS)


def train(out: Path, steps: int, rows: int = 4, length: int = 320, target: Path = EMBEDDED_MODEL) -> None:
    """Train on ``steps`` batches of rows, and write the head. It learns first drafts; further ones are less right."""
    torch.manual_seed(_SEED)
    source = Generator(target / "tokenizer.json", _SEED)
    config = head_config(target)

    def batch() -> Tensor:
        return torch.from_numpy(source.batch([(rows, length)]).tokens.astype(np.int64)).view(rows, length)

    drafted = config["draft_vocab_size"]
    counts = torch.bincount(torch.cat([batch().flatten() for _ in range(_COUNTED)]), minlength=config["vocab_size"])
    tables = token_tables(counts.topk(drafted).indices, config)
    draft_ids = torch.full((config["vocab_size"],), -1).masked_scatter(tables["t2d"], torch.arange(drafted))
    weights = random_weights(config, config["hidden_size"]) | tables
    learned = [tensor.requires_grad_() for tensor in weights.values() if tensor.is_floating_point()]
    head = PlainEagle3(config, weights, PlainTarget(target))
    optimizer = torch.optim.Adam(learned, lr=_RATE, betas=(0.9, 0.95))
    began = time.monotonic()
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / _WARM_UP) * 0.5 * (1 + math.cos(math.pi * step / steps))
        row = batch()
        result = head.result(row[:, 1:-1], head.combined(row[:, :-2]))
        loss = F.cross_entropy(head.logits(result).flatten(0, 1), draft_ids[row[:, 2:]].flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(learned, 1.0)
        optimizer.step()
        if step % 20 == 19:
            print(f"{time.monotonic() - began:6.1f} s, step {step + 1}: loss {float(loss.detach()):.2f}", flush=True)
    write_head(out, config, weights)
