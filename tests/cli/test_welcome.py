"""The welcome of ``pdserve up`` names commands that the user's shell finds."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cli.up.welcome import command_name


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
