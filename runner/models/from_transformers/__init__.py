"""Causal decoders of the library transformers on the paged KV cache, for runner V1.

tensor_shards.py     the library's tensor-parallel plan: cut tensors, sums and gathers
packed_linear.py     linear layers, packed on CPUs
attention_calls.py   the library's attention interface: what layers ask for, and paged attention for them
part.py              the layers and modules that one rank holds
loading.py           build a part of a model of the library, with weights or random ones
reference.py         logits of the unsplit model, whose layers are read a few at a time
in_float32.py        a model of 16 bits computes in float32, for the self-test
decoder.py           the model as the runner calls it
without_values.py    weights without values: shapes alone, zeros as activations
unread_decoder.py    what loading would refuse, before weights are read
self_test.py         comparison with the library's own eager forward, at each start
"""
