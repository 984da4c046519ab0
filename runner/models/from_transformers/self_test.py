"""The self-test of a transformers model: paged, chunked and mixed steps against the library's own eager forward.

Both compute in float32, whatever the model is served in.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import msgspec
import numpy as np
import torch
from torch import Tensor

from pdserve.config.parallel import shard_of
from pdserve.errors import ConfigError, shown
from pdserve.kv.groups import KVCacheGroups
from pdserve.kv.layout import KVLayout
from runner.attention import AttentionBackend
from runner.attention.build import build_backend
from runner.batch import AttentionBatch
from runner.kv_cache import KVCache
from runner.models.from_transformers.decoder import TransformersDecoder
from runner.models.from_transformers.loading import LIBRARY_ERRORS
from runner.placement import TensorPlacement

#: Relative error of logits (root mean square, in float32) up to which they count as equal. Paged and eager attention of
#: correct layers differ by 1e-6; a state that is lost between steps changes more.
_TOLERANCE = 1e-3
_TRIALS = 3  # Two experts of almost equal score may swap, but not in all trials; a fault shows in each.
_LENGTHS = (37, 23)
_LONGEST_WINDOW = 256  # longer windows are not exceeded by the test's prompts

#: Returns logits [tokens, vocab_size] float32 of each prompt by the unsplit model.
Reference = Callable[[Sequence[Sequence[int]]], list[Tensor]]
Part = tuple[int, int, int]  # (prompt, first token, number of tokens)


def check_exactness(
    decoder: TransformersDecoder, reference: Reference, layout: KVLayout, placement: TensorPlacement
) -> float:
    """Compare two prompts, in chunks and in mixed steps, with the library's eager forward; return the largest error.

    ``layout`` is this rank's. All ranks call it: together they compute the prompts, and one rank compares them with the
    unsplit model, whose layers it reads in parts. Raises ConfigError that names the kinds of layers if logits differ.
    """
    parallel = decoder.parallel
    position = parallel.position
    windows = [spec.window for spec in decoder.attention if spec.window is not None and spec.window <= _LONGEST_WINDOW]
    extra = -parallel.all_reduce_min(-max(windows, default=0))
    layout = layout.with_dtype("float32")
    placement = replace(placement, stored=torch.float32, dtype=torch.float32)
    smallest = [math.inf] * len(_LENGTHS)
    for seed in range(_TRIALS):
        rng = random.Random(seed)
        prompts = [[rng.randrange(decoder.config.vocab_size) for _ in range(length + extra)] for length in _LENGTHS]
        errors = torch.zeros(len(prompts), device=placement.device)
        problem = ""
        try:
            with decoder.in_float32():
                logits = _paged_logits(decoder, layout, placement, prompts)
                if position.is_last and position.shard == 0:
                    pairs = zip(logits, reference(prompts), strict=True)
                    errors += torch.tensor([_relative_error(ours, theirs) for ours, theirs in pairs]).to(errors)
        except LIBRARY_ERRORS as exc:
            problem = f"it fails in its self-test: {shown(str(exc))}"
        if problem := parallel.first_problem(problem):
            raise ConfigError(f"{decoder.config.architecture} through transformers: {problem}")
        errors = parallel.broadcast(errors, position.parallel.num_ranks - position.parallel.tp)
        smallest = [min(previous, new) for previous, new in zip(smallest, errors.tolist(), strict=True)]
        if max(smallest) <= _TOLERANCE:
            return max(smallest)
    kinds = sorted({str(spec) for spec in decoder.attention})
    raise ConfigError(
        f"{decoder.config.architecture}: logits on the paged KV cache differ from those of transformers' eager "
        f"forward by {max(smallest):.2g} of their size in float32, more than {_TOLERANCE:g}; its layers ask "
        f"for {', '.join(kinds)}. It is not served, as its tokens would be wrong"
    )


def _paged_logits(
    decoder: TransformersDecoder, layout: KVLayout, placement: TensorPlacement, prompts: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Return logits [tokens, vocab_size] float32 of each prompt, on ranks of the last stage; nothing on others."""
    page = layout.kernel_block_size
    needed = [-(-len(prompt) // page) for prompt in prompts]
    share = decoder.parallel.position.parallel.shares(decoder.config)[decoder.parallel.position.rank]
    groups = _without_windows(layout.groups)  # windows are masked: they need no blocks of their own here
    num_pages = sum(needed) * groups.num_groups
    num_layers = groups.block_layers(share.layers, layout.num_kv_heads)
    layout = KVLayout(num_pages, page, page, num_layers, layout.spec, groups)
    model = msgspec.structs.replace(shard_of(decoder.config, decoder.parallel.position), attention=decoder.attention)
    cache = KVCache(layout, placement.device, share if groups.heads else None)
    backend = build_backend("torch", model, cache, placement, len(prompts), 0)
    pages = np.random.default_rng(0).permutation(num_pages).astype(np.int32).reshape(groups.num_groups, -1)
    tables = [pages[:, : needed[0]], pages[:, needed[0] :]]
    logits: list[list[Tensor]] = [[], []]
    for step in _steps(*map(len, prompts)):
        batch, positions = _batch(step, tables, page, placement.device)
        backend.plan(batch)
        ids = [token for prompt, first, count in step for token in prompts[prompt][first : first + count]]
        hidden = _through_stages(decoder, torch.tensor(ids, device=placement.device), positions, backend)
        if not decoder.parallel.position.is_last:
            continue
        parts = decoder.logits(hidden).float().split([count for _, _, count in step])
        for (prompt, _, _), part in zip(step, parts, strict=True):
            logits[prompt].append(part)
    return [torch.cat(parts) for parts in logits if parts]


def _without_windows(groups: KVCacheGroups) -> KVCacheGroups:
    """Return a group for each kind of heads."""
    if not groups.heads:
        return KVCacheGroups()
    kinds = sorted(set(groups.heads))
    layers = tuple(kinds.index(groups.heads[group]) for group in groups.layers)
    return KVCacheGroups((None,) * len(kinds), layers, tuple(kinds))


def _through_stages(decoder: TransformersDecoder, ids: Tensor, positions: Tensor, backend: AttentionBackend) -> Tensor:
    """Return the last stage's hidden states [tokens, hidden_size], one stage after the other."""
    position = decoder.parallel.position
    hidden = ids
    for stage in range(position.parallel.pp):
        if stage:  # from the stage before
            sent = hidden if position.stage == stage - 1 else decoder.no_hidden(len(ids), torch.float32)
            hidden = decoder.parallel.broadcast(sent.contiguous(), (stage - 1) * position.parallel.tp)
        if position.stage == stage:
            hidden = decoder(hidden, positions, None, backend)
    return hidden


def _steps(first: int, second: int) -> list[list[Part]]:
    """Return steps that cut both prompts: alone, a chunk beside a prompt, chunks of both, single tokens."""
    a = first // 3
    b = second // 2
    return [
        [(0, 0, a)],
        [(0, a, a), (1, 0, b)],
        [(1, b, second - b - 1), (0, 2 * a, first - 2 * a - 1)],
        [(0, first - 1, 1), (1, second - 1, 1)],
    ]


def _batch(
    step: Sequence[Part], tables: Sequence[np.ndarray], page: int, device: torch.device
) -> tuple[AttentionBatch, Tensor]:
    """``tables``: of each prompt, the pages in each group [groups, pages]."""
    query_starts = np.cumsum([0, *(count for _, _, count in step)]).astype(np.int32)
    seq_lens = np.array([first + count for _, first, count in step], dtype=np.int32)
    width = max(table.shape[1] for table in tables)
    padded = [np.pad(tables[prompt], ((0, 0), (0, width - tables[prompt].shape[1]))) for prompt, _, _ in step]
    by_group = np.stack(padded, axis=1)  # [groups, rows, width]
    positions = np.concatenate([np.arange(first, first + count) for _, first, count in step])
    rows = np.repeat(np.arange(len(step)), np.diff(query_starts))
    slots = by_group[:, rows, positions // page].astype(np.int64) * page + positions % page
    batch = AttentionBatch.of_groups(
        query_starts,
        seq_lens,
        device_query_starts=torch.from_numpy(query_starts).to(device),
        device_seq_lens=torch.from_numpy(seq_lens).to(device),
        page_tables=list(torch.from_numpy(by_group).to(device)),
        slots=list(torch.from_numpy(slots).to(device)),
    )
    return batch, torch.from_numpy(positions).to(device)


def _relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).square().mean().sqrt() / expected.square().mean().sqrt()).item()
