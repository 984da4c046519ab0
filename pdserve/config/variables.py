"""Variables PDSERVE_… in the environment that no command reads: they are misspelled, or another program's."""

from __future__ import annotations

import difflib
import logging
import os
import re
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Collection, Mapping

from pdserve.config.flag_sources import VARIABLE_PREFIX, variables_of
from pdserve.config.runner_oracle import VARIABLE

_log = logging.getLogger(__name__)

#: Variables that belong to no flag.
WITHOUT_FLAG = frozenset({"PDSERVE_CONFIG", "PDSERVE_TRACEBACK", VARIABLE})
#: Kubernetes sets these in every pod beside a Service whose name begins with pdserve.
_SERVICE_LINK = re.compile(
    r"PDSERVE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")
_SECONDS = 20.0


def unread_variables(parser: ArgumentParser, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that no command reads, each with the name that it resembles most, or "".

    Most environments have only variables of this ``parser``. Otherwise a process of its own looks at all commands.
    """
    known = WITHOUT_FLAG | variables_of(parser)
    if not _others(environ, known):
        return {}
    of_others = _variables_of_all_commands()
    if of_others is None:
        return {}
    known |= of_others
    return {name: next(iter(difflib.get_close_matches(name, known, n=1)), "") for name in _others(environ, known)}


def describe_unread(name: str, nearest: str) -> str:
    return f"{name} is set, but no command of pdserve reads it{f'; did you mean {nearest}?' if nearest else ''}"


def warn_of_unread_variables(parser: ArgumentParser) -> None:
    """Log a warning for each variable that no command reads."""
    for name, nearest in unread_variables(parser).items():
        _log.warning("%s", describe_unread(name, nearest))


def _others(environ: Mapping[str, str], known: Collection[str]) -> list[str]:
    return sorted(
        name
        for name, value in environ.items()
        if name.startswith(VARIABLE_PREFIX)
        and name not in known
        and not _SERVICE_LINK.fullmatch(name)
        and not _SERVICE_ADDRESS.match(value)
    )


def _variables_of_all_commands() -> frozenset[str] | None:
    """Ask the launcher, which may import all programs; this layer may not. None if that fails."""
    command = [sys.executable, "-P", "-m", "launcher.variables"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError) as exc:
        _log.warning("variables are not checked for misspelled names, as commands cannot be listed: %s", exc)
        return None
    return frozenset(done.stdout.split())
