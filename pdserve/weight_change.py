"""A change of a running node's weights. Plain values, no torch."""

from __future__ import annotations

import msgspec

# Running requests end first, end now with an error that clients retry, or go on with the KV that they have.
WAIT, ABORT, KEEP = "wait", "abort", "keep"
WHEN = (WAIT, ABORT, KEEP)
WHEN_SLEEP = (WAIT, ABORT)


class WeightChange(msgspec.Struct, frozen=True):
    """A checkpoint or a patch that replaces weights in memory. One path is set, on the host of each rank."""

    model_dir: str = ""  # another checkpoint of the same architecture and shape
    weights_hash: str = ""  # what each rank must find in it (pdserve/config/compatibility.py); empty: not compared
    patch: str = ""  # a file of new values for some tensors (pdserve/checkpoint/weight_patch.py)
