"""Real nodes with a fault proxy for every prefill node, for tests of the nodes themselves.

    prefill ◄── proxy ────────┐
    short   ◄── short_proxy ──┴── decode      policy recompute
    prefill ◄── proxy ────────┐
    short   ◄─────────────────┴── strict      policy fail

``short`` grants leases of 0.6 s and a guard of 0.2 s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from fault_proxy import FaultProxy
from fleet import Fleet, NodeProcess

LEASE_SECONDS = 0.6
LEASE_GUARD = 0.2
FLAGS = ("--block-size", "8", "--kv-cache-memory", "1MiB", "--max-model-len", "512", "--max-waiting", "8")


@dataclass
class Nodes:
    checkpoint: Path
    prefills: Fleet
    decodes: Fleet
    proxy: FaultProxy
    short_proxy: FaultProxy

    @property
    def prefill(self) -> NodeProcess:
        return self.prefills.prefill[0]

    @property
    def short(self) -> NodeProcess:
        return self.prefills.prefill[1]

    @property
    def decode(self) -> NodeProcess:
        return self.decodes.decode[0]

    @property
    def strict(self) -> NodeProcess:
        return self.decodes.decode[1]

    @property
    def main(self) -> str:
        """Node id of the prefill node with ordinary leases."""
        return self.prefill.address

    def counter(self, name: str, node: NodeProcess | None = None) -> float:
        """See ``NodeProcess.counter``."""
        return (node or self.decode).counter(name)

    def wait_peers(self, node: NodeProcess, count: int) -> None:
        """Wait until a decode node is connected to ``count`` prefill nodes."""
        self.decodes.wait_until(lambda: len(node.describe().connected_peers) == count, 20.0)

    def settle(self) -> None:
        """Remove all hooks of the proxies, and wait until all nodes are idle."""
        for proxy in (self.proxy, self.short_proxy):
            proxy.reset()
        for node in (self.prefill, self.short, self.decode, self.strict):
            node.wait_idle()


@contextlib.contextmanager
def start_nodes(checkpoint: Path) -> Iterator[Nodes]:
    with Fleet() as prefills, Fleet() as decodes, FaultProxy() as proxy, FaultProxy() as short:
        leases = ("--lease-seconds", str(LEASE_SECONDS), "--lease-guard", str(LEASE_GUARD))
        proxy.target = prefills.start_prefill(checkpoint, FLAGS).address
        short.target = prefills.start_prefill(checkpoint, [*FLAGS, *leases]).address
        peers = [word for node in (proxy, short) for word in ("--prefill", node.address)]
        decodes.start_decode(checkpoint, [*FLAGS, *peers])
        peers = ["--prefill", proxy.address, "--prefill", prefills.prefill[1].address]
        decodes.start_decode(checkpoint, [*FLAGS, *peers, "--kv-failure-policy", "fail"])
        prefills.wait_ready()
        decodes.wait_ready()
        nodes = Nodes(checkpoint, prefills, decodes, proxy, short)
        nodes.wait_peers(nodes.decode, 2)
        nodes.wait_peers(nodes.strict, 2)
        yield nodes
