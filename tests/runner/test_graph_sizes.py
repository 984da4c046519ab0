"""Which steps have a CUDA graph, and what follows from it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from checkpoints import make_checkpoint, node_config

from pdserve.config.node_config import DeviceInfo
from pdserve.kv.layout import FP8_E4M3
from pdserve.records import NO_STEP, ScheduledSequence, StepPlan
from runner.graph_sizes import BatchDescriptor, GraphSizes
from runner.warmup import product_sizes

SIZES = GraphSizes.within(max_num_seqs=40, max_batch_tokens=2048)


def plan(*tokens: int) -> StepPlan:
    return StepPlan(NO_STEP, scheduled=tuple(ScheduledSequence(seq, count, 1) for seq, count in enumerate(tokens)))


def test_a_step_runs_as_the_smallest_graph_that_holds_it() -> None:
    def found(rows: int, tokens: int, longest: int) -> BatchDescriptor | None:
        return SIZES.find(BatchDescriptor(rows, tokens, longest))

    assert found(3, 3, 1) == BatchDescriptor(4, 4, row_tokens=1)
    assert found(33, 33, 1) == BatchDescriptor(40, 40, row_tokens=1)
    assert found(3, 70, 68) == BatchDescriptor(16, 96)
    assert found(17, 70, 20) == BatchDescriptor(40, 192)
    assert found(16, 64, 4) == BatchDescriptor(16, 64)


def test_a_step_with_drafts_has_a_graph_of_its_own() -> None:
    sizes = GraphSizes.within(max_num_seqs=256, max_batch_tokens=2048, max_drafts=3)
    assert sizes.find(BatchDescriptor(1, 4, 4)) == BatchDescriptor(1, 4, row_tokens=4)
    assert sizes.find(BatchDescriptor(3, 7, 3)) == BatchDescriptor(4, 16, row_tokens=4)
    assert sizes.find(BatchDescriptor(3, 3, 1)) == BatchDescriptor(4, 4, row_tokens=1)
    assert sizes.find(BatchDescriptor(8, 20, 5)) == BatchDescriptor(16, 32)
    assert sizes.find(BatchDescriptor(100, 400, 4)) == BatchDescriptor(112, 448, row_tokens=4)
    assert sizes.find(BatchDescriptor(200, 800, 4)) is None
    assert sizes.find(BatchDescriptor(200, 200, 1)) == BatchDescriptor(224, 224, row_tokens=1)


@pytest.mark.parametrize("mixed", [((16, 32), (16, 64)), ()])
def test_few_tokens_behind_a_handoff_have_a_small_graph(mixed: tuple[tuple[int, int], ...]) -> None:
    sizes = GraphSizes.within(max_num_seqs=40, max_batch_tokens=2048, mixed=mixed)
    assert sizes.find(BatchDescriptor(1, 4, 4)) == BatchDescriptor(1, 4, row_tokens=4)
    assert sizes.find(BatchDescriptor(11, 17, 4)) == BatchDescriptor(16, 24, row_tokens=4)
    assert sizes.find(BatchDescriptor(34, 37, 4)) == BatchDescriptor(40, 48, row_tokens=4)
    assert sizes.find(BatchDescriptor(11, 11, 1)) == BatchDescriptor(16, 16, row_tokens=1)


def test_long_prompts_have_no_graph_where_their_kernels_cannot_be_captured() -> None:
    sizes = GraphSizes.within(max_num_seqs=40, max_batch_tokens=2048, mixed=())
    assert sizes.find(BatchDescriptor(2, 9, 8)) is None
    assert sizes.most_mixed_tokens == 0


def test_steps_beyond_all_sizes_have_no_graph() -> None:
    assert SIZES.have(plan(*[1] * 40))
    assert SIZES.have(plan(1, SIZES.most_mixed_tokens - 1))
    assert not SIZES.have(plan(1, SIZES.most_mixed_tokens))


def test_no_size_exceeds_the_limits_of_a_step() -> None:
    small = GraphSizes.within(max_num_seqs=3, max_batch_tokens=100)
    assert max(descriptor.rows for descriptor in small.descriptors) == 3
    assert small.most_tokens == small.most_mixed_tokens == 96
    assert GraphSizes.within(max_num_seqs=8, max_batch_tokens=16).most_mixed_tokens == 0


def test_padding_adds_at_most_a_quarter_to_large_decode_steps() -> None:
    sizes = GraphSizes.within(max_num_seqs=1500, max_batch_tokens=2048)
    for rows in range(65, 1501):
        descriptor = sizes.find(BatchDescriptor(rows, rows, 1))
        assert descriptor is not None
        assert descriptor.rows <= 1.25 * rows


def test_the_largest_sizes_come_first() -> None:
    tokens = [descriptor.tokens for descriptor in SIZES.descriptors]
    assert tokens == sorted(tokens, reverse=True)


H100 = DeviceInfo(kind="cuda", index=0, name="H100", memory=80 << 30, capability=(9, 0))
A100 = DeviceInfo(kind="cuda", index=0, name="A100", memory=80 << 30, capability=(8, 0))


@pytest.mark.parametrize(
    ("backend", "device", "kv_dtype", "most"),
    [
        ("flashinfer", H100, "bfloat16", 1408),
        ("flashinfer", H100, FP8_E4M3, 512),
        ("flashinfer", A100, "bfloat16", 512),
        ("triton", H100, "bfloat16", 512),
    ],
)
def test_steps_of_hundreds_of_tokens_have_graphs_where_fa3_attends(
    tmp_path: Path, backend: str, device: DeviceInfo, kv_dtype: str, most: int
) -> None:
    config = node_config(make_checkpoint(tmp_path, "llama"), max_num_seqs=40, max_batch_tokens=2048)
    layout = config.kv_layout.with_dtype(kv_dtype)
    config = msgspec.structs.replace(config, attention_backend=backend, device=device, kv_layout=layout)
    assert GraphSizes.of_node(config).most_mixed_tokens == most


def test_more_sequences_add_few_graphs(tmp_path: Path) -> None:
    """Each adds 25 ms to a node's start."""
    config = node_config(make_checkpoint(tmp_path, "llama"), max_num_seqs=512, max_batch_tokens=8192)
    config = msgspec.structs.replace(config, attention_backend="flashinfer", device=H100)
    sizes = GraphSizes.of_node(config)
    few = GraphSizes.of_node(msgspec.structs.replace(config, max_num_seqs=256))
    assert len(few.descriptors) < len(sizes.descriptors) <= len(few.descriptors) + 6
    assert sizes.find(BatchDescriptor(300, 300, 1)) == BatchDescriptor(320, 320, 1)


@pytest.mark.parametrize(("max_num_seqs", "numbers"), [(64, 64), (1024, 1024), (2000, 1024 + 7)])
def test_numbers_of_samples_to_try_do_not_grow_with_the_largest_batch(
    tmp_path: Path, max_num_seqs: int, numbers: int
) -> None:
    config = node_config(make_checkpoint(tmp_path, "llama"), max_num_seqs=max_num_seqs, max_batch_tokens=4096)
    _, samples = product_sizes(config)
    assert len(samples) == len(set(samples)) == numbers
    assert max_num_seqs - 128 < max(samples) <= max_num_seqs
