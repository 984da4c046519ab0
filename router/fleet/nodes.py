"""All nodes behind this router, of whatever model: found, watched, and left alone once they are not listed any more."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from pdserve.discovery.sources import Directory
from pdserve.rpc.tls import PeerTls
from router.fleet.node_client import NodeClient
from router.fleet.policy import NodeView
from router.fleet.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)

REPORTS = 2000.0  # a second, of all nodes: a quarter of a core for a router


class Nodes:
    """All state is learnt from the nodes; a router that starts anew has it within seconds.

    ``places`` are, for each role, where its nodes are found (pdserve/discovery/sources.py); nodes of other models than
    ``models`` are not used. Raises ConfigError.
    """

    def __init__(
        self, places: Mapping[str, Sequence[str]], models: Collection[str], tls: PeerTls | None = None
    ) -> None:
        self.prefixes = PrefixIndex()
        self.turn = random.getrandbits(32)  # of choices; routers that start together do not go in step
        self._models = models
        self._tls = tls
        self._nodes: dict[tuple[str, str], NodeClient] = {}  # by role and address
        self._known: dict[tuple[str, str], NodeClient] | None = None  # as of the latest change
        self._directories = [Directory(each, partial(self.listed, role)) for role, each in places.items()]
        self._watchers: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._ignored: set[tuple[str, str]] = set()  # addresses and models that were complained of

    def __iter__(self) -> Iterator[NodeClient]:
        """Those that requests may be sent to."""
        return (node for node in self._nodes.values() if not node.leaving)

    def start(self) -> None:
        for directory in self._directories:
            self._run(directory.run())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    # ------------------------------------------------------------ what there is

    @property
    def ready(self) -> bool:
        """At least one decode node of a model that is served is ready."""
        return any(view.ready and view.role == "decode" and view.model in self._models for view in self.views())

    @property
    def complete(self) -> bool:
        """Every node that is listed is ready."""
        return all(directory.complete.is_set() for directory in self._directories) and all(node.ready for node in self)

    def known(self) -> Mapping[tuple[str, str], NodeClient]:
        """All that have said what they are, by role and id: one with several addresses is there once."""
        if self._known is None:
            self._known = {}
            for node in self:
                if node.description is not None:
                    key = node.role, node.description.node_id
                    if key not in self._known or node.ready:
                        self._known[key] = node
        return self._known

    def views(self) -> tuple[NodeView, ...]:
        """Of all that are known."""
        return tuple(view for node in self.known().values() if (view := node.view()) is not None)

    def on_change(self, watcher: Callable[[], None]) -> None:
        self._watchers.append(watcher)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Returns once ``condition`` holds; looked at whenever something changes."""
        while not condition():
            changed = asyncio.Event()
            self.on_change(changed.set)
            try:
                await changed.wait()
            finally:
                self._watchers.remove(changed.set)

    # ------------------------------------------------------------ what changes

    def listed(self, role: str, addresses: frozenset[str]) -> None:
        """These are all that are listed of a role now."""
        for (of_role, address), node in list(self._nodes.items()):
            if of_role == role:
                node.leaving = address not in addresses
                if node.leaving:
                    logger.info("%s node at %s is not listed any more", role, address)
                    self._let_go(node)
        for address in sorted(addresses):
            if (role, address) not in self._nodes:
                node = NodeClient(address, role, self.prefixes, self._changed, self._let_go, self._pause, self._tls)
                self._nodes[role, address] = node
                node.start()
        self._changed()

    def _pause(self) -> float:
        """Seconds between two reports of a node: the more nodes there are, the less is heard of each."""
        return len(self._nodes) / REPORTS

    def _let_go(self, node: NodeClient) -> None:
        """Forget a node that has left, once no request needs it: none is cut off."""
        if node.leaving and not node.in_flight and self._nodes.get((node.role, node.address)) is node:
            del self._nodes[node.role, node.address]
            self._run(node.close())

    def _changed(self) -> None:
        self._known = None
        for node in self:
            described = node.description
            if described is not None and described.model not in self._models:
                self._complain(node.address, described.model)
        for watcher in tuple(self._watchers):
            watcher()

    def _complain(self, address: str, model: str) -> None:
        if (address, model) not in self._ignored:
            self._ignored.add((address, model))
            served = ", ".join(map(repr, self._models))
            logger.warning("node at %s serves model %r, this router %s; it is not used", address, model, served)

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
