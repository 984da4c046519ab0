"""The prefill role: prompts of decode nodes, leases and the PrefillNode service."""

from __future__ import annotations

import argparse
from collections.abc import Callable

import grpc

from node.context import NodeContext
from node.drain import Drainable
from node.leasing.lease_settings import LeaseSettings
from node.leasing.leases import LeaseId
from node.leasing.leasing import LEASING_SERVICE, Leasing
from node.leasing.prompt_trace import PromptTrace
from node.leasing.prompts import LeasedPrompts
from node.reading.peers import KVPeers
from node.reading.pull_driver import PullDriver
from node.reading.read_settings import ReadSettings
from node.reading.reading import Reading
from node.role import PeerRole
from pdserve.flags.declaration import options_from
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.sampling_params import SamplingParams
from prefill_node.prefill import Prefill
from prefill_node.prefill_flags import PrefillSettings
from prefill_node.pulled_prefix import PulledPrefix


class PrefillRole(PeerRole):
    """It waits for no peer when it starts: decode nodes connect to this node."""

    name = "prefill"
    services: tuple[str, ...] = (LEASING_SERVICE, "pdserve.v1.PoolingNode")
    uses_connector = True
    hands_off_all = False

    def __init__(self, settings: PrefillSettings, reading: Reading, leasing: Leasing) -> None:
        super().__init__(reading, leasing)
        self._settings = settings

    def attach(self, node: NodeContext, server: grpc.aio.Server) -> Drainable:
        if node.config.pooling is not None:
            from prefill_node.pooling_service import PoolingService  # imports numpy, which takes 0.2 s

            pooling = PoolingService(node, node.config.pooling)
            pb_grpc.add_PoolingNodeServicer_to_server(pooling, server)
            return pooling
        prefills = Prefills(node, self._reading.attach(node), self._settings.decode_ahead)
        assert self._leasing is not None, "a prefill node leases"
        return self._leasing.attach(node, server, prefills.start)


class Prefills:
    """Starts the prompts of decode nodes on this node."""

    def __init__(self, node: NodeContext, peers: KVPeers, decode_ahead: int) -> None:
        """Decode at most ``decode_ahead`` tokens after a prompt's first."""
        self._node = node
        self._peers = peers
        self._decode_ahead = decode_ahead

    def start(
        self,
        prompts: LeasedPrompts,
        lease: LeaseId,
        request: pb.PrefillRequest,
        sampling: SamplingParams,
        *,
        trace: PromptTrace,
        send: Callable[[pb.PrefillEvent], None],
    ) -> None:
        prefill = Prefill(lease, prompts, trace=trace, send=send)
        pull = self._pull(request, sampling, prefill) if request.prefix_node else None
        uploads = self._node.images
        prefill.submit(request, sampling, decode_ahead=self._decode_ahead, pull=pull, uploads=uploads)

    def _pull(self, request: pb.PrefillRequest, sampling: SamplingParams, prefill: Prefill) -> PullDriver | None:
        """Return the pull of a prefix; None without a connection to its source, or if the prompt has several choices.

        With several choices, a pull may leave no slot for the recurrent state from which they continue.
        """
        peer = self._peers.find(request.prefix_node)
        if peer is None or sampling.n > 1:
            return None
        prompt = PulledPrefix(request, prefill.rid, prefill.trace.span, self._node.engine, self._peers)
        return PullDriver(self._node, self._peers, peer, prompt)


def make_role(args: argparse.Namespace) -> PrefillRole:
    reading = Reading(options_from(ReadSettings, args))
    leasing = Leasing(options_from(LeaseSettings, args))
    return PrefillRole(options_from(PrefillSettings, args), reading, leasing)
