"""The flags that only prefill nodes have beside the common ones of nodes."""

from __future__ import annotations

import argparse
from typing import Annotated

import msgspec

from node.leasing.lease_settings import LeaseSettings
from node.reading.read_settings import ReadSettings
from pdserve.flags import declaration
from pdserve.flags.declaration import Flag


class PrefillSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that only prefill nodes have, with their flags."""

    decode_ahead: Annotated[
        int,
        Flag(
            "most tokens to decode after a prompt's first one while the decode node reads the KV and no other prompt "
            "waits",
            metavar="N",
            at_least=0,
            group="handoff",
        ),
    ] = 3


def add_flags(parser: argparse.ArgumentParser) -> None:
    for settings in (PrefillSettings, ReadSettings, LeaseSettings):
        declaration.add_flags(parser, settings)
