"""Causal decoders of the library transformers on the paged KV cache, for runner V1.

loading.py           build a model of the library, with weights or random ones
attention_calls.py   the library's attention interface: what layers ask for, and paged attention for them
decoder.py           the model as the runner calls it
self_test.py         comparison with the library's own eager forward, at each start
"""
