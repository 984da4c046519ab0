"""From a backend's name to the backend. Each is imported only when it is asked for."""

from __future__ import annotations

from pdserve.config.model_config import ModelConfig
from runner.attention import AttentionBackend
from runner.kv_cache import KVCache
from runner.models.layers.linear import TensorPlacement


def build_backend(
    name: str, config: ModelConfig, cache: KVCache, place: TensorPlacement, max_num_seqs: int, max_num_keys: int
) -> AttentionBackend:
    """The backend of ``ATTENTION_BACKENDS`` (pdserve) called ``name``, for layers that write to ``cache``.

    ``max_num_seqs`` bounds the rows of a step. A backend may keep memory for ``max_num_keys`` of a layer, in tokens.
    """
    if name == "torch":
        from runner.attention.paged_torch import PagedTorchAttention

        return PagedTorchAttention(config, cache, place)
    if name == "triton":
        from runner.attention.paged_triton import PagedTritonAttention

        return PagedTritonAttention(config, cache, place, max_num_seqs)
    assert name == "flashinfer", name
    from runner.attention.paged_flashinfer import PagedFlashInferAttention

    return PagedFlashInferAttention(config, cache, place, max_num_seqs, max_num_keys)
