"""Triton kernels, each with the torch code it is tested against.

    forward pass           norm.py, activation.py, embedding.py, gemv.py, rope_store.py, store_kv.py, all_reduce.py
    attention              decode_attention.py, prefill_attention.py, sinks.py, tiles.py (how they cut work on a device)
    recurrent layers       gated_delta.py, gated_delta_chunks.py (prompts), gated_delta_reference.py (plain torch);
                           mamba2.py, mamba2_reference.py
    mixtures of experts    routing.py, grouped_tiles.py, grouped_gemm.py, expert_reference.py (plain torch)
    4-bit weights          four_bits/words.py (their layout), weights.py, unpacking.py, products.py, grouped.py
    FlashInfer's inputs    pages.py, gather.py
    V2's state             step.py
    integrity of KV        block_digest.py
    sampling               sampling.py
    plain torch            reference.py

``dependent_launch.py`` lets kernels overlap their launches. On CPU tensors the kernels run in Triton's interpreter
(TRITON_INTERPRET=1).

Values that vary from step to step are never ``constexpr`` and never specialised on, so serving compiles nothing.
"""
