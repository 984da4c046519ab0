"""A Kubernetes API server for EndpointSlices over HTTP: lists, watches, bookmarks, and a bounded event history."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs

import uvicorn
from starlette.types import Receive, Scope, Send

PATH = "/apis/discovery.k8s.io/v1/namespaces/ai/endpointslices"
JSON = [(b"content-type", b"application/json")]


def endpoint_slice(name: str, addresses: Sequence[str], ready: bool | None = True, port: int = 9001) -> dict[str, Any]:
    conditions = {} if ready is None else {"ready": ready}
    endpoints = [{"addresses": [address], "conditions": conditions} for address in addresses]
    return {"metadata": {"name": name}, "endpoints": endpoints, "ports": [{"name": "grpc", "port": port}]}


class FakeCluster:
    """``seen`` has each request's query and authorization. A nonzero ``fail_with`` is the status of every answer."""

    def __init__(self) -> None:
        self.url = ""
        self.seen: list[tuple[dict[str, str], str]] = []
        self.fail_with = 0
        self._slices: dict[str, dict[str, Any]] = {}
        self._version = 100
        self._log: list[tuple[int, dict[str, Any]]] = []  # events by version
        self._compacted = 0  # events up to this version have been dropped
        self._changed = asyncio.Condition()
        self._watches: set[asyncio.Task[None]] = set()

    @property
    def num_lists(self) -> int:
        return sum("watch" not in query for query, _ in self.seen)

    async def wait_for_requests(self, count: int) -> None:
        """Wait until ``count`` requests have arrived."""
        while len(self.seen) < count:  # noqa: ASYNC110 - requests come from another task
            await asyncio.sleep(0.01)

    async def put(self, item: dict[str, Any]) -> None:
        name = item["metadata"]["name"]
        await self._record_event("MODIFIED" if name in self._slices else "ADDED", item)
        self._slices[name] = item

    async def delete(self, name: str) -> None:
        await self._record_event("DELETED", self._slices.pop(name))

    async def bookmark(self) -> None:
        await self._record_event("BOOKMARK", {"metadata": {}})

    def forget(self) -> None:
        """Drop the event history: clients must list again, as after compaction."""
        self._compacted = self._version
        self._log.clear()

    def end_watches(self) -> None:
        for task in self._watches:
            task.cancel()

    async def _record_event(self, kind: str, item: dict[str, Any]) -> None:
        self._version += 1
        item["metadata"]["resourceVersion"] = str(self._version)
        self._log.append((self._version, {"type": kind, "object": json.loads(json.dumps(item))}))
        async with self._changed:
            self._changed.notify_all()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        query = {key: values[0] for key, values in parse_qs(scope["query_string"].decode()).items()}
        self.seen.append((query, dict(scope["headers"]).get(b"authorization", b"").decode()))
        status = self.fail_with or (200 if scope["path"] == PATH else 404)
        await send({"type": "http.response.start", "status": status, "headers": JSON})
        if status == 200 and "watch" in query:
            task = asyncio.ensure_future(self._watch(int(query["resourceVersion"]), query["labelSelector"], send))
            self._watches.add(task)
            await asyncio.wait([task], timeout=float(query["timeoutSeconds"]))
            task.cancel()
            self._watches.discard(task)
            await send({"type": "http.response.body", "body": b""})
            return
        items = [item for item in self._slices.values() if _selects(query.get("labelSelector", ""), item)]
        listing = {"metadata": {"resourceVersion": str(self._version)}, "items": items}
        await send({"type": "http.response.body", "body": json.dumps(listing).encode()})

    async def _watch(self, version: int, selector: str, send: Send) -> None:
        async def send_event(event: dict[str, Any]) -> None:
            body = json.dumps(event).encode() + b"\n"
            await send({"type": "http.response.body", "body": body, "more_body": True})

        if version < self._compacted:
            await send_event({"type": "ERROR", "object": {"kind": "Status", "code": 410, "message": "too old"}})
            return
        while True:
            for at, event in list(self._log):
                if at > version:
                    version = at
                    if _selects(selector, event["object"]):
                        await send_event(event)
            async with self._changed:
                while self._version <= version:
                    await self._changed.wait()


def _selects(selector: str, item: dict[str, Any]) -> bool:
    """Return whether a label selector matches an item; an item without labels always matches."""
    labels = item["metadata"].get("labels")
    return labels is None or selector in {f"{key}={value}" for key, value in labels.items()}


@asynccontextmanager
async def running_cluster() -> AsyncIterator[FakeCluster]:
    cluster = FakeCluster()
    listener = socket.create_server(("127.0.0.1", 0))
    cluster.url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    config = uvicorn.Config(cluster, lifespan="off", log_config=None, timeout_graceful_shutdown=0)
    server = uvicorn.Server(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    try:
        yield cluster
    finally:
        cluster.end_watches()
        server.should_exit = True
        await serving
