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
