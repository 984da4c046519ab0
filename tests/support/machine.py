"""How busy the machine is. Tests wait longer on a busy one, and give nodes longer timeouts."""

from __future__ import annotations

import os

#: Processes per core that ``scripts/test`` itself keeps running: four workers with their nodes on two cores.
SUITE_LOAD = 2.0


def slowness() -> float:
    """Return how many times longer than beside ``scripts/test`` alone a process waits for the CPU now; at least 1.

    The larger of the running processes now and their mean of the last minute, per core.
    """
    with open("/proc/loadavg") as file:
        fields = file.read().split()
    running = max(float(fields[0]), float(fields[3].partition("/")[0]))
    return max(1.0, running / len(os.sched_getaffinity(0)) / SUITE_LOAD)


def patience(seconds: float) -> float:
    """Return the longest wait for work that takes at most ``seconds`` beside ``scripts/test`` alone.

    Use it for deadlines of states, and for flags such as ``--peer-timeout``, never for a duration that a test asserts.
    """
    return seconds * slowness()
