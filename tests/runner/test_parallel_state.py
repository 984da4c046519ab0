"""Collective calls between real rank processes: two stages of two shards."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from pdserve.config.node_config import DeviceInfo
from pdserve.config.parallel import ParallelConfig
from runner.distributed.parallel_state import ParallelState

SCRIPT = """
import json
import socket
import sys
import torch
from pdserve.config.node_config import DeviceInfo
from pdserve.config.parallel import ParallelConfig
from runner.distributed.parallel_state import ParallelState

rank = int(sys.argv[1])
rendezvous = sys.argv[2] if rank else socket.socket(fileno=int(sys.argv[2]))
parallel = ParallelState(ParallelConfig((1, 1), 2).position(rank), DeviceInfo("cpu", 0, "cpu", 0), rendezvous)
sums = [parallel.all_reduce(torch.full((2, 3), 10.0**rank, dtype=dtype)) for dtype in (torch.float32, torch.bfloat16)]
one = torch.arange(3.0)[None] + 3 * rank
two = torch.cat((one, one + 100))
out = torch.zeros(2, 5)
parallel.gather_columns(two, 5, out)
gathered = [parallel.gather_columns(one, 5), parallel.gather_columns(two, 5), out, parallel.gather_columns(one, 2)]
minimum = parallel.all_reduce_min(70 - 10 * rank)
problems = [parallel.first_problem(f"of {rank}" if rank in ranks else "") for ranks in ((), (2, 3), (1, 2))]
received = parallel.broadcast(torch.full((2,), float(rank)), 3).tolist()
parallel.close()
parallel.close()
print(json.dumps([[x.tolist() for x in sums], [x.tolist() for x in gathered], minimum, problems, received]))
"""


@pytest.mark.slow  # tests/e2e/test_pairs.py samples on two stages of two shards
def test_all_reduce_and_gather_stay_within_a_stage_and_the_minimum_spans_all_ranks() -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parent.parent.parent)}
    with ExitStack() as ends:
        listener = ends.enter_context(socket.create_server(("127.0.0.1", 0)))
        fd = listener.fileno()
        ranks = []
        for rank in range(4):
            rendezvous = f"127.0.0.1:{listener.getsockname()[1]}" if rank else str(fd)
            command = [sys.executable, "-c", SCRIPT, str(rank), rendezvous]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environ, pass_fds=() if rank else (fd,))
            ranks.append(ends.enter_context(process))
            ends.callback(process.kill)
        answers = [json.loads(process.communicate()[0]) for process in ranks]
    for rank, (sums, gathered, minimum, problems, received) in enumerate(answers):
        total, first = (11.0, 0.0) if rank < 2 else (1100.0, 6.0)
        assert sums[0] == [[total] * 3] * 2
        assert sums[1] == [[pytest.approx(total, rel=0.01)] * 3] * 2
        row = [first + token for token in range(5)]
        rows = [row, [100 + value for value in row]]
        assert gathered == [[row], rows, rows, [row[:2]]]
        assert minimum == 40
        assert (problems, received) == (["", "of 2", "of 1"], [3.0, 3.0])


def test_a_single_rank_needs_no_rendezvous() -> None:
    parallel = ParallelState(ParallelConfig((2,)).position(0), DeviceInfo("cpu", 0, "cpu", 0), "")
    assert parallel.all_reduce_min(3) == 3
    parallel.close()
