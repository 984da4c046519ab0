"""Whether a node would load its checkpoint, before weights are read. A process of its own tries: it imports torch."""

from __future__ import annotations

import subprocess
import sys

import msgspec

from pdserve.config.node_config import NodeConfig
from pdserve.errors import CheckpointError, NodeError, cut
from pdserve.model.model_config import NATIVE

_SECONDS = 600.0  # the library is read from a cold disk, and a checkpoint may have 100,000 tensors
_PROGRAM = "runner.loading.checkpoint_check"


class CheckedTensors(msgspec.Struct, frozen=True):
    number: int = 0  # tensors that have their place in the model; 0 if weights are random
    problem: str = ""  # why a node would refuse the checkpoint

    def __str__(self) -> str:
        if not self.number:
            return "config.json; weights are random or not read"
        return f"{self.number} tensors, each has its place in the model"


def checked_tensors(config: NodeConfig) -> CheckedTensors:
    """Return what a node finds before it reads weights. Raises CheckpointError as the node would."""
    if config.costs is not None or (config.random_weights and config.model.impl == NATIVE):
        return CheckedTensors()  # ``resolve`` has read all there is
    command = [sys.executable, "-P", "-m", _PROGRAM]
    try:
        done = subprocess.run(
            command, input=msgspec.msgpack.encode(config), capture_output=True, timeout=_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as exc:
        raise NodeError(f"the checkpoint cannot be checked: {cut(str(exc))}") from exc
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines() or [f"exit status {done.returncode}"]
        raise NodeError(f"the check of the checkpoint failed: {cut(lines[-1], 200)}")
    checked = msgspec.json.decode(done.stdout, type=CheckedTensors)
    if checked.problem:
        raise CheckpointError(checked.problem)
    return checked
