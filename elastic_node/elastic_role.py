"""The role of a node that prefills and decodes, composed of both roles on one engine."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable, Sequence
from itertools import chain

import grpc
from prometheus_client.metrics_core import Metric

from decode_node import decode_role
from decode_node.decode_role import DecodeRole
from node.context import NodeContext
from node.drain import Drainable
from pdserve.errors import Draining
from prefill_node import prefill_role
from prefill_node.prefill_role import PrefillRole


class BothServices:
    """DecodeNode and PrefillNode, drained together: a Drainable."""

    def __init__(self, decode: Drainable, prefill: Drainable) -> None:
        self._services = decode, prefill
        self.release_timeout = max(service.release_timeout for service in self._services)

    async def finish(self) -> None:
        await asyncio.gather(*(service.finish() for service in self._services))

    def hand_over(self, why: Draining) -> None:
        for service in self._services:
            service.hand_over(why)

    def reopen(self) -> None:
        for service in self._services:
            service.reopen()

    async def wait_released(self) -> None:
        await asyncio.gather(*(service.wait_released() for service in self._services))


class ElasticRole:
    name = "both"
    services: tuple[str, ...] = (*DecodeRole.services, PrefillRole.handoff_service)
    uses_connector = True

    def __init__(self, decode: DecodeRole, prefill: PrefillRole) -> None:
        self.hands_off_all = decode.hands_off_all
        self._decode = decode
        self._prefill = prefill

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        return BothServices(self._decode.attach(node, server), self._prefill.attach(node, server))

    async def connect(self) -> None:
        await self._decode.connect()

    def drop_peers(self, reason: str) -> None:
        self._prefill.drop_peers(reason)
        self._decode.drop_peers(reason)

    def connected_peers(self) -> Sequence[str]:
        return self._decode.connected_peers()

    def metrics(self) -> Iterable[Metric]:
        return chain(self._decode.metrics(), self._prefill.metrics())

    async def close(self) -> None:
        await self._decode.close()
        await self._prefill.close()


def add_flags(parser: argparse.ArgumentParser) -> None:
    decode_role.add_flags(parser)
    prefill_role.add_flags(parser)


def make_role(args: argparse.Namespace) -> ElasticRole:
    return ElasticRole(decode_role.make_role(args), prefill_role.make_role(args))
