"""The role of a node that prefills and decodes, composed of both roles on one engine."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from itertools import chain

import grpc
from prometheus_client.metrics_core import Metric

from decode_node.decode_flags import DecodeSettings
from decode_node.decode_role import DECODE_SERVICE, DecodeRole
from node.context import NodeContext
from node.drain import Drainable, SeveralServices
from node.leasing.lease_settings import LeaseSettings
from node.leasing.leasing import LEASING_SERVICE, Leasing
from node.reading.read_settings import ReadSettings
from node.reading.reading import Reading
from pdserve.flags.declaration import options_from
from prefill_node.prefill_flags import PrefillSettings
from prefill_node.prefill_role import Prefills


class ElasticRole:
    name = "both"
    services: tuple[str, ...] = (DECODE_SERVICE, LEASING_SERVICE)
    uses_connector = True
    leases_cache = True

    def __init__(self, decode: DecodeRole, leasing: Leasing, prefill: PrefillSettings) -> None:
        self.hands_off_all = decode.hands_off_all
        self._decode = decode
        self._leasing = leasing
        self._prefill = prefill

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        decode = self._decode.attach(node, server)
        prefills = Prefills(node, self._decode.peers, self._prefill.decode_ahead)
        return SeveralServices(decode, self._leasing.attach(node, server, prefills.start))

    async def connect(self) -> None:
        await self._decode.connect()

    def drop_peers(self, reason: str) -> None:
        self._leasing.drop()
        self._decode.drop_peers(reason)

    def connected_peers(self) -> Sequence[str]:
        return self._decode.connected_peers()

    def metrics(self) -> Iterable[Metric]:
        return chain(self._decode.metrics(), self._leasing.metrics())

    async def close(self) -> None:
        await self._decode.close()
        self._leasing.close()


def make_role(args: argparse.Namespace) -> ElasticRole:
    settings = options_from(DecodeSettings, args)
    reading = Reading(options_from(ReadSettings, args), settings.prefill)
    leasing = Leasing(options_from(LeaseSettings, args))
    decode = DecodeRole(settings, reading, leasing=None)
    return ElasticRole(decode, leasing, options_from(PrefillSettings, args))
