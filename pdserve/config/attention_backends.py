"""Attention backends: requirements, choice for a node, and page sizes. Their code is in ``runner/attention``."""

from __future__ import annotations

import importlib.util
from collections.abc import Collection, Mapping
from functools import reduce

import msgspec

from pdserve.errors import ConfigError
from pdserve.kv.groups import KVHeads
from pdserve.kv.layout import FullAttentionSpec, KVCacheSpec, divisors
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.latent import LatentConfig
from pdserve.model.model_config import ModelConfig

#: The backends with the page sizes, in tokens, that they can index; None is any size.
ATTENTION_BACKENDS: dict[str, tuple[int, ...] | None] = {
    "torch": None,
    "triton": (16, 32, 64),
    "flashinfer": (16, 32, 64),
}

NO_BACKEND = "none"  # a simulated node: it computes no attention, so pages may have any size

#: Pages that every backend can index. Nodes exchange KV only with equal pages, so each backend prefers these.
COMMON_PAGES = reduce(set.intersection, (set(sizes) for sizes in ATTENTION_BACKENDS.values() if sizes is not None))

_FLASHINFER_DTYPES = {"bfloat16": "bf16", "float16": "f16"}  # with FlashInfer's names
_FLASHINFER_HEAD_DIMS = (64, 128, 256)
_FLASHINFER_EXPANDED = ((192, 128), (256, 256), (128, 128), (64, 64))  # keys and values expanded from latents
_FA3_HEAD_DIM = 128
_FA3_CAPABILITY = 9  # major compute capability of GPUs with FlashInfer's FA3 kernels; others have FA2
_TRITON_MIN_HEAD_DIM = 16


class FlashInferKernel(msgspec.Struct, frozen=True):
    """A library of FlashInfer, which attends chunks of prompts. FlashInfer compiles it once per machine."""

    dtype: str  # queries, keys, values and results
    head_dim: int  # queries and keys
    value_dim: int
    windowed: bool

    def library(self, capability: tuple[int, int]) -> str:
        """Return FlashInfer's name of the library on a GPU: ``get_batch_prefill_uri`` of 0.6.13."""
        dtype = _FLASHINFER_DTYPES[self.dtype]
        return (
            f"batch_prefill_with_kv_cache_dtype_q_{dtype}_dtype_kv_{dtype}_dtype_o_{dtype}_dtype_idx_i32_"
            f"head_dim_qk_{self.head_dim}_head_dim_vo_{self.value_dim}_posenc_0_use_swa_{self.windowed}_"
            f"use_logits_cap_False_f16qk_False{'_sm90' if capability[0] == _FA3_CAPABILITY else ''}"
        )


class Platform(msgspec.Struct, frozen=True, kw_only=True):
    """Device and packages that decide which kernels a node can run."""

    device: str  # "cpu" or "cuda"
    has_triton: bool  # the package is installed
    has_flashinfer: bool  # the package is installed
    interpreted: bool = False  # Triton's interpreter is on, also on a GPU
    triton_error: str = ""  # error of the trial kernel on this device; empty if it ran, or none was tried

    @property
    def triton_problem(self) -> str | None:
        """Why no Triton kernel can run here; None if they can."""
        if self.device != "cuda" and not self.interpreted:
            return "no NVIDIA GPU: this node runs on a CPU (for tests, TRITON_INTERPRET=1 interprets the kernels)"
        if not self.has_triton:
            return "the package triton is not installed"
        return self.triton_error or None


def find_platform(device: str, environ: Mapping[str, str]) -> Platform:
    """Return the platform of this process. Packages are looked up, not imported."""
    return Platform(
        device=device,
        has_triton=importlib.util.find_spec("triton") is not None,
        has_flashinfer=importlib.util.find_spec("flashinfer") is not None,
        interpreted=environ.get("TRITON_INTERPRET") == "1",
    )


def fits_triton(head_dim: int) -> bool:
    """Whether Triton kernels, whose tiles are powers of two, can hold a head."""
    return head_dim >= _TRITON_MIN_HEAD_DIM and head_dim & (head_dim - 1) == 0


