"""What holds for all tests."""

from __future__ import annotations

import os

import torch
from hypothesis import HealthCheck, settings

torch.set_num_threads(1)  # the processes under test need the cores
settings.register_profile("busy machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy machine")


def _interpret_triton_kernels() -> None:
    """Let this process run Triton kernels on CPU tensors, and no process that tests start.

    Triton decides while it is imported, for its own library, and again for each kernel; transformers imports it, so
    this cannot wait for the tests that need it. Nodes must not find TRITON_INTERPRET: it would change their runner.
    """
    os.environ["TRITON_INTERPRET"] = "1"
    import triton

    triton.knobs.propagate_env = False
    triton.knobs.runtime.interpret = True
    del os.environ["TRITON_INTERPRET"]


if not torch.cuda.is_available():
    _interpret_triton_kernels()
