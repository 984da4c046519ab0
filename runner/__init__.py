"""Model runners: they own weights, KV cache and running sequences of one rank, and execute steps.

``build`` is the only entry; torch is imported when it is called, and not for a simulated node.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Callable

from pdserve.config.node_config import NodeConfig
from pdserve.protocols import ModelRunner


def build(config: NodeConfig, progress: Callable[[str, float], None], meeting: str | socket.socket = "") -> ModelRunner:
    """Load the model and allocate the KV cache. ``progress`` is told (stage, fraction between 0 and 1).

    Where a node has several ranks, all of them call this, and wait for each other in it: ``meeting`` is "host:port",
    for rank 0 the socket that listens there. Raises CheckpointError, CapacityError, NodeError where ranks do not meet.
    """
    if config.costs is not None:
        from runner.simulated import SimulatedRunner

        return SimulatedRunner(config)
    if config.device.kind == "cpu":
        _let_threads_spin_briefly()
    from runner.distributed.parallel_state import ParallelState

    world = ParallelState(config.place, config.device, meeting)
    if config.decision.runner == "V2":
        from runner.v2.runner import RunnerV2

        return RunnerV2(config, world, progress)
    from runner.v1.runner import RunnerV1

    return RunnerV1(config, world, progress)


def _let_threads_spin_briefly() -> None:
    """How long torch's idle threads wait awake; must precede the first import of torch, whose OpenMP reads it once.

    A small decode step has some fifty parallel loops. A thread that slept in between has to be woken for each, on a
    core that has gone idle: a step of a 27 M model took 11.5 ms so, 4.8 with this (about 0.3 ms of waiting), 4.4 with
    endless waiting. But threads that spin keep the cores from others: with two such engines on the same two cores a
    step takes 15 ms with this, and 33 with four times as much. ``pdserve up`` therefore divides the cores.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
