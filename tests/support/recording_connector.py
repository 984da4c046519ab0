"""An operator's connector back end: the one of simulated nodes, which also writes each call to a file."""

from __future__ import annotations

import os
from collections.abc import Callable

from connector.backends.simulated import SimulatedConnector
from pdserve.kv.layout import KVLayout, KVRegion
from pdserve.records import KVRead, Peer, RankKV

FILE = "RECORDED_CALLS"  # variable that names the file


class RecordingConnector(SimulatedConnector):
    def register(self, region: KVRegion, layout: KVLayout, on_progress: Callable[[], None]) -> RankKV:
        _record("register")
        return super().register(region, layout, on_progress)

    def connect(self, peer: Peer) -> None:
        _record("connect")
        super().connect(peer)

    def read(self, read: KVRead) -> None:
        _record("read")
        super().read(read)


class Unfinished:
    def register(self) -> None:
        """The only method: the connector's others are missing."""


def _record(call: str) -> None:
    with open(os.environ[FILE], "a") as file:
        file.write(f"{call}\n")
