"""The welcome of ``pdserve up`` names commands that the user's shell finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from cli.up.welcome import command_name, print_welcome
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.attention_backends import FlashInferKernel
from pdserve.config.device import detect_devices
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from router.options import RouterOptions


@pytest.mark.parametrize("on_path", [True, False])
def test_the_command_that_is_named_starts_pdserve(
    on_path: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bin_dir = tmp_path / "bin"
    bin_dir.mkdir()
    (bin_dir / "python").symlink_to(sys.executable)
    script = bin_dir / "pdserve"
    script.write_text("#!/bin/sh\necho hello\n")
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(bin_dir / "python"))
    monkeypatch.setenv("PATH", os.pathsep.join([*([str(bin_dir)] if on_path else []), "/usr/bin", "/bin"]))
    monkeypatch.chdir(tmp_path)
    assert command_name() == ("pdserve" if on_path else "bin/pdserve")
    shown = subprocess.run(["sh", "-c", f"{command_name()} --version"], capture_output=True, text=True, check=True)
    assert shown.stdout == "hello\n"


@pytest.mark.parametrize("first", [True, False])
def test_a_first_start_says_what_the_next_one_gains(first: bool, capsys: pytest.CaptureFixture[str]) -> None:
    config = resolve(NodeOptions(model=str(EMBEDDED_MODEL)), detect_devices("cpu", 1)[0], {})
    kernels = (FlashInferKernel("bfloat16", 128, 128, windowed=False),) if first else ()
    print_welcome(
        "http://x",
        msgspec.structs.replace(config, uncompiled_kernels=kernels),
        [],
        RouterOptions(models=()),
    )
    assert ("the next start uses it" in capsys.readouterr().out) == first
