"""The base of decoder families: RMS norms, rotary attention and a gated MLP, with pre-norm residuals.

A family is a subclass named after its architecture, in a file of its own, and an entry in
``pdserve/model/families.py``; docs/adding-a-model.md shows one. It overrides how attention, MLPs or whole layers are
made, and ``checkpoint_name`` where its tensors have other names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from pdserve.config.parallel import shard_of
from pdserve.model.eagle3 import Eagle3Config
from pdserve.model.model_config import ModelConfig
from pdserve.pausing import Pausing
from runner.attention import AttentionBackend
from runner.batch import Activations
from runner.distributed.parallel_state import ParallelState
from runner.distributed.pipeline_stages import Beside
from runner.models.adapters.slots import AdapterSlots
from runner.models.layers.attention import Attention
from runner.models.layers.context import ModelContext
from runner.models.layers.decoder_layer import AnyLayer, DecoderLayer, Mixer, RMSNorm
from runner.models.layers.eagle3 import AuxiliaryStates, Eagle3Head
from runner.models.layers.latent_attention import LatentAttention
from runner.models.layers.mlp import MLP, MLPBlock
from runner.models.layers.moe import MixtureOfExperts
from runner.models.layers.rotary import RotaryEmbedding
from runner.models.layers.token_predictor import PredictorNames, TokenPredictor
from runner.models.layers.vocabulary import ParallelLMHead, VocabParallelEmbedding
from runner.models.layers.weight_shard import WeightShards
from runner.models.model import Model
from runner.models.vision.inputs import NO_IMAGE_INPUTS, NoImageInputs
from runner.placement import TensorPlacement


class Decoder(Model):
    """The first stage has the embedding, the last stage the final norm and the head.

    ``runner/loading/decoder_weights.py`` fills the weights; then the model can be called.
    """

    unused_tensors: tuple[str, ...] = ()  # first parts of the names of tensors that are not loaded
    embeds_whole: bool = False  # each shard has whole embeddings before the first layer, not its part of a sum
    predictor_names: PredictorNames | None = None  # None: no checkpoint has a layer that predicts further tokens

    def __init__(
        self,
        config: ModelConfig,
        parallel: ParallelState,
        placement: TensorPlacement,
        adapters: AdapterSlots | None = None,
    ) -> None:
        """``config`` describes the whole model; ``adapters`` None: its layers take none."""
        self.config = config
        self.context = ModelContext.build(config, parallel, placement, adapters)
        position = self.context.position
        self._parallel = parallel
        self.first_layer = position.layers.start
        self.embedding = VocabParallelEmbedding(self.context) if position.is_first else None
        self.layers = [self.make_layer(layer) for layer in range(len(position.layers))]
        self.context = replace(self.context, adapters=None)  # what makes drafts has the base's weights
        self._next_norms = [layer.input_norm for layer in self.layers[1:]]
        self.norm = RMSNorm(self.context) if position.is_last else None
        self.head = ParallelLMHead(self.context) if position.is_last else None
        drafts = config.num_draft_layers > 0 and position.is_last
        self.predictor = self._make_predictor() if drafts and config.draft_head is None else None
        self.draft_head = self._make_draft_head(config.draft_head) if drafts and config.draft_head is not None else None
        self.auxiliary = None if config.draft_head is None else AuxiliaryStates(self.context, config.draft_head)
        self.rotary = RotaryEmbedding(
            config.rope,
            config.rope_head_dim,
            config.max_position_embeddings,
            placement.device,
            None if config.vision is None else config.vision.rope_sections,
        )
        self.images: NoImageInputs = NO_IMAGE_INPUTS
        self.attention = shard_of(config, position).attention
        self.depends_on_length = self.rotary.depends_on_length

    def make_attention(self, layer: int) -> Attention | LatentAttention:
        """Create the attention of a layer; ``layer`` counts from 0 on this rank, without recurrent layers."""
        return Attention(self.context, layer)

    def make_mlp(self, layer: int) -> MLPBlock:
        """Create the MLP or the experts of a layer; ``layer`` counts from 0 in the whole model."""
        moe = self.config.moe
        if moe is None or moe.is_dense(layer):
            return MLP(self.context, self.config.intermediate_size)
        return MixtureOfExperts(self.context)

    def make_layer(self, layer: int) -> AnyLayer:
        self._number_parts(self.first_layer + layer)
        return DecoderLayer(self.context, self.make_mixer(layer), self.make_mlp(self.first_layer + layer))

    def make_mixer(self, layer: int) -> Mixer:
        """Create the token mixer of a layer; ``layer`` counts from 0 on this rank."""
        return self.make_attention(layer)

    def mixers_before(self, layer: int) -> tuple[int, int]:
        """Return how many layers of this rank before ``layer`` attend, and how many are recurrent."""
        layers = range(self.first_layer, self.first_layer + layer)
        return self.config.kv_layers_in(layers), sum(map(self.config.is_recurrent, layers))

    def _number_parts(self, layer: int) -> None:
        """Say to which layer the parts belong that are created next; ``layer`` counts from 0 in the whole model."""
        self.context = replace(self.context, layer=layer)

    def _make_predictor(self) -> TokenPredictor:
        assert self.predictor_names is not None, f"{self.config.architecture} has no layer that predicts further tokens"
        self._number_parts(self.config.num_layers)
        attention = self.make_attention(self.config.kv_layers_in(self.context.position.layers))
        layer = DecoderLayer(self.context, attention, self.make_mlp(self.config.num_layers))
        return TokenPredictor(self.context, layer, self.predictor_names, self.embedding)

    def _make_draft_head(self, head: Eagle3Config) -> Eagle3Head:
        return Eagle3Head(self.context, head, self.config.kv_layers_in(self.context.position.layers), self.embedding)

    def embed(self, inputs: Tensor) -> Tensor:
        """Return this shard's part of the embeddings of token ids, with those of images in their places."""
        assert self.embedding is not None
        return self.images.embed(self.embedding(inputs))

    def input_shards(self) -> WeightShards:
        """Yield the tensors of what the layers take beside hidden states, named behind "model."."""
        yield from ()

    def process_inputs_after_loading(self) -> None:
        """Bring the filled tensors of ``input_shards`` into the form that the model computes with."""

    def checkpoint_name(self, name: str) -> str:
        """Return the checkpoint's name of a tensor that Llama calls ``name``."""
        return name

    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Pausing[Tensor]:
        """Compute the layers of this rank; pause between two of them. See Model.

        Tokens that ``output_tokens`` leaves out need only the keys and values of the last layer. No call waits for the
        device, so a CUDA graph can capture them.
        """
        rotary = self.rotary(self.images.positions(positions), lengths)
        x, residual = self._begin(inputs)
        *others, last = self.layers
        self._keep(self.first_layer, residual)
        for number, (layer, next_norm) in enumerate(zip(others, self._next_norms, strict=True), self.first_layer + 1):
            output, residual = layer(x, residual, rotary, backend)
            self.images.after_layer(number - 1, residual)
            x = next_norm.add(output, residual)
            self._keep(number, residual)
            yield
        if output_tokens is not None and not len(output_tokens):
            last.store(x, rotary, backend)
            return residual[:0]
        output, residual = last(x, residual, rotary, backend, output_tokens)
        if self.norm is None:
            return residual.add_(self._parallel.all_reduce(output))
        normed = self.norm.add(output, residual)
        self._keep(self.config.num_layers, residual)
        return normed

    def beside(self, tokens: int) -> Beside | None:
        return None if self.auxiliary is None else self.auxiliary.beside(tokens)

    def predict(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Tensor:
        if self.draft_head is not None:
            return self.draft_head(token_ids, hidden, positions, backend, output_tokens)
        assert self.predictor is not None
        return self.predictor(token_ids, hidden, positions, self.rotary(positions, None), backend, output_tokens)

    def draft_inputs(self, hidden: Tensor) -> Tensor:
        if self.draft_head is None or self.auxiliary is None:
            return hidden
        return self.draft_head.combined(self.auxiliary.rows(len(hidden)))

    def likeliest(self, predicted: Tensor) -> Tensor:
        return super().likeliest(predicted) if self.draft_head is None else self.draft_head.likeliest(predicted)

    def logits(self, hidden: Tensor) -> Tensor:
        assert self.head is not None
        return self.head(hidden)

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        assert self.head is not None
        self.head.write(hidden, out)

    def run_products(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        for (in_features, *_), linear in self.context.linears.items():
            for count in tokens:
                linear.apply(self._zeros(count, in_features))
        if self.head is not None:
            for count in samples:
                self.logits(self._zeros(count, self.config.hidden_size))

    def _keep(self, layer: int, hidden: Tensor) -> None:
        """Keep the hidden states before ``layer``, counted in the whole model, if a head drafts from them."""
        if self.auxiliary is not None:
            self.auxiliary.keep(layer, hidden)

    def _zeros(self, rows: int, width: int) -> Tensor:
        return torch.zeros(rows, width, dtype=self.context.placement.dtype, device=self.context.placement.device)

    def _begin(self, inputs: Tensor) -> tuple[Activations, Tensor]:
        """Return x, normed for the first layer, and the residual."""
        norm = self.layers[0].input_norm
        if self.embedding is None:
            return norm(inputs), inputs
        embedded = self.embed(inputs)
        if self.context.position.parallel.tp == 1:
            return norm(embedded), embedded
        residual = torch.zeros_like(embedded)
        return norm.add(embedded, residual), residual
