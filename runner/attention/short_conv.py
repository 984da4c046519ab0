"""Short convolutions over the states of a rank: the interface, and plain torch."""

from __future__ import annotations

from abc import abstractmethod

from torch import Tensor

from runner.attention.recurrent import ConvStep, Recurrent
from runner.batch import AttentionBatch, ShortConvWeights
from runner.state_cache import StateCache


class ShortConv(Recurrent):
    """The state of a sequence is its last ``conv_width - 1`` inputs, in the model's dtype."""

    @abstractmethod
    def run(self, layer: int, x: Tensor, weights: ShortConvWeights) -> Tensor:
        """Return the convolution [tokens, channels] of x [tokens, channels]; advance the states of the sequences.

        ``layer`` counts the recurrent layers of this rank from 0 on.
        """


class TorchShortConv(ShortConv):
    """The reference, on any device."""

    def __init__(self, cache: StateCache) -> None:
        self._cache = cache
        self._step: ConvStep | None = None
        self._inputs: dict[int, Tensor] = {}  # inputs of a layer, by layer, for ``commit``

    def plan(self, batch: AttentionBatch, graph: bool) -> None:
        self._step = ConvStep.of(batch, self._cache.layout.spec.conv_width, self._cache.slots.device)
        self._inputs = {}

    def run(self, layer: int, x: Tensor, weights: ShortConvWeights) -> Tensor:
        step = self._step
        assert step is not None, "plan comes first"
        total, inputs = step.convolve(self._cache.conv[layer], x, weights.conv, weights.bias)
        if len(step.drafted):
            self._inputs[layer] = inputs
        return total.to(x.dtype)

    def commit(self, counts: Tensor) -> None:
        step = self._step
        assert step is not None, "run comes first"
        of_rows = counts.cpu().numpy()[step.drafted]
        for layer, inputs in self._inputs.items():
            step.commit(self._cache.conv[layer], inputs, of_rows)
        self._inputs = {}
