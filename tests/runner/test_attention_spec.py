"""Attention specs (scale, window, soft cap, sinks) against an eager formula, and layers that rotate by themselves."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import msgspec
import pytest
import torch
from attention_steps import Inputs, Shape, Side, make_inputs
from fast_set import sampled
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from pdserve.config.attention_backends import Platform, check_backend, choose_backend
from pdserve.errors import ConfigError
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.latent import LatentConfig
from runner.kernels.reference import apply_rotary, expand_cos_sin

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
TOLERANCE = 2e-5 if DEVICE == "cpu" else 1e-4
SHAPE = Shape(heads=4, kv_heads=2, head_dim=32, page=16)
SPECS = {
    "scale": AttentionSpec(scale=0.4),
    "window": AttentionSpec(scale=32**-0.5, window=20),
    "soft cap": AttentionSpec(scale=0.5, soft_cap=1.5),
    "sinks": AttentionSpec(scale=32**-0.5, has_sinks=True),
    "window and sinks": AttentionSpec(scale=32**-0.5, window=20, has_sinks=True),
    "all": AttentionSpec(scale=0.4, window=20, soft_cap=2.0, has_sinks=True),
}
STEPS = {
    "decodes": [(15, 1), (16, 1), (0, 1), (130, 1), (250, 1)],
    "mixed": [(40, 1), (0, 17), (129, 1), (100, 20), (0, 70)],
}
GPU = Platform(device="cuda", has_triton=True, has_flashinfer=True)


def eager(inputs: Inputs, side: Side, q: Tensor, spec: AttentionSpec, sinks: Tensor | None) -> Tensor:
    """Attend token by token, by the formula in AttentionSpec; [tokens, num_heads * head_dim]."""
    batch = inputs.batch
    cache = side.cache.layers[0].float()
    rows = []
    for row, length in enumerate(batch.seq_lens.tolist()):
        begin, end = batch.query_starts[row : row + 2].tolist()
        pages = batch.page_table[row, : -(-length // SHAPE.page)].long()
        keys, values = (cache[pages, :, kv].transpose(0, 1).flatten(1, 2)[:, :length] for kv in range(2))
        for token in range(begin, end):
            position = length - (end - token)
            first = 0 if spec.window is None else max(0, position - spec.window + 1)
            seen = slice(first, position + 1)
            queries = q[token].float().view(SHAPE.kv_heads, -1, SHAPE.head_dim)
            scores = queries @ keys[:, seen].transpose(1, 2) * spec.scale
            if spec.soft_cap is not None:
                scores = (scores / spec.soft_cap).tanh() * spec.soft_cap
            if sinks is not None:
                scores = torch.cat((scores, sinks.view(SHAPE.kv_heads, -1, 1)), dim=2)
            weights = scores.softmax(2)[..., : position + 1 - first]
            rows.append((weights @ values[:, seen]).flatten())
    return torch.stack(rows)


def heads_of(inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """Rotated queries and keys, and values, [tokens, heads, head_dim]."""
    heads = inputs.qkv[0].view(inputs.tokens, -1, SHAPE.head_dim)
    q, k, v = heads.split([SHAPE.heads, SHAPE.kv_heads, SHAPE.kv_heads], dim=1)
    cos, sin = expand_cos_sin(inputs.rotary, inputs.dtype)
    return apply_rotary(q, cos, sin), apply_rotary(k, cos, sin), v


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize(
    ("backend", "kind"),
    [("torch", kind) for kind in SPECS] + [("triton", kind) for kind in ("scale", "window and sinks")],
)
def test_attention_equals_the_eager_formula(backend: str, kind: str, step: str) -> None:
    spec = SPECS[kind]
    inputs = make_inputs(replace(SHAPE, spec=spec), STEPS[step], DEVICE, torch.float32)
    side = Side(backend, inputs.shape, inputs.device, torch.float32, torch.float32)
    sinks = torch.linspace(-1, 2, SHAPE.heads, device=inputs.device) if spec.has_sinks else None
    side.backend.plan(inputs.batch)
    q = side.backend.prepare_and_store(0, inputs.qkv[0], inputs.rotary, None)
    # On a GPU other kernels might round to less than float32.
    with sdpa_kernel(SDPBackend.MATH) if DEVICE == "cuda" else nullcontext():
        out = side.backend.attend(0, q, sinks)
    torch.testing.assert_close(out, eager(inputs, side, q, spec, sinks), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize(("backend", "dtype"), sampled(("torch", "triton"), (torch.float32, torch.bfloat16), every=2))
def test_store_of_rotated_heads_equals_prepare_and_store(backend: str, dtype: torch.dtype) -> None:
    """Also for heads that lie behind one another, as transformers has them, and for padding."""
    inputs = make_inputs(SHAPE, STEPS["mixed"], DEVICE, torch.float32, padding=2)
    fused, plain = (Side(backend, SHAPE, inputs.device, dtype, torch.float32) for _ in range(2))
    for side in (fused, plain):
        side.backend.plan(inputs.batch)
    q, k, v = (heads.transpose(0, 1).contiguous().transpose(0, 1) for heads in heads_of(inputs))
    expected_q = fused.backend.prepare_and_store(0, inputs.qkv[0], inputs.rotary, None)
    plain.backend.store(0, k, v)
    torch.testing.assert_close(
        plain.cache.tensor, fused.cache.tensor, atol=2e-2 if dtype != torch.float32 else 1e-6, rtol=1e-6
    )
    tokens = int(inputs.batch.query_starts[-1])
    out = plain.backend.attend(0, q.contiguous())
    expected = fused.backend.attend(0, expected_q)
    torch.testing.assert_close(
        out[:tokens], expected[:tokens], atol=2e-2 if dtype != torch.float32 else 2e-5, rtol=2e-5
    )


@pytest.mark.parametrize("backend", ["triton", "flashinfer"])
def test_a_backend_without_soft_caps_is_refused_at_start(backend: str) -> None:
    specs = (SPECS["window"], SPECS["soft cap"])
    with pytest.raises(ConfigError, match=rf"{backend}.*no soft cap.*Choose auto or torch"):
        check_backend(backend, GPU, "bfloat16", 128, specs)
    name, reason = choose_backend(GPU, "bfloat16", 128, specs, v1_forced=False)
    assert (name, "no soft cap" in reason) == ("torch", True)
    check_backend(backend, GPU, "bfloat16", 128, (SPECS["window"], SPECS["sinks"]))


def test_sizes_of_latents_without_a_kernel_are_refused_at_start() -> None:
    published = LatentConfig(
        kv_lora_rank=512,
        q_lora_rank=0,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
        rope_interleave=True,
    )
    specs = (SPECS["scale"],)
    for backend in ("triton", "flashinfer"):
        check_backend(backend, GPU, "bfloat16", 576, specs, published)
    wide = msgspec.structs.replace(published, v_head_dim=96)
    check_backend("triton", GPU, "bfloat16", 576, specs, wide)
    with pytest.raises(ConfigError, match=r"flashinfer.*have \(192, 96\) elements, not one of \(192, 128\)"):
        check_backend("flashinfer", GPU, "bfloat16", 576, specs, wide)
    odd = msgspec.structs.replace(published, kv_lora_rank=384)
    with pytest.raises(ConfigError, match=r"triton.*kv_lora_rank 384 is no power of two.*Choose auto or torch"):
        check_backend("triton", GPU, "bfloat16", 448, specs, odd)
    assert choose_backend(GPU, "bfloat16", 448, specs, False, odd)[0] == "torch"
    assert choose_backend(GPU, "bfloat16", 576, specs, False, wide)[0] == "triton"
