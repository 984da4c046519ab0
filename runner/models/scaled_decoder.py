"""The base of hybrids with Mamba2: embeddings and logits are multiplied by factors."""

from __future__ import annotations

from torch import Tensor

from pdserve.model.mamba2 import Mamba2Config
from runner.models.decoder import Decoder


class ScaledDecoder(Decoder):
    @property
    def mamba2(self) -> Mamba2Config:
        assert self.config.mamba2 is not None
        return self.config.mamba2

    def mixers_before(self, layer: int) -> tuple[int, int]:
        """Return how many layers of this rank before ``layer`` attend, and how many are recurrent."""
        layers = range(self.first_layer, self.first_layer + layer)
        return self.config.kv_layers_in(layers), sum(map(self.config.is_recurrent, layers))

    def embed(self, inputs: Tensor) -> Tensor:
        embedded = super().embed(inputs)
        scale = self.mamba2.embedding_scale
        return embedded if scale == 1 else embedded * scale

    def logits(self, hidden: Tensor) -> Tensor:
        return self._scaled(super().logits(hidden))

    def write_logits(self, hidden: Tensor, out: Tensor) -> None:
        super().write_logits(hidden, out)
        self._scaled(out)

    def _scaled(self, logits: Tensor) -> Tensor:
        """Scale logits in place."""
        return logits if self.mamba2.logit_scale == 1 else logits.mul_(self.mamba2.logit_scale)
