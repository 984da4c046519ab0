"""The gated delta rule (arXiv:2412.06464) and the short convolution before it in plain torch, in float32.

For each head, a state S [value_dim, key_dim] and a token with query q, key k (both of length 1), value v, decay α and
β between 0 and 1:

    S ← α S        S ← S + β (v - S k) kᵀ        output = S q / √key_dim

``delta_rule_chunks`` computes many tokens at once. With γ the product of decays up to a token, D_ij = γ_i / γ_j for
j ≤ i, and U the corrections β (v - S k) of all tokens of a chunk, as rows:

    (I + strict lower part of β K Kᵀ ∘ D) U = β (V - γ K Sᵀ)
    output = (γ Q Sᵀ + lower part of (Q Kᵀ ∘ D) U) / √key_dim        S ← γ_last S + Uᵀ (γ_last / γ K)
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.batch import GatedDeltaWeights

NORM_EPS = 1e-6  # added to squared lengths of queries and keys
_CHUNK = 64  # tokens


class DeltaInputs(NamedTuple):
    """Inputs of the delta rule for some tokens, in float32."""

    q: Tensor  # [tokens, heads, key_dim], of length 1; each key head is repeated for its value heads
    k: Tensor  # [tokens, heads, key_dim], of length 1, repeated as well
    v: Tensor  # [tokens, heads, value_dim]
    beta: Tensor  # [tokens, heads]
    log_decay: Tensor  # [tokens, heads]

    def of(self, tokens: Tensor | slice) -> DeltaInputs:
        return DeltaInputs(*(tensor[tokens] for tensor in self))


def gates_of(ba: Tensor, weights: GatedDeltaWeights) -> tuple[Tensor, Tensor]:
    """Return β, and the logarithm of α, each [tokens, value_heads] float32, of ba [tokens, 2 * value_heads]."""
    b, a = ba.float().chunk(2, dim=-1)
    return b.sigmoid(), -weights.a_log.exp() * F.softplus(a + weights.dt_bias)


def normed(x: Tensor) -> Tensor:
    """Return heads x [..., dim] scaled to length 1."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + NORM_EPS)


def delta_rule_step(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [n, heads, value_dim] and the new states of one token of each of n sequences.

    state [n, heads, value_dim, key_dim].
    """
    q, k, v, beta, log_decay = inputs
    state = state * log_decay.exp()[..., None, None]
    recalled = (state @ k[..., None]).squeeze(-1)
    state = state + ((v - recalled) * beta[..., None])[..., None] * k[..., None, :]
    return (state @ q[..., None]).squeeze(-1) * q.shape[-1] ** -0.5, state


def delta_rule_chunks(inputs: DeltaInputs, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the output [tokens, heads, value_dim] and the new state of consecutive tokens of one sequence.

    state [heads, value_dim, key_dim].
    """
    q, k, v, beta, log_decay = inputs
    outputs = []
    for first in range(0, len(q), _CHUNK):
        part = slice(first, first + _CHUNK)
        # [heads, tokens of the chunk, …]
        queries, keys, values = (tensor[part].transpose(0, 1) for tensor in (q, k, v))
        betas = beta[part].t()[..., None]
        total = log_decay[part].t().cumsum(-1)[..., None]  # log γ
        hidden = torch.ones(total.shape[1], total.shape[1], dtype=torch.bool, device=q.device).triu(1)
        decays = (total - total.mT).masked_fill(hidden, -torch.inf).exp()  # D
        system = betas * (keys @ keys.mT) * decays  # its diagonal counts as ones
        right = betas * (values - total.exp() * (keys @ state.mT))
        corrections = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
        output = total.exp() * (queries @ state.mT) + (queries @ keys.mT * decays) @ corrections
        outputs.append(output.transpose(0, 1) * q.shape[-1] ** -0.5)
        last = total[:, -1:]
        state = last.exp() * state + corrections.mT @ ((last - total).exp() * keys)
    return torch.cat(outputs), state
