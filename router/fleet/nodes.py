"""All nodes of all models: discovered, watched, and dropped when discovery no longer lists them."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec

from pdserve.discovery.sources import Directory
from pdserve.rpc.tls import PeerTls
from router.fleet.node_client import NodeClient
from router.fleet.policy import BOTH, NodeView
from router.fleet.prefix_index import PrefixIndex

logger = logging.getLogger(__name__)

REPORTS = 2000.0  # reports per second, over all nodes: a quarter of a core


class Nodes:
    """All state comes from the nodes; a restarted router has it again within seconds.

    ``sources`` lists node sources by role (pdserve/discovery/sources.py). Nodes of models outside ``models`` are not
    used. Raises ConfigError.
    """

    def __init__(
        self,
        sources: Mapping[str, Sequence[str]],
        models: Collection[str],
        tls: PeerTls | None = None,
        home: str | None = None,
    ) -> None:
        """``home`` is the id of the only node that decodes; None: all that can."""
        self._home = home
        self.prefixes = PrefixIndex()
        # Counter for round-robin ties. Its random start keeps routers that start together from equal choices.
        self.placement_counter = random.getrandbits(32)
        self._models = models
        self._tls = tls
        self._nodes: dict[tuple[str, str], NodeClient] = {}  # by role and address
        self._known: dict[tuple[str, str], NodeClient] | None = None  # None: to be computed
        self._directories = [Directory(source, partial(self.listed, role)) for role, source in sources.items()]
        self._watchers: list[Callable[[], None]] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._warned: set[tuple[str, str]] = set()  # addresses and models

    def __iter__(self) -> Iterator[NodeClient]:
        """Listed nodes: those that may get requests."""
        return (node for node in self._nodes.values() if not node.unlisted)

    def start(self) -> None:
        for directory in self._directories:
            self._run(directory.run())

    async def close(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*(node.close() for node in self._nodes.values()))

    @property
    def ready(self) -> bool:
        """Whether a node that takes requests of a served model is ready."""
        return any(view.serves and view.model in self._models for view in self.views())

    @property
    def complete(self) -> bool:
        """Whether every listed node is ready, and each that decodes can read from the others that prefill."""
        if not all(directory.complete.is_set() for directory in self._directories):
            return False
        views = self.views()
        prefills = [view for view in views if view.prefills]
        return all(node.ready for node in self) and all(
            decode.reads_from(prefill)
            for decode in views
            if decode.decodes
            for prefill in prefills
            if decode.may_read_from(prefill)
        )

    @property
    def starting(self) -> bool:
        """Whether a listed node will be ready soon."""
        descriptions = [node.description for node in self]
        return any(
            description is not None and description.state in ("loading", "connecting") for description in descriptions
        )

    def not_ready(self) -> tuple[list[str], list[str]]:
        """Describe the listed nodes that do not answer, or not as they should, and those that are not ready."""
        unknown = [node for node in self if node.description is None]
        silent = [
            f"{node.role} node at {node.address} {f'is faulty: {node.fault}' if node.fault else 'does not answer'}"
            for node in unknown
        ]
        described = [(node, node.description) for node in self if node.description is not None and not node.ready]
        return silent, [f"{node.role} node at {node.address} is {description.state}" for node, description in described]

    def known(self) -> Mapping[tuple[str, str], NodeClient]:
        """Listed nodes that have described themselves, by role and id; a node with several addresses appears once."""
        if self._known is None:
            self._known = {}
            for node in self:
                if node.description is not None:
                    key = node.role, node.description.node_id
                    if key not in self._known or node.ready:
                        self._known[key] = node
        return self._known

    def find(self, role: str, node_id: str) -> NodeClient:
        """Return the known node that takes requests of a role."""
        nodes = self.known()
        return nodes.get((role, node_id)) or nodes[BOTH, node_id]

    def views(self) -> tuple[NodeView, ...]:
        views = (view for node in self.known().values() if (view := node.view()) is not None)
        if self._home is None:
            return tuple(views)
        return tuple(beside for view in views if (beside := _beside(view, self._home)) is not None)

    @property
    def home(self) -> NodeClient | None:
        """The node that this router runs beside, once it is known."""
        if self._home is None:
            return None
        return next((node for (_, node_id), node in self.known().items() if node_id == self._home), None)

    def on_change(self, watcher: Callable[[], None]) -> None:
        self._watchers.append(watcher)

    async def wait_until(self, condition: Callable[[], bool]) -> None:
        """Return once ``condition`` holds; it is checked at every change."""
        while not condition():
            changed = asyncio.Event()
            self.on_change(changed.set)
            try:
                await changed.wait()
            finally:
                self._watchers.remove(changed.set)

    def listed(self, role: str, addresses: frozenset[str]) -> None:
        """Replace the listed addresses of a role."""
        for node in [node for node in self._nodes.values() if node.role == role]:
            node.unlisted = node.address not in addresses
            if node.unlisted:
                logger.info("%s node at %s is not listed any more", role, node.address)
                self._drop_if_idle(node)
        for address in sorted(addresses):
            if (role, address) not in self._nodes:
                self._nodes[role, address] = NodeClient(
                    address, role, self.prefixes, self._changed, self._drop_if_idle, self._pause, self._tls
                )
        self._changed()

    def _pause(self) -> float:
        """Seconds between two reports of a node; it grows with the number of nodes."""
        return len(self._nodes) / REPORTS

    def _drop_if_idle(self, node: NodeClient) -> None:
        """Close an unlisted node after its last request."""
        if node.unlisted and not node.in_flight and self._nodes.get((node.role, node.address)) is node:
            del self._nodes[node.role, node.address]
            self._run(node.close())

    def _changed(self) -> None:
        self._known = None
        for node in self:
            if node.description is None or node.description.model in self._models:
                continue
            address_and_model = node.address, node.description.model
            if address_and_model not in self._warned:
                self._warned.add(address_and_model)
                served = ", ".join(map(repr, self._models))
                logger.warning("node at %s serves model %r, this router %s; it is not used", *address_and_model, served)
        for watcher in tuple(self._watchers):
            watcher()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _beside(view: NodeView, home: str) -> NodeView | None:
    """Return the view that a router beside node ``home`` has of a node: others compute prompts, or are not used."""
    if view.node_id == home or view.role == "prefill":
        return view
    return msgspec.structs.replace(view, role="prefill") if view.role == BOTH else None
