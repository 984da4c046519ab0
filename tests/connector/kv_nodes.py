"""Nodes with a KV cache in host memory: a reader in this process, sources in processes of their own."""

from __future__ import annotations

import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
from machine import patience
from numpy.typing import NDArray

from pdserve.kv.layout import KVLayout, KVRegion, KVShare
from pdserve.protocols import KVConnector
from pdserve.records import KVConnectorOutput, KVRead, Peer, ReadResult

PEER_SCRIPT = Path(__file__).with_name("kv_peer.py")
UNTOUCHED = 255


def pattern(layout: KVLayout) -> NDArray[np.uint8]:
    """Return the content of every source: bytes that differ between blocks. Shape [num_blocks, block_bytes]."""
    return np.arange(layout.total_bytes // 4, dtype=np.uint32).view(np.uint8).reshape(layout.num_blocks, -1)


class Reader:
    """A cache in this process and the connector that reads into it."""

    def __init__(self, connector: KVConnector, layout: KVLayout) -> None:
        self.layout = layout
        self.connector = connector
        self.blocks = np.full((layout.num_blocks, layout.block_bytes), UNTOUCHED, dtype=np.uint8)
        self._progress = threading.Event()
        self._read_ids = itertools.count()
        region = KVRegion(self.blocks.ctypes.data, self.blocks.nbytes, "cpu", 0)
        self.rank = connector.register(region, layout, self._progress.set)

    def wait(self, enough: Callable[[KVConnectorOutput], bool], timeout: float = 30.0) -> list[KVConnectorOutput]:
        """Poll after each ``on_progress`` until ``enough`` holds of an output."""
        outputs: list[KVConnectorOutput] = []
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            self._progress.wait(deadline - time.monotonic())
            self._progress.clear()
            outputs.append(self.connector.poll())
            if enough(outputs[-1]):
                return outputs
        raise AssertionError(f"not within {timeout} s; so far: {outputs}")

    def connect(self, peer: Peer) -> str:
        """Connect; return the reason of a failure, or an empty string."""
        self.connector.connect(peer)
        output = self.wait(lambda output: bool(output.connected or output.failed_peers))[-1]
        return dict(output.failed_peers).get(peer.epoch, "")

    def order(self, epoch: str, local: list[int], remote: list[int]) -> int:
        read_id = next(self._read_ids)
        self.connector.read(KVRead(read_id, epoch, tuple(local), tuple(remote)))
        return read_id

    def result(self, read_id: int, timeout: float = 30.0) -> ReadResult:
        def has_it(output: KVConnectorOutput) -> bool:
            return any(result.read_id == read_id for result in output.finished_recving)

        return next(r for r in self.wait(has_it, timeout)[-1].finished_recving if r.read_id == read_id)

    def read(self, epoch: str, local: list[int], remote: list[int]) -> ReadResult:
        return self.result(self.order(epoch, local, remote))

    def reset(self) -> None:
        self.blocks[:] = UNTOUCHED

    def wait_for_first_bytes(self) -> None:
        deadline = time.monotonic() + patience(10)
        while not (self.blocks[:, 0] != UNTOUCHED).any() and time.monotonic() < deadline:
            time.sleep(0.0005)

    def assert_nothing_lands(self, seconds: float = 0.7) -> None:
        self.reset()
        time.sleep(seconds)
        assert not self.touched()

    def touched(self) -> set[int]:
        return set(np.flatnonzero((self.blocks != UNTOUCHED).any(axis=1)).tolist())


class Source:
    """A process with ``pattern`` as its cache, or with one rank's part of random cells."""

    def __init__(self, agent: str, layout: KVLayout, shares: Sequence[KVShare] = (), rank: int = 0) -> None:
        arguments = [agent, *(msgspec.json.encode(value).decode() for value in (layout, shares, rank))]
        self._process = subprocess.Popen(
            [sys.executable, str(PEER_SCRIPT), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.peer = msgspec.json.decode(self._process.stdout.readline(), type=Peer)
        self.epoch = self.peer.epoch

    def send(self, number: int) -> None:
        self._process.send_signal(number)
        if number == signal.SIGSTOP:  # otherwise the source could still answer for a moment
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED)

    def kill(self) -> None:
        """SIGKILL. Idempotent."""
        self._process.kill()
        self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            pipe.close()

    def finish(self) -> int:
        """Close its stdin; return its exit status."""
        self._process.send_signal(signal.SIGCONT)
        _, _ = self._process.communicate(timeout=patience(30))
        return self._process.returncode
