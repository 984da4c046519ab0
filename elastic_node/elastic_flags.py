"""The flags of nodes that prefill and decode, beside the common ones of nodes."""

from __future__ import annotations

import argparse

from decode_node.decode_flags import DecodeSettings
from node.leasing.lease_settings import LeaseSettings
from node.reading.read_settings import ReadSettings
from pdserve.flags import declaration
from prefill_node.prefill_flags import PrefillSettings


def add_flags(parser: argparse.ArgumentParser) -> None:
    for settings in (DecodeSettings, PrefillSettings, ReadSettings, LeaseSettings):
        declaration.add_flags(parser, settings)
