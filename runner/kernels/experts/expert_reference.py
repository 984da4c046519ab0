"""Plain torch forms of the kernels for mixtures of experts. ``sum_of_experts`` waits for the device."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from runner.batch import Routing, SharedGate


def choose_experts(
    logits: Tensor,
    bias: Tensor | None,
    *,
    top_k: int,
    sigmoid: bool,
    renormalize: bool,
    groups: tuple[int, int],
    scale: float,
    best_of_group: int = 2,
) -> Routing:
    """Return the ``top_k`` experts of each token by logits [tokens, experts] float32, as ``MoEConfig`` describes.

    bias [experts] float32 is the correction bias. ``groups``: how many groups of experts there are, and are kept.
    """
    scores = logits.sigmoid() if sigmoid else logits.softmax(-1)
    choice = scores if bias is None else scores + bias
    num_groups, kept = groups
    if num_groups > 1:
        grouped = choice.view(len(logits), num_groups, -1)
        best = grouped.topk(best_of_group, dim=-1).values.sum(-1).topk(kept, dim=-1).indices
        mask = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=logits.device).scatter_(1, best, True)
        choice = grouped.masked_fill(~mask[:, :, None], -torch.inf).flatten(1)
    experts = choice.topk(top_k, dim=-1).indices
    weights = scores.gather(1, experts)
    if renormalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routing(weights * scale, experts.to(torch.int32))


def sum_of_experts(
    x: Tensor,
    routing: Routing,
    local: range,
    expert: Callable[[int, Tensor], Tensor],
    shared: Tensor | None = None,
    gate: SharedGate | None = None,
) -> Tensor:
    """Return the weighted sum of the chosen experts, and of ``shared``, for x [tokens, size]; summed in float32.

    ``expert(number, rows)`` computes an expert of ``local`` for rows [n, size]; experts elsewhere are left out.
    """
    total = (
        torch.zeros(x.shape, dtype=torch.float32, device=x.device)
        if shared is None
        else shared.to(torch.float32, copy=True)
    )
    if gate is not None:
        total *= F.linear(gate.inputs, gate.weight).float().sigmoid()
    top_k = routing.experts.shape[1]
    numbers, order = routing.experts.flatten().sort(stable=True)
    weights = routing.weights.flatten()[order, None]
    tokens = order // top_k
    expert_numbers, counts = numbers.unique_consecutive(return_counts=True)
    begin = 0
    for number, count in zip(expert_numbers.tolist(), counts.tolist(), strict=True):
        mine = slice(begin, begin + count)
        begin += count
        if number in local:
            part = expert(number, x.index_select(0, tokens[mine]))
            total.index_add_(0, tokens[mine], part.float() * weights[mine])
    return total.to(x.dtype)
