"""Makes the steps of a simulated node endless while the file ENDLESS_TRIGGER exists: Python imports this first."""

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


if "engine.process" in sys.orig_argv and "ENDLESS_TRIGGER" in os.environ:
    _patch_launch(Path(os.environ["ENDLESS_TRIGGER"]))