def problems(
    backend: str,
    platform: Platform,
    dtype: str,
    head_dim: int,
    specs: Collection[AttentionSpec] = (),
    latent: LatentConfig | None = None,
    kind: type[KVCacheSpec] = FullAttentionSpec,
    kv_heads: Collection[KVHeads] = (),
) -> list[str]:
    """Return why a backend cannot serve layers of these specs, dtype and head size here; empty if it can.

    For a model with latents, the latents' sizes count in place of ``head_dim``. ``kind``: of its KV cache.
    ``kv_heads``: the unlike heads of its layers, whose sizes count in place of ``head_dim``; empty: they are alike.
    """
    if backend == "torch":
        return []
    reasons = [
        None if backend in kind.attention else f"it has no attention for the KV cache of a {kind.__name__}",
        None if all(spec.soft_cap is None for spec in specs) else "it has no soft cap of attention scores",
    ]
    if backend == "triton":
        reasons += [
            platform.triton_problem,
            *_triton_sizes(head_dim, latent, kv_heads),
        ]
    elif backend == "flashinfer":
        reasons += [
            None if platform.device == "cuda" else "it needs a CUDA GPU",
            None if platform.has_flashinfer else "the package flashinfer is not installed",
            platform.triton_problem and f"it needs Triton between its kernels: {platform.triton_problem}",
            None if dtype in _FLASHINFER_DTYPES else f"dtype {dtype} is not one of {', '.join(_FLASHINFER_DTYPES)}",
            "tokens of an image see later ones" if any(spec.whole_images for spec in specs) else None,
        ]
        if kv_heads:
            reasons.append(f"layers have unlike heads: {', '.join(map(str, sorted(set(kv_heads))))}")
        elif latent is None and head_dim not in _FLASHINFER_HEAD_DIMS:
            reasons.append(f"head_dim {head_dim} is not one of 64, 128, 256")
        elif latent is not None:
            reasons += [*_triton_sizes(head_dim, latent), _expanded_problem(latent)]
    return [reason for reason in reasons if reason]


def _triton_sizes(head_dim: int, latent: LatentConfig | None, kv_heads: Collection[KVHeads] = ()) -> list[str]:
    """Return why Triton's tiles do not fit the rows of a layer's cache; empty if they do."""
    sizes = [("head_dim", size) for size in sorted({heads.head_dim for heads in kv_heads} or {head_dim})]
    if latent is not None:
        sizes = [("kv_lora_rank", latent.kv_lora_rank), ("qk_rope_head_dim", latent.qk_rope_head_dim)]
    return [f"{name} {size} is no power of two of at least 16" for name, size in sizes if not fits_triton(size)]


def _expanded_problem(latent: LatentConfig) -> str | None:
    sizes = latent.qk_head_dim, latent.v_head_dim
    if sizes in _FLASHINFER_EXPANDED:
        return None
    return f"heads of keys and values have {sizes} elements, not one of {', '.join(map(str, _FLASHINFER_EXPANDED))}"


def check_backend(
    name: str,
    platform: Platform,
    dtype: str,
    head_dim: int,
    specs: Collection[AttentionSpec] = (),
    latent: LatentConfig | None = None,
    kind: type[KVCacheSpec] = FullAttentionSpec,
    kv_heads: Collection[KVHeads] = (),
) -> None:
    """Raise ConfigError for a backend that is unknown or cannot run."""
    if name not in ATTENTION_BACKENDS:
        raise ConfigError(f"attention_backend {name!r} is not one of auto, {', '.join(ATTENTION_BACKENDS)}")
    obstacles = problems(name, platform, dtype, head_dim, specs, latent, kind, kv_heads)
    if obstacles:
        able = [
            backend
            for backend in ATTENTION_BACKENDS
            if not problems(backend, platform, dtype, head_dim, specs, latent, kind, kv_heads)
        ]
        raise ConfigError(
            f"attention_backend {name!r} cannot run this: {'; '.join(obstacles)}. Choose auto or {', '.join(able)}"
        )


