"""Model runners: they hold the weights, KV cache and sequences of one rank, and execute steps.

``build`` is the entry. It imports torch when it is called, or ``prepare`` before it, and not for a simulated node.
"""

from __future__ import annotations

import contextlib
import gc
import os
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from importlib import import_module
from types import ModuleType

from pdserve.config.node_config import NodeConfig
from pdserve.model.model_config import TRANSFORMERS
from pdserve.protocols import ModelRunner, WeightReader

Progress = Callable[[str, float], None]
Rendezvous = str | socket.socket
Reader = WeightReader | None

_early_import: Future[ModuleType] | None = None  # import of torch


def build(config: NodeConfig, progress: Progress, rendezvous: Rendezvous = "", reader: Reader = None) -> ModelRunner:
    """Load the model and allocate the KV cache. ``progress`` gets a stage and a fraction between 0 and 1.

    All ranks of a node call this and wait for each other at ``rendezvous``: rank 0 passes the listening socket, others
    its "host:port". ``reader`` reads tensors of the same checkpoint from a peer. Raises CheckpointError, CapacityError,
    and NodeError if ranks do not join.
    """
    prepare(config)
    return FACTORIES[config.decision.runner](config, progress, rendezvous, reader)


def begin_import() -> None:
    """Begin to import torch on a thread, before the configuration is known. ``prepare`` must follow."""
    global _early_import
    _limit_thread_spinning()
    gc.disable()  # until ``prepare`` ends
    _early_import = ThreadPoolExecutor(1, "import").submit(import_module, "torch")


def prepare(config: NodeConfig) -> None:
    """Import what ``build`` needs. This takes seconds, and uses no device."""
    module = _MODULES[config.decision.runner]
    if module not in sys.modules:
        with contextlib.nullcontext() if config.decision.runner == "simulated" else _importing_torch(config):
            import_module(module)


def _build_simulated(config: NodeConfig, progress: Progress, rendezvous: Rendezvous, reader: Reader) -> ModelRunner:
    from runner.simulated import SimulatedRunner

    return SimulatedRunner(config)


def _build_v1(config: NodeConfig, progress: Progress, rendezvous: Rendezvous, reader: Reader) -> ModelRunner:
    from runner.distributed.parallel_state import ParallelState
    from runner.v1.runner import RunnerV1

    return RunnerV1(config, ParallelState(config.position, config.device, rendezvous), progress, reader)


def _build_v2(config: NodeConfig, progress: Progress, rendezvous: Rendezvous, reader: Reader) -> ModelRunner:
    from runner.distributed.parallel_state import ParallelState
    from runner.v2.runner import RunnerV2

    return RunnerV2(config, ParallelState(config.position, config.device, rendezvous), progress, reader)


#: By the name in ``pdserve.config.runner_oracle.RUNNERS``; the simulated runner belongs to ``--engine simulated``.
FACTORIES: dict[str, Callable[[NodeConfig, Progress, Rendezvous, Reader], ModelRunner]] = {
    "V1": _build_v1,
    "V2": _build_v2,
    "simulated": _build_simulated,
}
_MODULES = {"V1": "runner.v1.runner", "V2": "runner.v2.runner", "simulated": "runner.simulated"}


@contextlib.contextmanager
def _importing_torch(config: NodeConfig) -> Iterator[None]:
    """Prepare the first import of torch, and of transformers if the model needs it.

    The collector waits, and never searches the million objects of these modules: that took a sixth of a node's start.
    """
    _limit_thread_spinning()
    if _early_import is None and ("torch" in sys.modules or not gc.isenabled()):
        yield
        return
    gc.disable()
    try:
        if _early_import is not None:
            _early_import.result()  # raises its error, which importing torch again would hide
        if config.model.impl == TRANSFORMERS:
            import runner.models.from_transformers.decoder  # noqa: F401
        yield
        gc.freeze()
    finally:
        gc.enable()


def _limit_thread_spinning() -> None:
    """Limit how long idle threads of torch spin on a CPU. Must precede the first import of torch: OpenMP reads it once.

    A small decode step has about fifty parallel loops. A sleeping thread must be woken for each, on an idle core:
    a step of a 27 M model took 11.5 ms so, 4.8 with this limit (about 0.3 ms of spinning), 4.4 without a limit.
    But spinning threads keep the cores from others: with two such engines on the same two cores a step takes 15 ms with
    this limit, and 33 with four times as much. ``pdserve up`` therefore divides the cores.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "5000")
