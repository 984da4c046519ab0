"""Compile FlashInfer's kernels for the next start of a node: ``python -m runner.attention.compile ORDER``.

ORDER is a CompileOrder in JSON. Exits with the reason as its last line if it fails.
"""

from __future__ import annotations

import sys

import msgspec
import torch

from pdserve.config.attention_backends import FlashInferKernel
from pdserve.config.kernels.background_compile import CompileOrder, compile_missing, end_with_stdin, give_way
from pdserve.errors import NodeError
from pdserve.host.process import run_command


def main(order: CompileOrder) -> int:
    end_with_stdin()
    give_way()
    device = torch.device("cuda", order.device)
    capability = torch.cuda.get_device_capability(device)

    def compile_one(kernel: FlashInferKernel) -> None:
        from runner.attention.flashinfer import load_kernel

        try:
            load_kernel(kernel, device)
        except (RuntimeError, OSError) as exc:  # ninja's output is part of the message
            raise NodeError(str(exc)) from exc

    compile_missing(order.kernels, capability, compile_one)
    return 0


if __name__ == "__main__":
    sys.exit(run_command(lambda: main(msgspec.json.decode(sys.argv[1], type=CompileOrder))))
