"""The unsplit model's eager logits, on one rank that cannot hold it: its layers are read a few at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runner.models.from_transformers.part import ModelPart, body_of, layers_of

#: Builds a part of the model, with the library's eager attention.
BuildPart = Callable[[ModelPart], Any]


class _LayerWindow:
    """The layers that are in memory: one range of ``size`` layers at a time."""

    def __init__(self, build: BuildPart, num_layers: int, size: int) -> None:
        self._build = build
        self._num_layers = num_layers
        self._size = size
        self._range = range(0)
        self._layers = nn.ModuleList()

    def layer(self, index: int) -> nn.Module:
        if index not in self._range:
            self._layers = nn.ModuleList()  # frees them before others are read
            first = index // self._size * self._size
            self._range = range(first, min(first + self._size, self._num_layers))
            model = self._build(ModelPart(self._num_layers, self._range, is_first=False, is_last=False))
            self._layers = layers_of(body_of(model), self._num_layers)[1]
        return self._layers[index]


class _ReadWhenCalled(nn.Module):
    def __init__(self, window: _LayerWindow, index: int) -> None:
        super().__init__()
        self._window = window
        self._index = index

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._window.layer(self._index)(*args, **kwargs)


@torch.inference_mode()
def unsplit_logits(
    build: BuildPart, num_layers: int, layers_at_once: int, prompts: Sequence[Sequence[int]], device: torch.device
) -> list[Tensor]:
    """Return logits [tokens, vocab_size] float32 of each prompt by the library's own eager forward."""
    model = build(ModelPart(num_layers, range(0)))
    window = _LayerWindow(build, num_layers, layers_at_once)
    layers = layers_of(body_of(model), num_layers)[1]
    for index in range(num_layers):
        layers[index] = _ReadWhenCalled(window, index)
    longest = max(map(len, prompts))
    # Layers are read once for all prompts. No token attends to the padding behind it.
    padded = torch.tensor([[*prompt, *[0] * (longest - len(prompt))] for prompt in prompts], device=device)
    logits: Tensor = model(input_ids=padded, use_cache=False).logits
    return [row[: len(prompt)].float() for row, prompt in zip(logits, prompts, strict=True)]
