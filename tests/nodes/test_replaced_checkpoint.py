"""A node whose checkpoint is replaced while it starts: it announces the digests of what it has loaded, or ends."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest
from checkpoints import change_weight
from fleet import Fleet

from pdserve.checkpoint.digest_cache import NAME


@pytest.mark.slow  # test_weight_changes.py has a quick test of a reload
def test_file_that_is_replaced_between_digests_and_load_ends_the_start(checkpoint: Path, tmp_path: Path) -> None:
    """The engine is stopped until the frontend has digested the files."""
    model, new = (shutil.copytree(checkpoint, tmp_path / name, ignore=shutil.ignore_patterns(NAME)) for name in "ab")
    change_weight(new, "model.norm.weight")
    with Fleet() as fleet:
        node = fleet.start_decode(model)
        fleet.wait_until(lambda: bool(node.processes("engine")), 60.0)
        node.stop("engine")
        fleet.wait_until((model / NAME).exists, 60.0)
        os.replace(new / "model.safetensors", model / "model.safetensors")
        node.resume("engine")
        node.wait_ended(90.0)
        assert "'model.safetensors' in" in node.output
        assert "changed between the digests of its weights and their load" in node.output
        assert "Traceback" not in node.output
        node.respawn()
        fleet.wait_ready()
