"""Build the attention back end of a rank. Each is imported only where it is used."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from importlib import import_module

from pdserve.kv.states import Mamba2Spec, ShortConvSpec
from pdserve.model.model_config import ModelConfig
from runner.attention import AttentionBackend
from runner.attention.recurrent import Recurrent
from runner.kv_cache import KVCache
from runner.placement import TensorPlacement
from runner.state_cache import StateCache


def import_early(name: str) -> threading.Thread:
    """Begin to import a back end on a thread: FlashInfer takes 0.9 s. ``build_backend`` meets an error again.

    Meanwhile other threads get the GIL within 0.1 ms, in place of 5 ms.
    """

    def run() -> None:
        usual = sys.getswitchinterval()
        sys.setswitchinterval(1e-4)
        try:
            with suppress(ImportError):
                import_module(f"runner.attention.paged_{name}")
        finally:
            sys.setswitchinterval(usual)

    thread = threading.Thread(target=run, name="import", daemon=True)
    thread.start()
    return thread


def build_backend(
    name: str,
    config: ModelConfig,
    cache: KVCache,
    placement: TensorPlacement,
    max_num_seqs: int,
    max_num_keys: int,
    states: StateCache | None = None,
    max_drafts: int = 0,
) -> AttentionBackend:
    """Return the back end ``name`` of pdserve's ``ATTENTION_BACKENDS`` for layers that write to ``cache``.

    ``config`` is the rank's part of the model. ``max_num_seqs`` bounds the rows of a step. A back end may keep memory
    for ``max_num_keys`` tokens of one layer. ``states``: the recurrent layers'. Decodes have at most
    ``max_drafts`` drafts.
    """
    backend = _build_attention(name, config, cache, placement, max_num_seqs, max_num_keys)
    if states is not None:
        backend.recurrent = _build_recurrent(name, states, max_num_seqs, max_drafts)
    return backend


def _build_recurrent(name: str, states: StateCache, max_num_seqs: int, max_drafts: int) -> Recurrent:
    if isinstance(states.layout.spec, ShortConvSpec):
        if name == "torch":
            from runner.attention.short_conv import TorchShortConv

            return TorchShortConv(states)
        from runner.attention.triton_short_conv import TritonShortConv

        return TritonShortConv(states, max_num_seqs, max_drafts)
    if isinstance(states.layout.spec, Mamba2Spec):
        if name == "torch":
            from runner.attention.mamba2 import TorchMamba2

            return TorchMamba2(states)
        from runner.attention.triton_mamba2 import TritonMamba2

        return TritonMamba2(states, max_num_seqs, max_drafts)
    if name == "torch":
        from runner.attention.gated_delta import TorchGatedDelta

        return TorchGatedDelta(states)
    from runner.attention.triton_gated_delta import TritonGatedDelta

    return TritonGatedDelta(states, max_num_seqs, max_drafts)


def _build_attention(
    name: str, config: ModelConfig, cache: KVCache, placement: TensorPlacement, max_num_seqs: int, max_num_keys: int
) -> AttentionBackend:
    if cache.layout.groups.heads:
        from runner.attention.unlike_heads import UnlikeHeadsAttention

        return UnlikeHeadsAttention(
            config,
            cache,
            lambda part, of_part: _build_attention(name, part, of_part, placement, max_num_seqs, max_num_keys),
        )
    module, _, class_name = cache.layout.spec.attention[name].partition(".")
    attention: Callable[..., AttentionBackend] = getattr(import_module(f"runner.attention.{module}"), class_name)
    if name == "torch":
        return attention(config, cache, placement)
    if name == "triton":
        return attention(config, cache, placement, max_num_seqs)
    assert name == "flashinfer", name
    return attention(config, cache, placement, max_num_seqs, max_num_keys)
