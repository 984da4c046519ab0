"""``python -m launcher.variables``: print the environment variables of the flags of all commands."""

from __future__ import annotations

from launcher.completion import parsers_by_command
from pdserve.config.flag_sources import variables_of


def main() -> None:
    for parser in parsers_by_command().values():
        print(*sorted(variables_of(parser)), sep="\n")


if __name__ == "__main__":
    main()
