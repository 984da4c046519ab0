"""The all-reduce kernel against PyTorch. Needs two GPUs or more, and nothing of tests/conftest.py:

python -m pytest -c /dev/null --rootdir . tests/runner/test_all_reduce_gpu.py
"""

from __future__ import annotations

import multiprocessing
import socket

import pytest
import torch

from runner.kernels.all_reduce import SumAndNorm, mailbox_bytes

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs"),
]

SIZES = (1024, 4096, 5120, 8192)
ROWS = (1, 2, 7, 64)


def _parts(rank: int, rows: int, size: int, round_number: int) -> torch.Tensor:
    generator = torch.Generator("cpu").manual_seed(1000 * round_number + rank)
    return torch.randn(rows, size, generator=generator).to(torch.bfloat16)


def _run(rank: int, world: int, port: int, results: multiprocessing.Queue[tuple[int, str]]) -> None:
    import torch.distributed as dist

    from runner.distributed.peer_memory import map_memory
    from runner.kernels.reference import rms_norm

    torch.cuda.set_device(rank)
    torch.zeros(1, device="cuda")
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=world)

    def exchange(mine: bytes) -> list[bytes]:
        handles = [torch.zeros(len(mine), dtype=torch.uint8) for _ in range(world)]
        dist.all_gather(handles, torch.frombuffer(bytearray(mine), dtype=torch.uint8))
        return [bytes(handle.tolist()) for handle in handles]

    try:
        for size in SIZES:
            memory = map_memory(mailbox_bytes(world, max(ROWS), size), rank, exchange)
            assert memory is not None
            reduce = SumAndNorm(memory.addresses, rank, max(ROWS), size, torch.device("cuda", rank))
            for round_number in range(12):
                rows = ROWS[round_number % len(ROWS)]
                parts = [_parts(r, rows, size, round_number) for r in range(world)]
                exact = torch.stack(parts).float().sum(0)
                residual = _parts(99, rows, size, round_number).cuda()
                weight = _parts(98, 1, size, 0)[0].cuda()
                total = (exact + residual.cpu().float()).to(torch.bfloat16)
                normed = reduce(parts[rank].cuda(), residual, weight, 1e-6)
                torch.testing.assert_close(residual.cpu(), total, rtol=1e-2, atol=1e-2)
                expected = rms_norm(residual, weight, torch.tensor(1e-6, device="cuda"))
                torch.testing.assert_close(normed, expected, rtol=2e-2, atol=2e-2)
                bits = [torch.zeros(rows, size // 2, dtype=torch.int32) for _ in range(world)]
                dist.all_gather(bits, normed.cpu().view(torch.int32))
                assert all(torch.equal(bits[0], other) for other in bits), "ranks differ"
            _check_graph(reduce, rank, world, size)
            torch.cuda.synchronize()
            dist.barrier()
            memory.close()
        results.put((rank, ""))
    except BaseException as error:
        results.put((rank, repr(error)))
        raise


def _check_graph(reduce: SumAndNorm, rank: int, world: int, size: int) -> None:
    """Check that each replay sums what its input holds at that time: the message number increases in replays, too."""
    x, weight = (torch.full((rows, size), 1.0, dtype=torch.bfloat16, device="cuda") for rows in (2, 1))
    residual = torch.zeros_like(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        residual.zero_()
        for _ in range(2):
            reduce(x, residual, weight, 1e-6)
    for round_number in range(20):
        x.fill_(float(rank + round_number))
        graph.replay()
        torch.cuda.synchronize()
        expected = 2.0 * sum(r + round_number for r in range(world))
        assert (residual.float() - expected).abs().max() <= expected / 128, (
            round_number,
            residual[0, 0].item(),
            expected,
        )


@pytest.mark.parametrize("world", [2, 4])
def test_every_rank_gets_the_same_sum(world: int) -> None:
    if torch.cuda.device_count() < world:
        pytest.skip(f"needs {world} GPUs")
    context = multiprocessing.get_context("spawn")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    results: multiprocessing.Queue[tuple[int, str]] = context.Queue()
    processes = [context.Process(target=_run, args=(rank, world, port, results), daemon=True) for rank in range(world)]
    for process in processes:
        process.start()
    try:
        answers = [results.get(timeout=120) for _ in range(world)]
    finally:
        for process in processes:
            process.kill()
    assert sorted(answers) == [(rank, "") for rank in range(world)]
