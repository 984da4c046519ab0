"""Makes one process of a node fail: Python imports this first if it is on PYTHONPATH.

FAILING_MODULE names the process by its module. The model's forward passes fail once the file FAILING_TRIGGER exists.
Reads of weights after the first one fail while the file FAILING_READS exists; if its content is "kill", they kill the
process.
"""

from __future__ import annotations

import errno
import itertools
import os
import signal
import sys
from pathlib import Path
from typing import Any


def _patch_forward(trigger: Path) -> None:
    from runner.models.decoder import Decoder

    forward = Decoder.forward

    def failing_forward(self: Decoder, *args: Any, **kwargs: Any) -> Any:
        if trigger.exists():
            raise RuntimeError("the test made this forward pass fail")
        return forward(self, *args, **kwargs)

    Decoder.forward = failing_forward  # type: ignore[method-assign]


def _patch_reads(trigger: Path) -> None:
    preadv = os.preadv
    count = itertools.count()

    def failing_preadv(*args: Any) -> int:
        if trigger.exists() and next(count):
            if trigger.read_text() == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.EIO, "the test made this read fail")
        return preadv(*args)

    os.preadv = failing_preadv


if os.environ.get("FAILING_MODULE") in sys.orig_argv:
    if "FAILING_TRIGGER" in os.environ:
        _patch_forward(Path(os.environ["FAILING_TRIGGER"]))
    if "FAILING_READS" in os.environ:
        _patch_reads(Path(os.environ["FAILING_READS"]))
