"""Helpers of tests that run an installed pdserve: outside of the checkout, so that nothing is imported from it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import time
import urllib.request
from collections.abc import Sequence
from pathlib import Path


def run(*command: str | Path, **environ: str) -> str:
    """Return stdout and stderr of a command that must succeed."""
    environ = clean_environment() | environ
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd="/", env=environ)
    assert done.returncode == 0, done.stdout
    return done.stdout


def clean_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}


def completion_of(command: Sequence[str | Path], log_file: Path, **environ: str) -> str:
    """Start ``command``, a ``pdserve up`` with the embedded model, and return the text of a completion."""
    environ = clean_environment() | environ
    with log_file.open("w") as log:
        up = subprocess.Popen(command, stdout=log, stderr=log, cwd="/", env=environ, start_new_session=True)
    try:
        while (url := re.search(r"is served at (http://\S+)", log_file.read_text())) is None:
            assert up.poll() is None, log_file.read_text()
            time.sleep(0.1)
        body = json.dumps({"model": "tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}).encode()
        request = urllib.request.Request(f"{url[1]}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request) as response:
            return str(json.load(response)["choices"][0]["text"])
    finally:
        os.killpg(up.pid, signal.SIGINT)
        up.wait()
