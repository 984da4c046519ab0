"""Makes the model's forward pass fail in one process of a node: Python imports this first if it is on PYTHONPATH.

FAILING_MODULE names the process by its module; its forward passes fail once the file FAILING_TRIGGER exists.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any


def _patch_forward(trigger: Path) -> None:
    from runner.models.decoder import Decoder

    forward = Decoder.__call__

    def failing_forward(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        if trigger.exists():
            raise RuntimeError("the test made this forward pass fail")
        return forward(self, *args, **kwargs)

    Decoder.__call__ = failing_forward  # type: ignore[method-assign]


if os.environ.get("FAILING_MODULE") in sys.orig_argv:
    _patch_forward(Path(os.environ["FAILING_TRIGGER"]))
