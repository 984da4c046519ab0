"""Muon for the matrices of the layers, AdamW for embeddings and norms."""

from __future__ import annotations

import torch
from torch import Tensor

MATRIX_RATE = 0.02
OTHER_RATE = 0.004
_MOMENTUM = 0.95
_BETAS = (0.9, 0.95)
_WEIGHT_DECAY = 0.01


class Optimizer:
    """``parameters`` are stacked over layers: [layers, rows, columns] are matrices for Muon."""

    def __init__(self, parameters: dict[str, Tensor]) -> None:
        self._matrices = [tensor for tensor in parameters.values() if tensor.ndim == 3]
        self._momenta = [torch.zeros_like(tensor) for tensor in self._matrices]
        others = [tensor for tensor in parameters.values() if tensor.ndim != 3]
        self._adam = torch.optim.AdamW(others, lr=OTHER_RATE, betas=_BETAS, weight_decay=0.0)

    @torch.no_grad()
    def step(self, factor: float) -> None:
        """Apply and clear the gradients; ``factor`` scales the learning rates."""
        for matrix, momentum in zip(self._matrices, self._momenta, strict=True):
            assert matrix.grad is not None
            momentum.lerp_(matrix.grad, 1 - _MOMENTUM)
            update = orthogonalized(matrix.grad.lerp(momentum, _MOMENTUM))
            rate = factor * MATRIX_RATE * max(1.0, matrix.shape[1] / matrix.shape[2]) ** 0.5
            matrix.mul_(1 - factor * MATRIX_RATE * _WEIGHT_DECAY).add_(update, alpha=-rate)
            matrix.grad = None
        for group in self._adam.param_groups:
            group["lr"] = factor * OTHER_RATE
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Drop all momenta, after a restart from older weights."""
        for momentum in self._momenta:
            momentum.zero_()
        self._adam.state.clear()


def orthogonalized(matrices: Tensor) -> Tensor:
    """Replace the singular values of matrices [layers, rows, columns] by about 1: five Newton-Schulz steps."""
    a = 3.4445
    b = -4.7750
    c = 2.0315
    x = matrices.to(torch.float32 if matrices.device.type == "cpu" else torch.bfloat16)  # CPUs emulate bfloat16
    tall = x.shape[1] > x.shape[2]
    x = x.mT if tall else x
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    done: Tensor = x.mT if tall else x
    return done.to(matrices.dtype)
