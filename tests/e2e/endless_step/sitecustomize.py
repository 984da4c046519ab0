"""Makes the engine of a simulated node hang while a file exists: Python imports this first.

ENDLESS_TRIGGER names the file that makes it hang in a step. The file with ".between" behind that name makes it hang
between two steps.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any


def _patch_launch(trigger: Path) -> None:
    from runner.simulated import SimulatedRunner

    launch = SimulatedRunner.launch

    def endless_launch(self: SimulatedRunner, plan: Any) -> Any:
        while trigger.exists():
            time.sleep(0.02)
        return launch(self, plan)

    SimulatedRunner.launch = endless_launch  # type: ignore[method-assign]


def _patch_receive(trigger: Path) -> None:
    from engine.channel import Channel

    receive = Channel.receive

    def endless_receive(self: Channel, seconds: float | None) -> Any:
        while trigger.exists():
            time.sleep(0.02)
        return receive(self, seconds)

    Channel.receive = endless_receive  # type: ignore[method-assign]


if "engine.process" in sys.orig_argv and "ENDLESS_TRIGGER" in os.environ:
    _patch_launch(Path(os.environ["ENDLESS_TRIGGER"]))
    _patch_receive(Path(os.environ["ENDLESS_TRIGGER"] + ".between"))
