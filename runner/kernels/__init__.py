"""Triton kernels of the forward pass, each beside the function that launches it.

They run on GPUs and, where ``TRITON_INTERPRET=1``, on CPU tensors. Their references are in plain torch:
``runner/norm.py``, ``runner/rope.py``, ``runner/models/ops.py`` and ``runner/attention/paged_torch.py``.

Numbers that differ from step to step are never specialized on (``do_not_specialize``) and never ``constexpr``: serving
must not meet a kernel that is yet to be compiled. Sizes of the model are ``constexpr``.
"""
