"""The role of a node that prefills and decodes: a decode node that computes prompts of peers, too, on one engine."""

from __future__ import annotations

import argparse

from decode_node.decode_flags import DecodeSettings
from decode_node.decode_role import DecodeRole
from node.context import NodeContext
from node.leasing.lease_settings import LeaseSettings
from node.leasing.leasing import Leasing
from node.leasing.prompts import StartPrefill
from node.reading.peers import KVPeers
from node.reading.read_settings import ReadSettings
from node.reading.reading import Reading
from pdserve.flags.declaration import options_from
from prefill_node.prefill_flags import PrefillSettings
from prefill_node.prefill_role import Prefills


class ElasticRole(DecodeRole):
    """It leases, also if it reads from no peer itself."""

    name = "both"

    def __init__(self, decode: DecodeSettings, prefill: PrefillSettings, reading: Reading, leasing: Leasing) -> None:
        super().__init__(decode, reading, leasing)
        self.uses_connector = True
        self._decode_ahead = prefill.decode_ahead

    def _prefills(self, node: NodeContext, peers: KVPeers) -> StartPrefill:
        return Prefills(node, peers, self._decode_ahead).start


def make_role(args: argparse.Namespace) -> ElasticRole:
    settings = options_from(DecodeSettings, args)
    reading = Reading(options_from(ReadSettings, args), settings.prefill)
    leasing = Leasing(options_from(LeaseSettings, args))
    return ElasticRole(settings, options_from(PrefillSettings, args), reading, leasing)
