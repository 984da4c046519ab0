"""The ``pdserve`` command, also as ``python -m pdserve``.

Its packages have names such as ``cli`` and ``router``. A folder of PYTHONPATH with such a name comes first, so the
command imports none of them before it knows that all are its own. Its processes have the same PYTHONPATH.
"""

from __future__ import annotations

import os
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.host.process import run_command

#: Packages that are imported beside this one.
PACKAGES = ("cli", "elastic_node", "prefill_node", "decode_node", "router", "node", "engine", "runner", "connector")

_ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    return run_command(_check_packages) or int(import_module("cli.main").main())


def _check_packages() -> int:
    """Raise ConfigError if a package would not be imported from the folder that has this one."""
    for name in PACKAGES:
        spec = find_spec(name)
        if spec is None:
            raise ConfigError(f"the package {name} is missing in {_ROOT}; install pdserve again")
        location = Path(spec.origin or next(iter(spec.submodule_search_locations or [name])))
        location = location.parent if location.name == "__init__.py" else location
        if location.resolve() != (_ROOT / name).resolve():
            raise ConfigError(
                f"{location} shadows the package {name} of pdserve, {_ROOT / name}; {_remedy(location.parent)}"
            )
    return 0


def _remedy(folder: Path) -> str:
    variable = os.environ.get("PYTHONPATH", "")
    if folder.resolve() in [Path(entry).resolve() for entry in variable.split(os.pathsep) if entry]:
        return f"remove {folder} from PYTHONPATH={variable}"
    if folder.resolve() == Path(sys.path[0]).resolve():
        return "start it from another folder, or as `pdserve`"
    return "install pdserve into a virtual environment of its own"


if __name__ == "__main__":
    sys.exit(main())
