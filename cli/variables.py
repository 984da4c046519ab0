"""PDSERVE_… variables that no command reads: misspelled ones, or those of another program."""

from __future__ import annotations

import difflib
import os
import re
from argparse import ArgumentParser
from collections.abc import Collection, Mapping

from cli.commands import COMMANDS, parser_of
from pdserve.config.runner_oracle import VARIABLE
from pdserve.flags.sources import VARIABLE_PREFIX, variables_of
from pdserve.host.process import say
from pdserve.logs import warn_early

#: Variables that belong to no flag.
WITHOUT_FLAG = frozenset({"PDSERVE_CONFIG", "PDSERVE_TRACEBACK", VARIABLE})
#: Kubernetes sets these in every pod beside a Service whose name begins with pdserve.
_SERVICE_LINK = re.compile(
    r"PDSERVE_(\w+_)?(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT_\d+_(TCP|UDP|SCTP)(_(PROTO|PORT|ADDR))?)"
)
_SERVICE_ADDRESS = re.compile(r"(tcp|udp|sctp)://")


def unread_variables(parser: ArgumentParser, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return the variables that no command reads, each with the name that it resembles most, or "".

    Most environments have only variables of this ``parser``; other commands are imported only if there are more.
    """
    read = WITHOUT_FLAG | variables_of(parser)
    if not _others(environ, read):
        return {}
    read = read.union(*(variables_of(parser_of(name)) for name in COMMANDS))
    return {name: next(iter(difflib.get_close_matches(name, read, n=1)), "") for name in _others(environ, read)}


def describe_unread(name: str, nearest: str) -> str:
    return f"{name} is set, but no command of pdserve reads it{f'; did you mean {nearest}?' if nearest else ''}"


def warn_of_unread_variables(command: str) -> None:
    """Warn of each variable that no command reads: in the log of a server, else on stderr. ``doctor`` has a check."""
    if command == "doctor":
        return
    for name, nearest in unread_variables(parser_of(command)).items():
        if COMMANDS[command].serves:
            warn_early(describe_unread(name, nearest))  # logged once the log is set up
        else:
            say(f"pdserve {command}: warning: {describe_unread(name, nearest)}", level="WARNING")


def _others(environ: Mapping[str, str], read: Collection[str]) -> list[str]:
    return sorted(
        name
        for name, value in environ.items()
        if name.startswith(VARIABLE_PREFIX)
        and name not in read
        and not _SERVICE_LINK.fullmatch(name)
        and not _SERVICE_ADDRESS.match(value)
    )
