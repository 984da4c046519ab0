"""Random steps for attention back ends, and their reference results in plain torch."""

from __future__ import annotations

import random
from contextlib import nullcontext
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pdserve.kv.layout import FP8_E4M3, AnyKVCacheSpec, FullAttentionSpec, KVLayout, KVScales, LatentSpec
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.latent import LatentConfig
from pdserve.model.model_config import ModelConfig
from pdserve.model.rope import RopeConfig
from runner.attention import AttentionBackend, LatentBackend
from runner.attention.build import build_backend
from runner.batch import AttentionBatch, HeadNorms, LatentNorm, RotaryCosSin
from runner.kv_cache import KVCache
from runner.models.layers.latent_attention import attend
from runner.placement import TensorPlacement

_ANY_PAGE = 1 << 30  # entries behind a sequence's pages must never be read
_MAX_SEQS = 64


@dataclass(frozen=True)
class Shape:
    """The attention of a model with one layer per sliding window."""

    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    page: int = 16
    windows: tuple[int | None, ...] = (None,)
    has_norms: bool = False
    num_pages: int = 160
    spec: AttentionSpec | None = None  # attention of all layers, in place of ``windows``
    scales: KVScales | None = None  # scales of every layer of an FP8 cache; None: the cache has the step's dtype
    latent: LatentConfig | None = None  # in place of ``kv_heads`` and ``head_dim``

    @property
    def width(self) -> int:
        """Projected values of a token: queries, then keys and values, or a row of latents."""
        if self.latent is None:
            return (self.heads + 2 * self.kv_heads) * self.head_dim
        return self.heads * self.latent.qk_head_dim + self.latent.row_size

    def config(self) -> ModelConfig:
        return ModelConfig(
            architecture="Qwen3ForCausalLM" if self.has_norms else "LlamaForCausalLM",
            vocab_size=8,
            hidden_size=self.heads * self.head_dim,
            intermediate_size=8,
            num_layers=len(self.windows),
            num_heads=self.heads,
            num_kv_heads=1 if self.latent else self.kv_heads,
            head_dim=self.latent.row_size if self.latent else self.head_dim,
            latent=self.latent,
            rms_norm_eps=1e-6,
            rope=RopeConfig(theta=1e4),
            max_position_embeddings=4096,
            dtype="float32",
            attention=self.specs(),
        )

    def specs(self) -> tuple[AttentionSpec, ...]:
        if self.spec is not None:
            return (self.spec,) * len(self.windows)
        return tuple(AttentionSpec(scale=self.head_dim**-0.5, window=window) for window in self.windows)

    def layout(self, dtype: torch.dtype) -> KVLayout:
        return KVLayout(
            num_blocks=self.num_pages,
            block_size=self.page,
            kernel_block_size=self.page,
            num_layers=len(self.windows),
            spec=self._kv_cache_spec(FP8_E4M3 if self.scales else str(dtype).removeprefix("torch.")),
        )

    def _kv_cache_spec(self, dtype: str) -> AnyKVCacheSpec:
        if self.latent is not None:
            return LatentSpec(1, self.latent.row_size, dtype)
        return FullAttentionSpec(self.kv_heads, self.head_dim, dtype)


