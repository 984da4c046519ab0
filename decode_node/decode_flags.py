"""The flags that only decode nodes have beside the common ones of nodes."""

from __future__ import annotations

import argparse
from enum import StrEnum
from typing import Annotated

import msgspec

from node.leasing.lease_settings import LeaseSettings
from node.reading.read_settings import ReadSettings
from pdserve.discovery.sources import ADDRESS_FORMS, check_source
from pdserve.flags import declaration
from pdserve.flags.declaration import Flag
from pdserve.flags.shared import DAY


class FailurePolicy(StrEnum):
    """Treatment of a request whose handoff fails."""

    RECOMPUTE = "recompute"  # D prefills it from its token ids
    FAIL = "fail"


class DecodeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings that only decode nodes have, with their flags."""

    prefill: Annotated[
        tuple[str, ...],
        Flag(
            f"prefill nodes: {ADDRESS_FORMS}; repeatable",
            metavar="SOURCE",
            parse=check_source,
            repeatable=True,
            group="handoff",
        ),
    ] = ()
    failure_policy: Annotated[
        str,
        Flag(
            "when a handoff fails: prefill on this node, or fail the request",
            spelling="--kv-failure-policy",
            choices=tuple(policy.value for policy in FailurePolicy),
            group="handoff",
        ),
    ] = FailurePolicy.RECOMPUTE.value
    handoff_min_tokens: Annotated[
        int,
        Flag(
            "prefill prompts on this node that lack KV of fewer tokens; 0 hands all off",
            metavar="N",
            at_least=0,
            group="handoff",
        ),
    ] = 32
    peer_wait: Annotated[
        float,
        Flag(
            "longest wait for a first prefill node before the node is ready without one",
            metavar="S",
            at_least=0,
            at_most=DAY,
            group="handoff",
        ),
    ] = 60.0


def add_flags(parser: argparse.ArgumentParser) -> None:
    for settings in (DecodeSettings, ReadSettings, LeaseSettings):
        declaration.add_flags(parser, settings)
