"""The state space of Mamba2 (arXiv:2405.21060) in plain torch, in float32.

For each head, a state S [value_dim, key_dim] and a token with query C, key B, value x and time step Δ:

    S ← exp(-exp(A) Δ) S + Δ x Bᵀ        output = S C + D x

That is the gated delta rule without its correction, so the names of inputs are the same: β is the time step.
``state_space_chunks`` computes many tokens at once. γ is the product of decays up to a token, D_ij = γ_i / γ_j, j ≤ i:

    output = γ C Sᵀ + lower part of (C Bᵀ ∘ D) (Δ x) + D x        S ← γ_last S + (Δ x)ᵀ (γ_last / γ B)
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.batch import Mamba2Weights
from runner.kernels.gated_delta_reference import DeltaInputs

_CHUNK = 64  # tokens


def steps_of(dt: Tensor, weights: Mamba2Weights) -> tuple[Tensor, Tensor]:
    """Return the time steps and the logarithms of decays, each [tokens, heads] float32, of dt [tokens, heads]."""
    step = F.softplus(dt.float() + weights.dt_bias).clamp(weights.least_step, weights.most_step)
    return step, -weights.a_log.exp() * step


def state_space_step(inputs: DeltaInputs, state: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [n, heads, value_dim] and the new states of one token of each of n sequences.

    state [n, heads, value_dim, key_dim]; skip [heads] is D.
    """
    q, k, v, step, log_decay = inputs
    state = state * log_decay.exp()[..., None, None] + (v * step[..., None])[..., None] * k[..., None, :]
    return (state @ q[..., None]).squeeze(-1) + v * skip[:, None], state


def state_space_chunks(inputs: DeltaInputs, state: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [tokens, heads, value_dim] and the new state of consecutive tokens of one sequence.

    state [heads, value_dim, key_dim].
    """
    q, k, v, step, log_decay = inputs
    outputs = []
    for first in range(0, len(q), _CHUNK):
        part = slice(first, first + _CHUNK)
        # [heads, tokens of the chunk, …]
        queries, keys, values = (tensor[part].transpose(0, 1) for tensor in (q, k, v))
        scaled = values * step[part].t()[..., None]
        total = log_decay[part].t().cumsum(-1)[..., None]  # log γ
        hidden = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=q.device).triu(1)
        decays = (total - total.mT).masked_fill(hidden, -torch.inf).exp()  # D
        output = total.exp() * (queries @ state.mT) + (queries @ keys.mT * decays) @ scaled
        outputs.append((output + values * skip[:, None, None]).transpose(0, 1))
        last = total[:, -1:]
        state = last.exp() * state + scaled.mT @ ((last - total).exp() * keys)
    return torch.cat(outputs), state
