"""Every runner and backend registers the same bytes for the same tokens, so that any of them feeds any other."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from checkpoints import make_checkpoint
from fast_set import sampled
from stepper import GREEDY
from torch import Tensor

import runner
from pdserve.config.attention_backends import Platform
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.config.runner_oracle import VARIABLE
from pdserve.kv.layout import DTYPE_BYTES, KVLayout, KVRegion, KVShare
from pdserve.records import DigestOrder, NewSequence, ScheduledSequence, StepPlan
from pdserve.rpc.protobuf import pack_tokens
from runner.kv_digest import KVDigester
from runner.v1.runner import RunnerV1
from runner.v2.runner import RunnerV2

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="Triton's interpreter is on where no GPU is")

# Runners and backends that run on a CPU (Triton in its interpreter), and those that run on a GPU.
HERE = [("V1", "torch"), ("V1", "triton"), ("V2", "triton")]
ON_A_GPU = [("V1", "torch"), ("V1", "triton"), ("V1", "flashinfer"), ("V2", "triton"), ("V2", "flashinfer")]
BLOCK_SIZES = {16: 16, 32: 32, 48: 16, 64: 64, 96: 32, 128: 64}  # tokens: the kernel page
NUM_BLOCKS = 5
LAYERS = 2
KV_HEADS = 2
HEAD_DIM = 64
NEW = 6  # tokens, half of them before the end of a page and of a block


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    # 16 bits and heads of 64, which FlashInfer can do, too.
    return make_checkpoint(path, "qwen3", dtype="bfloat16", num_hidden_layers=LAYERS, head_dim=HEAD_DIM)


def configure(
    checkpoint: Path, device: str, version: str, backend: str, block_size: int, dtype: str = "bfloat16"
) -> NodeConfig:
    options = NodeOptions(
        model=str(checkpoint),
        dtype=dtype,
        block_size=block_size,
        attention_backend=backend,
        kv_cache_memory=NUM_BLOCKS * block_size * LAYERS * 2 * KV_HEADS * HEAD_DIM * DTYPE_BYTES[dtype],
        max_num_seqs=4,
        threads=1,
    )
    platform = Platform(device=device, has_triton=True, has_flashinfer=device == "cuda", interpreted=device == "cpu")
    info = DeviceInfo(kind=device, index=0, name=device, memory=1 << 36)
    config = resolve(options, info, {VARIABLE: {"V1": "0", "V2": "1"}[version]}, platform)
    assert (config.decision.runner, config.attention_backend) == (version, backend)
    return config


@contextmanager
def built(config: NodeConfig) -> Iterator[RunnerV1 | RunnerV2]:
    model_runner = runner.build(config, lambda stage, fraction: None)
    assert isinstance(model_runner, RunnerV1 | RunnerV2)
    yield model_runner
    model_runner.close()


def read_block(region: KVRegion, layout: KVLayout, block: int) -> Tensor:
    """Return the bytes that a peer reads: [pages of a block, elements of a page]."""
    data = ctypes.string_at(region.address + block * layout.block_bytes, layout.block_bytes)
    dtype: torch.dtype = getattr(torch, layout.dtype)
    return torch.frombuffer(bytearray(data), dtype=dtype).view(layout.pages_per_block, -1)


@pytest.mark.parametrize(("block_size", "page"), BLOCK_SIZES.items())
def test_every_runner_and_backend_resolves_to_one_layout(checkpoint: Path, block_size: int, page: int) -> None:
    layouts = [configure(checkpoint, "cuda", *choice, block_size).kv_layout for choice in ON_A_GPU]
    layouts += [configure(checkpoint, "cpu", *choice, block_size).kv_layout for choice in HERE]
    pages = NUM_BLOCKS * block_size // page
    for layout in layouts:
        assert layout.shape == (pages, KV_HEADS, LAYERS, 2, page, HEAD_DIM)
        assert layout.strides[-2:] == (HEAD_DIM, 1)
        assert layout == layouts[0]


@interpreted
@pytest.mark.parametrize(("version", "backend"), HERE)
@pytest.mark.parametrize("block_size", BLOCK_SIZES)
def test_the_registered_memory_has_the_resolved_layout(
    checkpoint: Path, version: str, backend: str, block_size: int
) -> None:
    config = configure(checkpoint, "cpu", version, backend, block_size)
    with built(config) as model_runner:
        layout = model_runner.kv_layout
        region = model_runner.kv_region
        cache = model_runner._cache.tensor
        assert layout == config.kv_layout
        assert (tuple(cache.shape), cache.stride(), cache.dtype) == (layout.shape, layout.strides, torch.bfloat16)
        assert (region.address, region.num_bytes) == (cache.data_ptr(), layout.total_bytes)
        assert layout.page_bytes == cache.stride(0) * cache.itemsize
        with torch.inference_mode():
            for page in range(layout.shape[0]):
                cache[page] = page
        for block in range(NUM_BLOCKS):
            first = block * layout.pages_per_block
            pages = range(first, first + layout.pages_per_block)
            assert [set(row.tolist()) for row in read_block(region, layout, block)] == [{page} for page in pages]


@interpreted
@pytest.mark.parametrize("block_size", sampled(BLOCK_SIZES, every=2))
def test_a_step_writes_the_same_bytes_with_every_runner_and_backend(checkpoint: Path, block_size: int) -> None:
    """Keys and values of every layer, head and token have the same offsets."""
    ends = (BLOCK_SIZES[block_size], block_size)  # tokens: end of a kernel page, end of a block
    lengths = [end + NEW // 2 for end in ends]
    new = tuple(
        NewSequence(seq, pack_tokens([at % 100 for at in range(length)]), length, length - NEW, blocks, GREEDY)
        for seq, (length, blocks) in enumerate(zip(lengths, [(3, 0), (4, 1)], strict=True))
    )
    plan = StepPlan(0, new=new, scheduled=tuple(ScheduledSequence(seq, NEW, 1) for seq in range(len(new))))
    caches = []
    for version, backend in HERE:
        with built(configure(checkpoint, "cpu", version, backend, block_size, "float32")) as model_runner:
            model_runner.launch(plan).result()
            layout = model_runner.kv_layout
            region = model_runner.kv_region
            caches.append(torch.stack([read_block(region, layout, block) for block in range(NUM_BLOCKS)]))
    assert caches[0].count_nonzero() == len(new) * NEW * LAYERS * 2 * KV_HEADS * HEAD_DIM
    for cache in caches[1:]:
        torch.testing.assert_close(cache, caches[0], atol=1e-4, rtol=1e-4)


@interpreted
@pytest.mark.parametrize(("version", "backend"), [("V1", "torch"), ("V2", "triton")])
def test_digests_are_those_of_the_bytes_that_a_peer_reads(checkpoint: Path, version: str, backend: str) -> None:
    """Digests include the tokens of the same step. A step without tokens can order digests; no step is needed."""
    config = configure(checkpoint, "cpu", version, backend, 16)
    order = DigestOrder((3, 1), 16 + NEW)
    new = NewSequence(0, pack_tokens(range(3, 3 + 16 + NEW)), 16 + NEW, 0, (3, 1), GREEDY)
    with built(config) as model_runner:
        plan = StepPlan(0, new=(new,), scheduled=(ScheduledSequence(0, 16 + NEW, 1),), digests=(order,))
        first = model_runner.launch(plan).result()
        later = model_runner.launch(StepPlan(1, digests=(order, DigestOrder((3,), 16)))).result()
        beside = model_runner.digest(order).result()
        layout = model_runner.kv_layout
        region = model_runner.kv_region
        read = torch.cat([read_block(region, layout, block) for block in range(layout.num_blocks)])
    expected = KVDigester(read, layout, KVShare.whole(layout)).compute([order]).tolist()
    assert first.digests == (tuple(expected),)
    assert later.digests == (tuple(expected), (expected[0],))
    assert beside == tuple(expected)
    assert expected[0] != expected[1]
