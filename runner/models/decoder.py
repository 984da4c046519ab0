"""The decoder that Llama, Mistral and Qwen3 have in common; they differ in biases, head norms and sliding windows."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model_config import ModelConfig
from runner.attention import AttentionBackend
from runner.linear import Linear, Placement
from runner.norm import rms_norm
from runner.rope import RotaryEmbedding, apply_rotary

NamedTensors = Iterator[tuple[str, Tensor]]


class RMSNorm:
    def __init__(self, size: int, eps: float, place: Placement) -> None:
        self.weight = torch.empty(size, device=place.device, dtype=place.dtype)
        self._eps = torch.tensor(eps, device=place.device)

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self._eps)


class HeadNorm:
    """Qwen3's norm of every query and key head, in one pass over [tokens, num_heads + num_kv_heads, head_dim]."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        self._heads = (config.num_heads, config.num_kv_heads)
        self._eps = torch.tensor(config.rms_norm_eps, device=place.device)
        self.q_weight = torch.empty(config.head_dim, device=place.device, dtype=place.dtype)
        self.k_weight = torch.empty_like(self.q_weight)
        self._weight = torch.empty(0)  # [num_heads + num_kv_heads, head_dim]

    def seal(self) -> None:
        self._weight = torch.cat(
            [w.expand(n, -1) for w, n in zip((self.q_weight, self.k_weight), self._heads, strict=True)]
        )

    def __call__(self, x: Tensor) -> Tensor:
        return rms_norm(x, self._weight, self._eps)


class Attention:
    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        self._layer = layer
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        self._turned = self._heads + self._kv_heads  # heads that rotary embeddings turn
        rows = (self._turned + self._kv_heads) * self._head_dim
        self.qkv = Linear(config.hidden_size, rows, config.attention_bias, place)
        self.out = Linear(self._heads * self._head_dim, config.hidden_size, config.attention_bias, place)
        self.norm = HeadNorm(config, place) if config.qk_norm else None

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        heads = self.qkv(x).view(x.shape[0], -1, self._head_dim)
        turned, v = torch.split(heads, [self._turned, self._kv_heads], dim=1)
        if self.norm is not None:
            turned = self.norm(turned)
        q, k = torch.split(apply_rotary(turned, cos, sin), [self._heads, self._kv_heads], dim=1)
        return self.out(backend.run(self._layer, q, k, v))

    def named_tensors(self) -> NamedTensors:
        sizes = [n * self._head_dim for n in (self._heads, self._kv_heads, self._kv_heads)]
        yield from _parts(self.qkv, ("q_proj", "k_proj", "v_proj"), sizes)
        yield from _parts(self.out, ("o_proj",), [self.out.weight.shape[0]])
        if self.norm is not None:
            yield "q_norm.weight", self.norm.q_weight
            yield "k_norm.weight", self.norm.k_weight

    def seal(self) -> None:
        self.qkv.seal()
        self.out.seal()
        if self.norm is not None:
            self.norm.seal()


class MLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        self._size = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, 2 * self._size, config.mlp_bias, place)
        self.down = Linear(self._size, config.hidden_size, config.mlp_bias, place)

    def __call__(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate).mul_(up))

    def named_tensors(self) -> NamedTensors:
        yield from _parts(self.gate_up, ("gate_proj", "up_proj"), [self._size, self._size])
        yield from _parts(self.down, ("down_proj",), [self.down.weight.shape[0]])

    def seal(self) -> None:
        self.gate_up.seal()
        self.down.seal()


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.attention = Attention(config, layer, place)
        self.mlp_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.mlp = MLP(config, place)

    def __call__(self, x: Tensor, cos: Tensor, sin: Tensor, backend: AttentionBackend) -> Tensor:
        """x [tokens, hidden_size] is changed in place and returned."""
        x += self.attention(self.attention_norm(x), cos, sin, backend)
        x += self.mlp(self.mlp_norm(x))
        return x

    def named_tensors(self) -> NamedTensors:
        yield "input_layernorm.weight", self.attention_norm.weight
        yield "post_attention_layernorm.weight", self.mlp_norm.weight
        yield from _prefixed("self_attn.", self.attention.named_tensors())
        yield from _prefixed("mlp.", self.mlp.named_tensors())

    def seal(self) -> None:
        self.attention.seal()
        self.mlp.seal()


class Decoder:
    """Token ids to hidden states, hidden states to logits. Fill ``named_tensors``, then ``seal``, then call."""

    def __init__(self, config: ModelConfig, place: Placement) -> None:
        self._tied = config.tie_word_embeddings
        self._dtype = place.dtype
        # Only ever read by row, so it stays as narrow as it came.
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, device=place.device, dtype=place.stored)
        self.layers = [DecoderLayer(config, layer, place) for layer in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, place)
        self.head = Linear(config.hidden_size, config.vocab_size, False, place)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, place)

    def __call__(
        self, input_ids: Tensor, positions: Tensor, lengths: Tensor | None, backend: AttentionBackend
    ) -> Tensor:
        """Hidden states [tokens, hidden_size], before the last norm, of input_ids and positions [tokens] int64.

        ``lengths``: see RotaryEmbedding.cos_sin. ``backend`` has planned the same tokens.
        """
        cos, sin = self.rotary.cos_sin(positions, lengths)
        x = F.embedding(input_ids, self.embedding).to(self._dtype)
        for layer in self.layers:
            x = layer(x, cos, sin, backend)
        return x

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] from hidden states [rows, hidden_size]."""
        return self.head(self.norm(hidden))

    def named_tensors(self) -> NamedTensors:
        """Every tensor of the checkpoint with the memory it belongs in."""
        yield "model.embed_tokens.weight", self.embedding
        for index, layer in enumerate(self.layers):
            yield from _prefixed(f"model.layers.{index}.", layer.named_tensors())
        yield "model.norm.weight", self.norm.weight
        if not self._tied:
            yield "lm_head.weight", self.head.weight

    def seal(self) -> None:
        """Bring filled weights into the form they are used in."""
        if self._tied and self.embedding.dtype == self._dtype and self.embedding.device.type != "cpu":
            self.head.weight = self.embedding
        elif self._tied:
            self.head.weight.copy_(self.embedding)
        self.head.seal()
        for layer in self.layers:
            layer.seal()


def _parts(linear: Linear, names: tuple[str, ...], sizes: list[int]) -> NamedTensors:
    """The rows of a fused layer under the names that the checkpoint gives its parts."""
    for name, weight in zip(names, torch.split(linear.weight, sizes), strict=True):
        yield f"{name}.weight", weight
    if linear.bias is not None:
        for name, bias in zip(names, torch.split(linear.bias, sizes), strict=True):
            yield f"{name}.bias", bias


def _prefixed(prefix: str, tensors: NamedTensors) -> NamedTensors:
    return ((prefix + name, tensor) for name, tensor in tensors)
