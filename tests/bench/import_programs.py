"""Imports programs of bench/ as Python starts them, each in a process of its own that has the large libraries already.

python tests/bench/import_programs.py PATH[:PATH…]=PROGRAM …     prints a line for each program that fails

A program runs up to ``if __name__ == "__main__"``. Before its ``=`` are the folders of PYTHONPATH, if any.
"""

from __future__ import annotations

import os
import runpy
import sys
import traceback
from pathlib import Path

import httpx  # noqa: F401
import torch  # noqa: F401
import transformers  # noqa: F401


def main() -> int:
    failures = 0
    installed = sys.path[1:]
    for argument in sys.argv[1:]:
        folders, _, program = argument.rpartition("=")
        child = os.fork()
        if not child:
            own = Path(program).resolve().parent
            sys.path[:] = [str(own), *filter(None, folders.split(":")), *installed]
            os._exit(_imports(program))
        _, status = os.waitpid(child, 0)
        failures += status != 0
    return int(failures > 0)


def _imports(program: str) -> int:
    try:
        runpy.run_path(program, run_name="imported")
    except BaseException:
        print(f"{program}: {traceback.format_exc()}", flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