def choose_backend(
    platform: Platform,
    dtype: str,
    head_dim: int,
    specs: Collection[AttentionSpec],
    v1_forced: bool,
    latent: LatentConfig | None = None,
    kind: type[KVCacheSpec] = FullAttentionSpec,
    kv_heads: Collection[KVHeads] = (),
) -> tuple[str, str]:
    """Return the backend that "auto" stands for, and the reason.

    On a GPU: the fastest one that can run. On a CPU: torch, except under Triton's interpreter, where V2 runs for tests
    and needs a backend that stays on the device.
    """
    if platform.device == "cuda":
        preferred = ["flashinfer", "triton"]
        reason = "the fastest on a GPU"
    elif platform.interpreted and not v1_forced:
        preferred = ["triton"]
        reason = "for V2 in Triton's interpreter"
    else:
        preferred = []
        reason = "the one for CPUs"
    refused: list[str] = []
    for name in preferred:
        obstacles = problems(name, platform, dtype, head_dim, specs, latent, kind, kv_heads)
        if not obstacles:
            return name, ", ".join(refused) or reason
        refused.append(f"{name} cannot run ({'; '.join(obstacles)})")
    return "torch", ", ".join(refused) or reason


def flashinfer_specs(specs: Collection[AttentionSpec], kv_is_fp8: bool) -> set[AttentionSpec]:
    """Return the layers' specs for which FlashInfer has a kernel; Triton attends the others.

    Layers with a window never gather keys, so with an FP8 cache FlashInfer has no kernel for them.
    """
    return {spec for spec in specs if not (spec.has_sinks or (kv_is_fp8 and spec.window))}


def patch_kernel(head_dim: int, dtype: str, capability: tuple[int, int]) -> FlashInferKernel | None:
    """Return the kernel that attends to a vision tower's patches beside FlashInfer; None: PyTorch's is as fast.

    FA3 takes heads of 128 values, to which smaller ones are padded.
    """
    if capability[0] != _FA3_CAPABILITY or dtype not in _FLASHINFER_DTYPES or head_dim > _FA3_HEAD_DIM:
        return None
    return FlashInferKernel(dtype, _FA3_HEAD_DIM, _FA3_HEAD_DIM, windowed=False)


def flashinfer_kernels(model: ModelConfig, dtype: str, kv_is_fp8: bool) -> tuple[FlashInferKernel, ...]:
    """Return the kernels that a node of this model loads if its backend is FlashInfer."""
    sizes = (model.head_dim, model.head_dim)
    specs = flashinfer_specs(model.attention, kv_is_fp8)
    if model.latent is not None:
        sizes = (model.latent.qk_head_dim, model.latent.v_head_dim)
        specs = set(model.attention)
    return tuple(
        FlashInferKernel(dtype, *sizes, windowed) for windowed in sorted({bool(spec.window) for spec in specs})
    )


def choose_page_size(block_size: int, requested: int | None, backend: str) -> int:
    """Return the kernel page, in tokens: the largest that the backend supports, if possible one that all can index.

    Raises ConfigError naming both numbers.
    """
    supported = ATTENTION_BACKENDS.get(backend)
    sizes = [size for size in divisors(block_size) if supported is None or size in supported]
    if not sizes:
        asked = "" if requested is None else f", so kernel_block_size {requested} cannot be used"
        raise ConfigError(
            f"block_size {block_size} has no page size that {backend} supports ({list(supported or ())}){asked}; "
            "choose a block_size that is a multiple of one of these"
        )
    if requested is None:
        return max([size for size in sizes if size in COMMON_PAGES] or sizes)
    if requested < 1 or block_size % requested:
        raise ConfigError(
            f"kernel_block_size {requested} does not divide block_size {block_size}; "
            f"choose one of {', '.join(map(str, sizes))}"
        )
    if requested not in sizes:
        raise ConfigError(f"kernel_block_size {requested} is not supported by {backend}; choose one of {sizes}")
    return requested
