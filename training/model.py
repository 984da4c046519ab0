"""Qwen3 for training, in plain torch: rows of several lengths share each operation but attention.

A batch is N tokens: sections of rows of equal length, one after the other. Attention runs per section; everything else
sees N tokens at once, so that one compiled graph serves every mix of lengths and every layer.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from training.checkpoint import layer_shapes

Sections = Sequence[tuple[int, int]]  # rows, tokens per row


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    floats = x.float()
    return (floats * torch.rsqrt(floats.square().mean(-1, keepdim=True) + 1e-6)).to(x.dtype) * weight


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def attention_inputs(x: Tensor, cos: Tensor, sin: Tensor, w: Sequence[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Return queries, keys and values, each [N, query heads, head_dim], of hidden states [N, hidden]."""
    norm, q_proj, k_proj, v_proj, q_norm, k_norm = w
    normed = rms_norm(x, norm)
    head_dim = q_norm.shape[0]
    cos = cos.unsqueeze(1)
    sin = sin.unsqueeze(1)
    q = _rotated(rms_norm((normed @ q_proj.T).unflatten(-1, (-1, head_dim)), q_norm), cos, sin)
    k = _rotated(rms_norm((normed @ k_proj.T).unflatten(-1, (-1, head_dim)), k_norm), cos, sin)
    v = (normed @ v_proj.T).unflatten(-1, (-1, head_dim))
    group = q.shape[1] // k.shape[1]
    return q, k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)


def layer_output(x: Tensor, attended: Tensor, w: Sequence[Tensor]) -> Tensor:
    """Add attention's output and the MLP to the hidden states [N, hidden]."""
    o_proj, norm, gate, up, down = w
    x = x + attended @ o_proj.T
    normed = rms_norm(x, norm)
    return x + (F.silu(normed @ gate.T) * (normed @ up.T)) @ down.T


def cross_entropy(hidden: Tensor, norm: Tensor, embedding: Tensor, targets: Tensor) -> Tensor:
    """Return the mean loss of the targets [K] that are not negative, from hidden states [K, hidden]."""
    logits = (rms_norm(hidden, norm) @ embedding.T).float()
    return F.cross_entropy(logits, targets, ignore_index=-1)


def _attention(q: Tensor, k: Tensor, v: Tensor, sections: Sections) -> Tensor:
    outputs = []
    sizes = [rows * length for rows, length in sections]
    for (rows, length), *part in zip(sections, *(tensor.split(sizes) for tensor in (q, k, v)), strict=True):
        q, k, v = (tensor.unflatten(0, (rows, length)).transpose(1, 2) for tensor in part)
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        outputs.append(output.transpose(1, 2).reshape(rows * length, -1))
    return torch.cat(outputs)


_INPUTS = ("input_layernorm", *(f"self_attn.{name}" for name in ("q_proj", "k_proj", "v_proj", "q_norm", "k_norm")))
_OUTPUTS = ("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")


class TrainedModel:
    """Parameters in float32, each stacked over the layers; computes in bfloat16 on a GPU, in float32 on a CPU."""

    def __init__(self, config: dict[str, Any], weights: dict[str, Tensor], device: torch.device) -> None:
        """``weights`` have their names in transformers."""
        self.config = config
        self.device = device
        self._dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        self.layers = config["num_hidden_layers"]
        self.parameters: dict[str, Tensor] = {}
        for name in layer_shapes(config):
            stacked = torch.stack([weights[f"model.layers.{index}.{name}"] for index in range(self.layers)])
            self.parameters[name] = stacked
        for name in ("model.embed_tokens.weight", "model.norm.weight"):
            self.parameters[name] = weights[name]
        for name, tensor in self.parameters.items():
            self.parameters[name] = tensor.to(device, torch.float32).clone().requires_grad_()
        head_dim = config["head_dim"]
        frequencies = config["rope_theta"] ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(config["max_position_embeddings"], dtype=torch.float64), frequencies)
        self._cos, self._sin = (table.to(device, self._dtype) for table in (angles.cos(), angles.sin()))
        self._inputs: Callable[..., Any] = attention_inputs
        self._output: Callable[..., Any] = layer_output
        self._loss: Callable[..., Any] = cross_entropy

    def compile(self) -> None:
        self._inputs, self._output, self._loss = (
            torch.compile(function, dynamic=False) for function in (attention_inputs, layer_output, cross_entropy)
        )

    def uncompile(self) -> None:
        self._inputs = attention_inputs
        self._output = layer_output
        self._loss = cross_entropy

    def hidden(self, tokens: Tensor, sections: Sections) -> Tensor:
        """Return the hidden states [N, hidden] of tokens [N], before the last norm."""
        positions = torch.cat([torch.arange(length, device=self.device).repeat(rows) for rows, length in sections])
        cos = self._cos[positions]
        sin = self._sin[positions]
        cast = {name: tensor.to(self._dtype) for name, tensor in self.parameters.items()}
        stacks = [cast[f"{name}.weight"].unbind(0) for name in (*_INPUTS, *_OUTPUTS)]
        x = F.embedding(tokens, cast["model.embed_tokens.weight"])
        for layer in zip(*stacks, strict=True):
            q, k, v = self._inputs(x, cos, sin, layer[: len(_INPUTS)])
            x = self._output(x, _attention(q, k, v, sections), layer[len(_INPUTS) :])
        return x

    def loss(self, hidden: Tensor, targets: Tensor) -> Tensor:
        """Return the mean loss of targets [K] at hidden states [K, hidden]; negative targets do not count."""
        norm, embedding = self._head()
        loss: Tensor = self._loss(hidden, norm, embedding, targets)
        return loss

    @torch.no_grad()
    def predicted(self, hidden: Tensor) -> Tensor:
        """Return the most likely token [K] after each of the hidden states [K, hidden]."""
        norm, embedding = self._head()
        parts = [(rms_norm(part, norm) @ embedding.T).argmax(-1) for part in hidden.split(8192)]
        return torch.cat(parts)

    def _head(self) -> tuple[Tensor, Tensor]:
        parameters = (self.parameters["model.norm.weight"], self.parameters["model.embed_tokens.weight"])
        norm, embedding = (tensor.to(self._dtype) for tensor in parameters)
        return norm, embedding

    def weights(self) -> dict[str, Tensor]:
        """Return a copy of the weights in bfloat16 on the host, by their names in transformers."""
        weights: dict[str, Tensor] = {}
        for name, tensor in self.parameters.items():
            host = tensor.detach().to("cpu", torch.bfloat16)
            if name.startswith("model."):
                weights[name] = host.clone()
            else:
                weights |= {f"model.layers.{index}.{name}": host[index].clone() for index in range(self.layers)}
        return weights

    def load(self, weights: dict[str, Tensor]) -> None:
        """Overwrite the parameters."""
        fresh = TrainedModel(self.config, weights, self.device)
        with torch.no_grad():
            for name, tensor in self.parameters.items():
                tensor.copy_(fresh.parameters[name])
