"""The start of an engine process, before this process has imported gRPC and read the node's configuration.

The process imports its libraries meanwhile, and waits for a Configure. ``engine_process.py`` takes it over.
"""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple


class LaunchedEngine(NamedTuple):
    """A process, and the frontend's ends of its sockets."""

    process: subprocess.Popen[bytes]  # stdout has its stderr, too
    messages: socket.socket
    heartbeats: socket.socket


def launch_engine(num_ranks: int) -> LaunchedEngine:
    """Start an engine process that will have ``num_ranks`` ranks on this host; 0 if they are simulated."""
    messages, their_messages = socket.socketpair()
    heartbeats, their_heartbeats = socket.socketpair()
    with their_messages, their_heartbeats:
        fds = their_messages.fileno(), their_heartbeats.fileno()
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "engine.process", *map(str, (*fds, num_ranks))],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=fds,
            start_new_session=True,  # the frontend handles Ctrl-C
        )
    return LaunchedEngine(process, messages, heartbeats)


@contextmanager
def launched_engine(num_ranks: int) -> Iterator[LaunchedEngine]:
    """Launch an engine. At the end of the block kill it if it still runs, and close what connects it."""
    launched = launch_engine(num_ranks)
    with launched.process, launched.messages, launched.heartbeats:
        try:
            yield launched
        finally:
            launched.process.kill()
