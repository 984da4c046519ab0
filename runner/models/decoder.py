"""The decoder that Llama, Mistral and Qwen3 have in common; they differ in biases, head norms and sliding windows."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from pdserve.model_config import ModelConfig
from runner.attention import AttentionBackend, HeadNorms, HeadTurn
from runner.linear import Linear, Placement
from runner.models.ops import Ops, build_ops
from runner.rope import RotaryEmbedding

NamedTensors = Iterator[tuple[str, Tensor]]


class RMSNorm:
    def __init__(self, size: int, place: Placement, ops: Ops) -> None:
        self.weight = torch.empty(size, device=place.device, dtype=place.dtype)
        self._ops = ops

    def __call__(self, x: Tensor) -> Tensor:
        return self._ops.norm(x, self.weight)

    def add(self, x: Tensor, residual: Tensor) -> Tensor:
        """Add x to ``residual`` in place, and norm the sum."""
        return self._ops.add_norm(x, residual, self.weight)


class Attention:
    def __init__(self, config: ModelConfig, layer: int, place: Placement) -> None:
        self._layer = layer
        self._heads, self._kv_heads, self._head_dim = config.num_heads, config.num_kv_heads, config.head_dim
        rows = (self._heads + 2 * self._kv_heads) * self._head_dim
        self.qkv = Linear(config.hidden_size, rows, config.attention_bias, place)
        self.out = Linear(self._heads * self._head_dim, config.hidden_size, config.attention_bias, place)
        self._norms = _head_norms(config, place) if config.qk_norm else None

    def attend(self, x: Tensor, turn: HeadTurn, backend: AttentionBackend) -> Tensor:
        """What the heads of each token see, before ``out``: [tokens, num_heads * head_dim]. Stores keys and values."""
        return backend.run(self._layer, self.qkv(x), turn, self._norms)

    def named_tensors(self) -> NamedTensors:
        sizes = [n * self._head_dim for n in (self._heads, self._kv_heads, self._kv_heads)]
        yield from _parts(self.qkv, ("q_proj", "k_proj", "v_proj"), sizes)
        yield from _parts(self.out, ("o_proj",), [self.out.weight.shape[0]])
        if self._norms is not None:
            yield "q_norm.weight", self._norms.q_weight
            yield "k_norm.weight", self._norms.k_weight

    def seal(self) -> None:
        self.qkv.seal()
        self.out.seal()
        if self._norms is not None:
            self._norms = replace(self._norms)


class MLP:
    """down(silu(gate(x)) * up(x)), gate and up in one product."""

    def __init__(self, config: ModelConfig, place: Placement, ops: Ops) -> None:
        self._ops = ops
        self._size = config.intermediate_size
        self.gate_up = Linear(config.hidden_size, 2 * self._size, config.mlp_bias, place)
        self.down = Linear(self._size, config.hidden_size, config.mlp_bias, place)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self._ops.silu_mul(self.gate_up(x)))

    def named_tensors(self) -> NamedTensors:
        yield from _parts(self.gate_up, ("gate_proj", "up_proj"), [self._size, self._size])
        yield from _parts(self.down, ("down_proj",), [self.down.weight.shape[0]])

    def seal(self) -> None:
        self.gate_up.seal()
        self.down.seal()


class DecoderLayer:
    def __init__(self, config: ModelConfig, layer: int, place: Placement, ops: Ops) -> None:
        self.attention_norm = RMSNorm(config.hidden_size, place, ops)
        self.attention = Attention(config, layer, place)
        self.mlp_norm = RMSNorm(config.hidden_size, place, ops)
        self.mlp = MLP(config, place, ops)

    def __call__(
        self, x: Tensor, residual: Tensor, turn: HeadTurn, backend: AttentionBackend, keep: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """What is to be added to the residual next, and the residual, from x, its norm; all are [tokens, hidden_size].

        What attention adds is added here, in place; the caller adds the result, together with the norm that follows.
        ``keep`` [kept] names the tokens to go on with after attention: the results are [kept, hidden_size].
        """
        heads = self.attention.attend(x, turn, backend)
        if keep is not None:
            heads, residual = heads.index_select(0, keep), residual.index_select(0, keep)
        return self.mlp(self.mlp_norm.add(self.attention.out(heads), residual)), residual

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

    def __init__(self, config: ModelConfig, place: Placement, use_triton: bool) -> None:
        self._tied = config.tie_word_embeddings
        self._dtype = place.dtype
        ops = build_ops(config.rms_norm_eps, place, use_triton)
        # Only ever read by row, so it stays as narrow as it came.
        self.embedding = torch.empty(config.vocab_size, config.hidden_size, device=place.device, dtype=place.stored)
        self.layers = [DecoderLayer(config, layer, place, ops) for layer in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, place, ops)
        self._next_norms = [layer.attention_norm for layer in self.layers[1:]]
        self.head = Linear(config.hidden_size, config.vocab_size, False, place)
        self.rotary = RotaryEmbedding(config.rope, config.head_dim, config.max_position_embeddings, place)

    def __call__(
        self,
        input_ids: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        keep: Tensor | None = None,
    ) -> Tensor:
        """Hidden states [tokens, hidden_size], normed for ``logits``, of input_ids and positions [tokens], integers.

        ``lengths``: see RotaryEmbedding.turn. ``backend`` has planned the same tokens. ``keep`` [kept] names the tokens
        whose hidden states are wanted, then [kept, hidden_size]: the others need no more of the last layer than their
        keys and values. Nothing waits for the device, so that on a GPU the call can be captured into a graph.
        """
        turn = self.rotary.turn(positions, lengths)
        residual = F.embedding(input_ids, self.embedding).to(self._dtype)
        x = self.layers[0].attention_norm(residual)
        *others, last = self.layers
        for layer, next_norm in zip(others, self._next_norms, strict=True):
            x, residual = layer(x, residual, turn, backend)
            x = next_norm.add(x, residual)
        if keep is not None and not len(keep):
            last.attention.attend(x, turn, backend)
            return x[:0]
        x, residual = last(x, residual, turn, backend, keep)
        return self.norm.add(x, residual)

    def logits(self, hidden: Tensor) -> Tensor:
        """[rows, vocab_size] from rows of hidden states [rows, hidden_size]."""
        return self.head(hidden)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """``logits`` into ``out``, on GPUs."""
        self.head.write(hidden, out)

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


def _head_norms(config: ModelConfig, place: Placement) -> HeadNorms:
    q_weight = torch.empty(config.head_dim, device=place.device, dtype=place.dtype)
    return HeadNorms(q_weight, torch.empty_like(q_weight), config.rms_norm_eps)


def _parts(linear: Linear, names: tuple[str, ...], sizes: list[int]) -> NamedTensors:
    """The rows of a fused layer under the names that the checkpoint gives its parts."""
    for name, weight in zip(names, torch.split(linear.weight, sizes), strict=True):
        yield f"{name}.weight", weight
    if linear.bias is not None:
        for name, bias in zip(names, torch.split(linear.bias, sizes), strict=True):
            yield f"{name}.bias", bias


def _prefixed(prefix: str, tensors: NamedTensors) -> NamedTensors:
    return ((prefix + name, tensor) for name, tensor in tensors)
