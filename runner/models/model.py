"""A rank's part of a model, as runners call it.

| subclass                                    | computes                         | loaded by                  |
|---------------------------------------------|----------------------------------|----------------------------|
| Decoder and its families                    | with our layers and kernels      | loading/decoder_weights.py |
| TransformersDecoder (from_transformers/)    | with the layers of transformers  | loading/library_weights.py |
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from torch import Tensor

from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.model_config import ModelConfig
from pdserve.pausing import Pausing, complete
from runner.attention import AttentionBackend
from runner.distributed.pipeline_stages import Beside


class Model(ABC):
    """Token ids to hidden states, hidden states to logits."""

    config: ModelConfig  # the whole model's
    attention: tuple[AttentionSpec, ...]  # by layer of this rank; known once the weights are loaded
    depends_on_length: bool  # whether rotary frequencies depend on the length of a sequence

    @abstractmethod
    def forward(
        self,
        inputs: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Pausing[Tensor]:
        """Compute the layers of this rank for tokens at ``positions`` [tokens], integers. May pause between layers.

        ``inputs`` is the token ids [tokens] on the first stage, else the result of the stage before, which may be
        overwritten. The result is hidden states [tokens, hidden_size]: on the last stage normed for ``logits``, else
        the states after these layers, the next stage's input.

        ``lengths``: see RotaryEmbedding. ``backend`` has planned the same tokens. ``output_tokens`` [kept] selects, on
        the last stage, the tokens of the result.
        """

    def __call__(
        self,
        inputs: Tensor,
        positions: Tensor,
        lengths: Tensor | None,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Tensor:
        """Return the result of ``forward``."""
        return complete(self.forward(inputs, positions, lengths, backend, output_tokens))

    def beside(self, tokens: int) -> Beside | None:
        """Return what travels between pipeline stages beside the hidden states of a step; None if nothing does."""
        return None

    def predict(
        self,
        token_ids: Tensor,
        hidden: Tensor,
        positions: Tensor,
        backend: AttentionBackend,
        output_tokens: Tensor | None = None,
    ) -> Tensor:
        """Predict one token further, on the last stage of a model with draft layers; see TokenPredictor, Eagle3Head.

        The layer's keys and values belong to the last layer of ``backend``.
        """
        raise NotImplementedError(f"{type(self).__name__} predicts no further tokens")

    def draft_inputs(self, hidden: Tensor) -> Tensor:
        """Return what ``predict`` takes for the tokens of the latest step, whose ``hidden`` states are given."""
        return hidden

    def likeliest(self, predicted: Tensor) -> Tensor:
        """Return the most likely tokens [rows], integers, of results of ``predict``."""
        return self.logits(predicted).argmax(-1)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return [rows, vocab_size] from rows of hidden states [rows, hidden_size], on the last stage."""

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        """Write ``logits`` to ``out``, as a CUDA graph does."""
        out.copy_(self.logits(hidden))

    @abstractmethod
    def run_products(self, tokens: Sequence[int], samples: Sequence[int]) -> None:
        """Multiply by a weight of each shape for these numbers of ``tokens``, and compute logits of these ``samples``.

        cuBLAS chooses kernels by these numbers. Loading one that was not used before waits until the device is idle.
        """
