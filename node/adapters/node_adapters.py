"""The adapters of a node by name.

load(name) ─► files read and checked, on a thread ─► all ranks have it ─► described to routers
load(name, replace) ─► the same; routers give the name to the new digest, and for ``_GRACE`` seconds the node takes
                       requests of the old one, which routers have sent or queued before
unload(name) ─► not described any more, new requests are refused; running ones go on
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path

from node.context import NodeContext
from pdserve.adapters.adapter import Adapter, NamedAdapter
from pdserve.adapters.adapter_files import read_adapter
from pdserve.checkpoint.hub import resolve_model
from pdserve.errors import ConfigError, ModelNotFound, RequestError, shown

_log = logging.getLogger(__name__)

_GRACE = 10.0  # seconds; a router learns of a reload within one, and may have requests in its queue
_MOST_NAME = 256  # characters of a name


class NodeAdapters:
    """Loads are one after the other. ``on_change`` is called after each change of the described adapters."""

    def __init__(self, node: NodeContext, on_change: Callable[[], None]) -> None:
        self._node = node
        self._on_change = on_change
        self._turn = asyncio.Lock()
        self._names: dict[str, NamedAdapter] = {}
        self._has_given = False  # whether those of --lora were asked for: unloaded ones do not come back
        self._leaving: dict[str, asyncio.TimerHandle] = {}  # by digest, until the end of ``_GRACE``

    async def load_given(self) -> None:
        """Load the adapters of ``--lora`` into a new engine, or those that the last one had. Raises CheckpointError."""
        if self._has_given:
            sources = {name: adapter.root for name, adapter in self._names.items()}
        else:
            sources = dict(text.partition("=")[::2] for text in self._node.config.options.lora)
        for name, source in sources.items():
            await self.load(name, source, replace=True)
        self._has_given = True

    async def load(self, name: str, source: str, *, replace: bool = False) -> NamedAdapter:
        """Serve an adapter, a directory or hub id, under a name.

        Raises ConfigError, CheckpointError or CapacityError: nothing has changed.
        """
        async with self._turn:
            self._check_name(name, replace)
            adapter = await asyncio.to_thread(self._read, source)
            await self._node.engine.add_adapter(adapter)
            named = NamedAdapter(name, adapter.digest, adapter.rank, source)
            timer = self._leaving.pop(adapter.digest, None)
            if timer is not None:
                timer.cancel()
            before = self._names.get(name)
            self._names[name] = named
            if before is not None:
                self._leave_later(before.digest)
            self._describe()
            _log.info("adapter %s is %s…, rank %d, from %s", name, named.digest[:12], named.rank, source)
            return named

    async def unload(self, name: str) -> NamedAdapter:
        """Take no new requests of a name. Raises RequestError for an unknown one."""
        async with self._turn:
            named = self._names.pop(name, None)
            if named is None:
                raise ModelNotFound(f"adapter {shown(name)} is not loaded here; `pdserve lora list` shows the others")
            if not self._is_named(named.digest):
                self._node.engine.remove_adapter(named.digest)
            self._describe()
            return named

    def _check_name(self, name: str, replace: bool) -> None:
        node = self._node
        if node.config.adapters is None:
            raise ConfigError(f"{node.name} takes no adapters; start it with --lora or --max-loras")
        if not name or len(name) > _MOST_NAME or not name.isprintable():
            raise RequestError(f"{shown(name)} is no name of an adapter; use 1 to {_MOST_NAME} printable characters")
        if name == node.config.served_model_name:
            raise RequestError(f"{shown(name)} is the name of the base model; choose another one", "lora_name")
        if name in self._names and not replace:
            raise RequestError(f"adapter {shown(name)} is loaded already; unload it, or set load_inplace", "lora_name")

    def _read(self, source: str) -> Adapter:
        config = self._node.config
        assert config.adapters is not None
        return read_adapter(Path(resolve_model(source)).absolute(), config.model, config.adapters)

    def _leave_later(self, digest: str) -> None:
        """Refuse new requests of a replaced adapter after a while."""
        if not self._is_named(digest) and digest not in self._leaving:
            self._leaving[digest] = asyncio.get_running_loop().call_later(_GRACE, self._leave, digest)

    def _leave(self, digest: str) -> None:
        del self._leaving[digest]
        self._node.engine.remove_adapter(digest)
        self._describe()

    def _is_named(self, digest: str) -> bool:
        return any(named.digest == digest for named in self._names.values())

    def _describe(self) -> None:
        leaving = (NamedAdapter("", digest, 0, "") for digest in self._leaving)
        self._node.adapters = (*self._names.values(), *leaving)
        self._on_change()
