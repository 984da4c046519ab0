"""The head of EAGLE-3 (arXiv 2503.01840), which drafts from hidden states between the model's layers.

    layers of the model  ──► AuxiliaryStates: hidden states before some layers, side by side
    combined             fc of them, at each position of a step
    midlayer             one layer over the normed embedding of the next token beside the normed hidden state
    drafts               the head's own logits; its hidden state takes the place of the combined one for the next draft

At position t it takes what the model has at t and the embedding of token t + 1, as a TokenPredictor does
(token_predictor.py), and attends to earlier positions by a KV cache of its own. Its DraftSource is ModelDrafts.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from pdserve.model.eagle3 import Eagle3Config
from pdserve.model.model_config import ModelConfig
from pdserve.model.quantization.weight_formats import UNQUANTIZED
from runner.attention import AttentionBackend
from runner.distributed.pipeline_stages import Beside
from runner.models.layers.attention import Attention
from runner.models.layers.context import ModelContext
from runner.models.layers.decoder_layer import NormedMLP, RMSNorm
from runner.models.layers.mlp import MLP
from runner.models.layers.norm_weight import NormWeight
from runner.models.layers.rotary import RotaryEmbedding
from runner.models.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from runner.models.layers.weight_shard import ShardRange, WeightShard, WeightShards, prefixed
from runner.models.quantization.unquantized import UnquantizedLinearMethod


class AuxiliaryStates:
    """The auxiliary hidden states of the latest step, at addresses that captured graphs write to.

    A pipeline stage also holds the states of the layers before its own, which each stage sends with its result.
    """

    def __init__(self, context: ModelContext, head: Eagle3Config) -> None:
        position = context.position
        self._size = context.config.hidden_size
        self._placement = context.placement
        self._index = {layer: index for index, layer in enumerate(head.layers)}
        first = position.layers.start
        end = position.layers.stop + position.is_last
        self._received = sum(layer < first for layer in head.layers)
        self._held = sum(layer < end for layer in head.layers)
        self._memory = self._zeros(0)

    def allocate(self, max_tokens: int) -> None:
        """Make room for steps of ``max_tokens`` tokens."""
        self._memory = self._zeros(max_tokens)

    def keep(self, layer: int, hidden: Tensor) -> None:
        """Keep hidden [tokens, hidden_size] before ``layer``, counted in the whole model, if it is auxiliary."""
        if (index := self._index.get(layer)) is not None:
            self._memory[: len(hidden), index * self._size : (index + 1) * self._size].copy_(hidden)

    def rows(self, tokens: int) -> Tensor:
        """Return all held states [tokens, number * hidden_size]; only the last stage holds every one."""
        return self._memory[:tokens]

    def beside(self, tokens: int) -> Beside:
        """Return the place for the states of earlier stages, and the states that the next stage needs."""
        memory = self._memory[:tokens]
        return Beside(received=memory[:, : self._received * self._size], sent=memory)

    def _zeros(self, tokens: int) -> Tensor:
        width = self._held * self._size
        return torch.zeros(tokens, width, dtype=self._placement.dtype, device=self._placement.device)


class Eagle3Head:
    def __init__(
        self, context: ModelContext, head: Eagle3Config, layer: int, embedding: VocabParallelEmbedding | None
    ) -> None:
        """``layer`` is its layer in the KV cache of this rank.

        ``embedding`` is the model's, None if another stage has it. A head without an embedding has a copy of it then.
        """
        self.config = head
        model = _as_model(context.config, head)
        mine = replace(ModelContext.build(model, context.parallel, context.placement), linears=context.linears)
        self._parallel = mine.parallel
        self._ops = mine.ops
        self._inputs = len(head.layers) * context.config.hidden_size
        self._size = head.hidden_size
        self._target_size = context.config.hidden_size
        self.table = VocabParallelEmbedding(mine) if head.has_embedding else None
        self.own_embedding = VocabParallelEmbedding(context) if self.table is None and embedding is None else None
        self._embedding = self.table or self.own_embedding or embedding
        self._fc = UnquantizedLinearMethod(self._inputs, self._size, False, mine.placement)
        context.linears[self._inputs, self._size, None] = self._fc
        sizes = [self._inputs] * head.norm_before_fc, [self._target_size] * (len(head.layers) * head.fc_norm)
        self._input_norms, self._fc_norms = (
            [NormWeight(size, mine.placement) for size in norm_sizes] for norm_sizes in sizes
        )
        self._embedding_norm, self._hidden_norm, self._norm = (RMSNorm(mine) for _ in range(3))
        bias = head.attention_bias
        self._attention = Attention(mine, layer, qkv_bias=bias, out_bias=bias, in_features=2 * self._size)
        self._mlp = NormedMLP(mine, MLP(mine, head.intermediate_size, bias=head.mlp_bias))
        self._rotary = RotaryEmbedding(head.rope, model.head_dim, model.max_position_embeddings, mine.placement.device)
        drafted = msgspec.structs.replace(model, vocab_size=head.draft_vocab_size)
        self._head = ParallelLMHead(replace(mine, config=drafted))
        self.token_map = torch.zeros(head.draft_vocab_size, dtype=torch.int64, device=mine.placement.device)

    def combined(self, auxiliary: Tensor) -> Tensor:
        """Return hidden states [tokens, hidden_size of the head] of auxiliary [tokens, number * hidden_size]."""
        for norm in self._input_norms:
            auxiliary = self._ops.rms_norm(auxiliary, norm.weight)
        if self._fc_norms:
            parts = auxiliary.split(self._target_size, dim=1)
            pairs = zip(parts, self._fc_norms, strict=True)
            auxiliary = torch.cat([self._ops.rms_norm(part.contiguous(), norm.weight) for part, norm in pairs], dim=1)
        return self._fc.apply(auxiliary)

    def __call__(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return hidden states [tokens, hidden_size of the head] of token_ids [tokens] at ``positions`` + 1.

        ``hidden`` [tokens, hidden_size of the head] are those at ``positions``: combined, or results of this. The rest
        is as in TokenPredictor.
        """
        assert self._embedding is not None
        rotary = self._rotary(positions, None)
        embedded = self._parallel.all_reduce(self._embedding(token_ids))
        normed = self._hidden_norm(hidden)
        x = torch.cat((self._embedding_norm(embedded), normed), dim=1)
        if output_tokens is not None and not len(output_tokens):
            self._attention.store(x, rotary, backend)
            return hidden[:0]
        attended = self._attention(x, rotary, backend)
        residual = normed if self.config.norm_before_residual else hidden.clone()
        if output_tokens is not None:
            attended = attended.index_select(0, output_tokens)
            residual = residual.index_select(0, output_tokens)
        output = self._mlp.add(self._attention.project(attended), residual)
        normed = self._norm.add(output, residual)
        return normed if self.config.norm_output else residual

    def likeliest(self, hidden: Tensor) -> Tensor:
        """Return the most likely token ids [rows] int64 of its hidden states [rows, hidden_size of the head]."""
        drafts = self._head(hidden if self.config.norm_output else self._norm(hidden)).argmax(-1)
        return drafts + self.token_map[drafts] if self.config.has_token_map else drafts

    def weight_shards(self) -> WeightShards:
        """Yield its tensors, by their names in its own checkpoint."""
        yield from prefixed(
            "fc.", self._fc.weight_shards(0, ShardRange.full(self._size), ShardRange.full(self._inputs))
        )
        norms: list[tuple[str, NormWeight | RMSNorm]] = [
            *(("input_norm", norm) for norm in self._input_norms),
            *((f"fc_norm.{index}", norm) for index, norm in enumerate(self._fc_norms)),
            ("midlayer.input_layernorm", self._embedding_norm),
            ("midlayer.hidden_norm", self._hidden_norm),
            ("norm", self._norm),
        ]
        for name, norm in norms:
            yield f"{name}.weight", norm.weight_shard()
        yield from prefixed("midlayer.self_attn.", self._attention.weight_shards())
        yield from prefixed("midlayer.", self._mlp.weight_shards())
        yield from prefixed("lm_head.", self._head.weight_shards())
        if self.table is not None:
            yield "embed_tokens.weight", self.table.weight_shard()
        if self.config.has_token_map:
            yield "d2t", WeightShard.full(self.token_map)

    def process_weights_after_loading(self) -> None:
        for part in (self._fc, self._attention, self._mlp, self._head):
            part.process_weights_after_loading()


def _as_model(target: ModelConfig, head: Eagle3Config) -> ModelConfig:
    """Return the head's layer as a dense, unquantized model beside ``target``."""
    return msgspec.structs.replace(
        target,
        hidden_size=head.hidden_size,
        intermediate_size=head.intermediate_size,
        rms_norm_eps=head.rms_norm_eps,
        rope=head.rope,
        moe=None,
        has_output_gate=False,
        centered_norms=False,
        weight_format=UNQUANTIZED,
        quantization={},
        layer_forms={},
    )
