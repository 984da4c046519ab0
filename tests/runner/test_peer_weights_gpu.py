"""The host gets every byte of a tensor on a GPU, piece by piece.

PYTHONPATH=.:tests/support python -m pytest -c /dev/null --noconftest tests/runner/test_peer_weights_gpu.py
"""

from __future__ import annotations

import pytest
import torch

from runner.loading.peer_weights import PIECE_BYTES, HostCopies

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]


@pytest.mark.parametrize("size", [0, 1, PIECE_BYTES - 1, PIECE_BYTES, 3 * PIECE_BYTES + 5])
def test_the_pieces_of_a_tensor_are_its_bytes(size: int) -> None:
    device = torch.device("cuda", 0)
    copies = HostCopies(device)
    for _ in range(2):  # the buffers are used again
        flat = torch.randint(0, 256, (size,), dtype=torch.uint8, device=device)
        assert b"".join(map(bytes, copies.of(flat))) == flat.cpu().numpy().tobytes()
