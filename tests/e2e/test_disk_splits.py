"""A node reads the later blocks of a prompt from disk while it computes the first ones: tokens are transformers'.

A node splits a read if to read takes 1/2 to 3 times as long as to compute, by the paces that it measures. With blocks
of few tokens, a file takes about as long as its tokens. So prompts are asked again until the read of one was split, as
its trace tells. If none is, a node with blocks of another size is next.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from enum import Enum, auto
from itertools import count
from pathlib import Path
from unittest import mock

import pytest
from checkpoints import reference_greedy, reference_model
from collector import Collector
from exact_fleet import Model, random_prompt
from fleet import Fleet, NodeProcess
from node_client import RouterClient, greedy

from pdserve.hashing import BlockHashes, root_hash

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

BLOCKS = (4, 8, 2, 16, 4, 8)  # tokens per block, by node
ROUNDS = 8  # in which a node is asked every prompt
PROMPTS = [random_prompt(seed, 802) for seed in range(6)]
ANSWER = 4  # tokens
MODEL = Model("qwen3", {"num_hidden_layers": 4, "hidden_size": 384, "intermediate_size": 768})
TOKEN_BYTES = 2048
#: The device holds little more than a prompt, and so does the half of host memory that reads may take.
FLAGS: tuple[str, ...] = ("--max-model-len", "1000", "--max-batch-tokens", "128", "--max-num-seqs", "4")
FLAGS += ("--kv-checksum", "on")
FLAGS += ("--kv-cache-memory", str(1200 * TOKEN_BYTES), "--host-kv-memory", str(2000 * TOKEN_BYTES))


class Fault(Enum):
    NONE = auto()
    FLIPPED_BYTE = auto()
    REMOVED_FILE = auto()


class Reader:
    """A node that computes its prompts itself, and its disk."""

    def __init__(self, fleet: Fleet, node: NodeProcess, disk: Path, block: int, collector: Collector) -> None:
        self._fleet = fleet
        self._node = node
        self._disk = disk
        self._block = block
        self._collector = collector
        self._numbers = count(1)

    def wait_written(self, prompt: list[int]) -> None:
        self._fleet.wait_until(lambda: bool(self._last_file(prompt)), 30.0)

    def harm(self, prompt: list[int], fault: Fault) -> None:
        """Let the last file of a prompt have the fault, if the file is there."""
        for path in self._last_file(prompt):
            if fault is Fault.REMOVED_FILE:
                path.unlink()
            elif fault is Fault.FLIPPED_BYTE:
                data = bytearray(path.read_bytes())
                data[next(self._numbers) % len(data)] ^= 4  # not the byte that was flipped before
                path.write_bytes(data)

    def _last_file(self, prompt: list[int]) -> list[Path]:
        hashes = BlockHashes(self._block, root_hash("")).upto(array("I", prompt), len(prompt) - 1)
        return list(self._disk.glob(f"*/*/{hashes[-1].hex()}-*-b0"))

    def meets(self, fault: Fault, prompt: list[int], expected: list[int]) -> bool:
        """Serve a prompt. Return whether its read was split and has met the fault; without one, it has brought all."""
        before = self._counts()
        trace = f"{self._block:016x}{next(self._numbers):016x}"
        with RouterClient(self._node.address) as client:
            answer = client.generate(prompt, greedy(ANSWER), traceparent=f"00-{trace}-{'1' * 16}-01")
        assert answer.tokens == expected
        split = self._split_read(trace)
        corrupt, late = (now - then for now, then in zip(self._counts(), before, strict=True))
        assert corrupt <= (fault is Fault.FLIPPED_BYTE)
        if split is None or late:
            return False
        num_read = split["pdserve.load.tokens"]  # 0 if a block is missing
        return bool(corrupt) if fault is Fault.FLIPPED_BYTE else (num_read == 0) == (fault is Fault.REMOVED_FILE)

    def _split_read(self, trace: str) -> dict[str, int] | None:
        root = self._collector.wait(trace, "decode", root_name="decode node")
        loads = [span.attributes for span in root.children if span.name == "load"]
        return next((load for load in loads if load.get("pdserve.load.computed_tokens")), None)

    def _counts(self) -> tuple[float, ...]:
        return tuple(self._node.counter(f"disk_kv_{name}") for name in ("corrupt_blocks", "late_reads"))


@contextmanager
def serving(checkpoint: Path, disk: Path, block: int, collector: Collector) -> Iterator[Reader]:
    flags = (*FLAGS, "--block-size", str(block), "--disk-kv", str(disk), "--disk-kv-size", "1G")
    with mock.patch.dict(os.environ, {"OTEL_BSP_SCHEDULE_DELAY": "20"}), Fleet() as fleet:
        node = fleet.start_decode(checkpoint, (*flags, "--traces", collector.url))
        fleet.wait_ready()
        yield Reader(fleet, node, disk, block, collector)
        node.wait_idle()


def test_faults_of_files_in_split_reads_change_no_token(tmp_path: Path) -> None:
    checkpoint = MODEL.make(tmp_path / "m")
    model = reference_model(checkpoint)
    prompts = [(prompt, reference_greedy(model, prompt, ANSWER)) for prompt in PROMPTS]
    faults = [*Fault]
    with Collector() as collector:
        for number, block in enumerate(BLOCKS):
            with serving(checkpoint, tmp_path / f"kv{number}", block, collector) as reader:
                for prompt, expected in prompts:
                    reader.meets(Fault.NONE, prompt, expected)
                    reader.wait_written(prompt)
                for prompt, expected in ROUNDS * prompts:
                    reader.harm(prompt, faults[0])
                    if reader.meets(faults[0], prompt, expected):
                        faults.pop(0)
                    if not faults:
                        return
    pytest.fail(f"no read was split that has met {faults[0].name}")
