"""Triton kernels, each with the torch code it is tested against.

    the forward pass       norm.py, activation.py, rope_store.py, decode_attention.py, prefill_attention.py, gemv.py
    V2's state             step.py
    sampling               sampling.py
    FlashInfer's indices   pages.py

``chain.py`` lets kernels overlap their launches, ``tiles.py`` says how attention is cut on a device, ``ops.py`` bundles
what stands between matrix products. On CPU tensors they run in Triton's interpreter (TRITON_INTERPRET=1).

What varies from step to step is never a ``constexpr`` and never specialised on: nothing is compiled while serving.
"""