@dataclass
class Inputs:
    """Device tensors of a step, at fixed addresses while ``fill`` replaces their contents."""

    shape: Shape
    device: torch.device
    dtype: torch.dtype
    rows: int
    tokens: int
    batch: AttentionBatch = field(init=False)
    qkv: list[Tensor] = field(init=False)  # per layer
    rotary: RotaryCosSin = field(init=False)

    @property
    def longest(self) -> int:
        """The most tokens that ``fill`` may give a sequence."""
        return self.tokens if self.tokens > self.rows else 1

    def __post_init__(self) -> None:
        def zeros(*size: int, dtype: torch.dtype) -> Tensor:
            return torch.zeros(*size, dtype=dtype, device=self.device)

        latent = self.shape.latent
        half = (latent.qk_rope_head_dim if latent else self.shape.head_dim) // 2
        self.qkv = [zeros(self.tokens, self.shape.width, dtype=self.dtype) for _ in self.shape.windows]
        self.rotary = RotaryCosSin(*(zeros(self.tokens, half, dtype=torch.float32) for _ in range(2)))
        self.batch = AttentionBatch(
            query_starts=np.zeros(1, dtype=np.int32),
            seq_lens=np.zeros(0, dtype=np.int32),
            device_query_starts=zeros(self.rows + 1, dtype=torch.int32),
            device_seq_lens=zeros(self.rows, dtype=torch.int32),
            # Rows further apart than they are long, as in a table of more columns than a step needs.
            page_table=zeros(self.rows, self.shape.num_pages + 3, dtype=torch.int32)[:, :-3],
            slots=zeros(self.tokens, dtype=torch.int64),
        )

    def fill(self, sequences: list[tuple[int, int]], seed: int) -> None:
        """Fill with sequences of (tokens in the cache, new tokens); rows beyond them pad the batch."""
        draw = random.Random(seed)
        pages = draw.sample(range(self.shape.num_pages), self.shape.num_pages)
        table = np.full((self.rows, self.shape.num_pages), _ANY_PAGE, dtype=np.int32)
        slots = np.full(self.tokens, -1, dtype=np.int64)
        starts = np.arange(self.rows + 1, dtype=np.int32)
        lens = np.zeros(self.rows, dtype=np.int32)
        token = 0
        for row, (cached, new) in enumerate(sequences):
            lens[row] = cached + new
            count = -(-(cached + new) // self.shape.page)
            table[row, :count] = [pages.pop() for _ in range(count)]
            positions = np.arange(cached, cached + new)
            slots[token : token + new] = table[row, positions // self.shape.page].astype(np.int64) * self.shape.page
            slots[token : token + new] += positions % self.shape.page
            token += new
            starts[row + 1 :] += new - 1
        starts = np.minimum(starts, self.tokens)  # a padding row owns a token only if there is one
        generator = torch.Generator().manual_seed(seed)
        for qkv in self.qkv:
            qkv.copy_(torch.randn(qkv.shape, generator=generator))
        angles = torch.randn(self.rotary.cos.shape, generator=generator)
        self.rotary.cos.copy_(angles.cos())
        self.rotary.sin.copy_(angles.sin())
        batch = self.batch
        batch.device_query_starts.copy_(torch.from_numpy(starts))
        batch.device_seq_lens.copy_(torch.from_numpy(lens))
        batch.page_table.copy_(torch.from_numpy(table))
        batch.slots.copy_(torch.from_numpy(slots))
        self.batch = replace(batch, query_starts=starts[: len(sequences) + 1], seq_lens=lens[: len(sequences)])

    def take(self, other: Inputs) -> None:
        """Copy the contents of inputs of the same shape on the device, without waiting for it."""
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        for mine, theirs in pairs:
            mine.copy_(theirs)
        self.batch = replace(self.batch, query_starts=other.batch.query_starts, seq_lens=other.batch.seq_lens)

    def _tensors(self) -> list[Tensor]:
        batch = self.batch
        batch_tensors = [batch.device_query_starts, batch.device_seq_lens, batch.page_table, batch.slots]
        return [*self.qkv, self.rotary.cos, self.rotary.sin, *batch_tensors]


def make_inputs(
    shape: Shape, sequences: list[tuple[int, int]], device: str, dtype: torch.dtype, padding: int = 0, seed: int = 1
) -> Inputs:
    """Return a filled step; ``padding`` rows follow its sequences."""
    tokens = sum(new for _, new in sequences) + padding
    inputs = Inputs(shape, torch.device(device), dtype, len(sequences) + padding, tokens)
    inputs.fill(sequences, seed)
    return inputs


class Side:
    """A back end with its own cache. All caches of a shape begin with the same contents."""

    def __init__(self, name: str, shape: Shape, device: torch.device, dtype: torch.dtype, compute: torch.dtype) -> None:
        scales = () if shape.scales is None else (shape.scales,) * len(shape.windows)
        self.cache = KVCache(shape.layout(dtype), device, scales=scales)
        self.reset()
        placement = TensorPlacement(device, dtype, compute)
        self.compute = compute
        self.backend: AttentionBackend = build_backend(
            name, shape.config(), self.cache, placement, _MAX_SEQS, max_num_keys=4096
        )
        weights = torch.randn(2, shape.head_dim, generator=torch.Generator().manual_seed(4)).to(device, compute)
        self.norms = HeadNorms(weights[0], weights[1], 1e-6) if shape.has_norms else None
        self.latent = None if shape.latent is None else _LatentLayers(self.backend, shape, device, compute)

    def reset(self) -> None:
        """Restore the cache's first contents."""
        cache = self.cache.tensor
        values = torch.empty(
            cache.shape, device=cache.device, dtype=torch.float32 if self.cache.is_fp8 else cache.dtype
        )
        cache.copy_(values.normal_(generator=torch.Generator(cache.device).manual_seed(3)))

    def run(self, inputs: Inputs) -> list[Tensor]:
        """Return the output of every layer for planned inputs, [tokens, heads * head_dim] each."""
        outputs = []
        for layer, qkv in enumerate(inputs.qkv):
            if self.latent is not None:
                outputs.append(self.latent.run(layer, qkv.to(self.compute, copy=True), inputs.rotary))
                continue
            q = self.backend.prepare_and_store(layer, qkv.to(self.compute), inputs.rotary, self.norms)
            outputs.append(self.backend.attend(layer, q))
        return outputs


class _LatentLayers:
    """Random projections and norms that layers with latents use around a back end."""

    def __init__(self, backend: AttentionBackend, shape: Shape, device: torch.device, dtype: torch.dtype) -> None:
        assert isinstance(backend, LatentBackend)
        assert shape.latent is not None
        self._backend = backend
        self._heads = shape.heads
        self._latent = shape.latent
        rank = shape.latent.kv_lora_rank
        outputs = shape.latent.qk_nope_head_dim + shape.latent.v_head_dim
        generator = torch.Generator().manual_seed(5)
        weight = torch.randn(shape.heads * outputs, rank, generator=generator) * rank**-0.5
        self.weight = weight.bfloat16().to(device, dtype)  # equal in all dtypes
        norm = torch.rand(rank, generator=generator).bfloat16()
        self.norm = LatentNorm(norm.to(device, dtype), 1e-6)

    def run(self, layer: int, projected: Tensor, rotary: RotaryCosSin) -> Tensor:
        """Return the output [tokens, heads * v_head_dim] of one layer; ``projected`` is overwritten."""
        latent = self._latent
        q, rows = projected.split([self._heads * latent.qk_head_dim, latent.row_size], dim=1)
        queries = q.view(len(q), self._heads, latent.qk_head_dim)
        self._backend.store_latents(layer, rows, queries[:, :, latent.qk_nope_head_dim :], rotary, self.norm)
        return attend(latent, self._backend, layer, queries, self.weight).flatten(1)


def reference(inputs: Inputs) -> tuple[list[Tensor], Tensor]:
    """Return outputs in float32, and the cache afterwards."""
    side = Side("torch", inputs.shape, inputs.device, inputs.dtype, torch.float32)
    side.backend.plan(inputs.batch)
    # On a GPU other kernels might round to less than float32.
    with sdpa_kernel(SDPBackend.MATH) if inputs.device.type == "cuda" else nullcontext():
        return side.run(inputs), side.cache.tensor


def fp8_reference(inputs: Inputs, fp8_cache: Tensor) -> tuple[list[Tensor], Tensor]:
    """Return outputs in float32 over the dequantized ``fp8_cache``, and the cache that should have been stored.

    The reference keeps its keys and values in float32; quantizing and dequantizing them is explicit here.
    """
    assert inputs.shape.scales is not None
    side = Side("torch", replace(inputs.shape, scales=None), inputs.device, torch.float32, torch.float32)
    cache = side.cache.tensor
    scales = inputs.shape.scales
    factors = torch.tensor([scales.k, scales.v], device=inputs.device)[:, None, None]
    cache.copy_(cache.to(torch.float8_e4m3fn).float() * factors)  # as all sides begin
    side.backend.plan(inputs.batch)
    queries = [
        side.backend.prepare_and_store(layer, qkv.float(), inputs.rotary, side.norms)
        for layer, qkv in enumerate(inputs.qkv)
    ]
    stored = (cache / factors).clamp(-448, 448).to(torch.float8_e4m3fn)
    cache.copy_(fp8_cache.float() * factors)
    with sdpa_kernel(SDPBackend.MATH) if inputs.device.type == "cuda" else nullcontext():
        return [side.backend.attend(layer, q) for layer, q in enumerate(queries)], stored


def assert_matches_reference(inputs: Inputs, outputs: list[Tensor], cache: Tensor, tolerance: float) -> None:
    """Check that outputs of sequences and the cache agree."""
    is_fp8 = inputs.shape.scales is not None
    expected, expected_cache = fp8_reference(inputs, cache) if is_fp8 else reference(inputs)
    tokens = int(inputs.batch.query_starts[-1])
    for ours, theirs in zip(outputs, expected, strict=True):
        torch.testing.assert_close(ours[:tokens].float(), theirs[:tokens], atol=tolerance, rtol=tolerance)
    if is_fp8:  # rotated values may differ in their last bit, and then be rounded to the neighbour
        differing = int((cache.view(torch.uint8) != expected_cache.view(torch.uint8)).sum())
        assert differing <= 0.05 * inputs.batch.slots.numel() * cache[0, :, :, :, 0].numel()
        assert inputs.shape.scales is not None
        in_cache = tolerance / min(inputs.shape.scales.k, inputs.shape.scales.v)
        torch.testing.assert_close(cache.float(), expected_cache.float(), atol=in_cache, rtol=0.13)
    else:
        torch.testing.assert_close(cache, expected_cache, atol=tolerance, rtol=tolerance)
