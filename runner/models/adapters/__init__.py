"""Adapters around linear layers: y = W x + scaling · B (A x), with the A and B of each token's slot.

    adapted_linear.py   the layer: a LinearMethod around another
    slots.py            the device memory of A and B, at fixed addresses
    token_slots.py      the slot of each token of a step, at fixed addresses

Host copies and the slots of sequences: runner/adapters. Triton kernels: runner/kernels/products/low_rank.py.
"""
