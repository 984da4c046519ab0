"""The ready endpoints of a Kubernetes service: its EndpointSlices are listed, then watched.

    list ──resourceVersion──► watch ──ends──► watch from where it ended … ──every ten minutes──► list
      ▲                         │ 410 Gone: the version is too old
      └──────────◄──────────────┴─ any other error: pause

Source: https://kubernetes.io/docs/reference/using-api/api-concepts/#efficient-detection-of-changes
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import ssl
import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping
from contextlib import aclosing
from pathlib import Path
from typing import Any

import httpx
import msgspec

from pdserve.errors import ConfigError
from pdserve.rpc.address import join_address

_log = logging.getLogger(__name__)

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_WATCH = 60  # seconds that a watch lasts, which limits how long a dead one goes unnoticed
_GRACE = 15.0  # seconds that the server has beyond that to end it, and to answer anything else
_RESYNC = 600.0  # seconds after which everything is listed again
_BETWEEN = 0.2  # seconds from the end of a watch to the next request; no change is missed meanwhile
_PAUSE_MIN, _PAUSE_MAX = 0.5, 30.0  # seconds before the attempt after a failure


class Cluster(msgspec.Struct, frozen=True):
    """Access to the API server. The token is read for every request, because Kubernetes replaces it every hour."""

    url: str
    token_file: Path
    ca_file: Path | None = None  # None: the system's

    @classmethod
    def around(cls, environ: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> Cluster:
        """Return the cluster that this process runs in. Raises ConfigError outside of a cluster."""
        host, port = environ.get("KUBERNETES_SERVICE_HOST"), environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "k8s:// works only inside a cluster, and KUBERNETES_SERVICE_HOST is not set here; run in a pod, or use "
                "dns:// or addresses"
            )
        return cls(f"https://{join_address(host, int(port))}", account / "token", account / "ca.crt")

    def connect(self) -> httpx.AsyncClient:
        """Raises OSError or ssl.SSLError if the CA cannot be read."""
        verify = ssl.create_default_context(cafile=None if self.ca_file is None else str(self.ca_file))
        timeout = httpx.Timeout(_GRACE, read=_WATCH + _GRACE)
        return httpx.AsyncClient(base_url=self.url, verify=verify, timeout=timeout, trust_env=False)

    def headers(self) -> dict[str, str]:
        """Raises OSError if the token file is missing."""
        return {"Authorization": f"Bearer {self.token_file.read_text().strip()}"}


class Gone(Exception):
    """The API server no longer has the changes since our version."""


class ServiceEndpoints:
    """``port`` is the pods' port number, or its name in the service."""

    def __init__(self, cluster: Cluster, namespace: str, service: str, port: str) -> None:
        self._cluster = cluster
        self._name = f"service {namespace}/{service}"
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._port = port
        self._slices: dict[str, dict[str, Any]] = {}  # by name
        self._version = ""

    async def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        known: frozenset[str] | None = None
        failures = 0
        while True:
            try:
                async with self._cluster.connect() as client:
                    async for _ in self._changes(client):
                        failures = 0
                        found = addresses_of(self._slices.values(), self._port)
                        if found != known:
                            known = found
                            yield found
            except Gone:
                _log.info("%s: changes were missed; listing it again", self._name)
                await asyncio.sleep(_BETWEEN)
            except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as exc:
                failures += 1
                reason = str(exc) or type(exc).__name__
                _log.warning("%s cannot be watched: %s; its known addresses stay in use", self._name, reason)
                pause = min(_PAUSE_MAX, _PAUSE_MIN * 2.0 ** min(failures - 1, 10))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _changes(self, client: httpx.AsyncClient) -> AsyncIterator[None]:
        """Keep ``_slices`` up to date until it is time to list them again; yields after each change."""
        ends = time.monotonic() + _RESYNC * random.uniform(0.9, 1.1)
        await self._list(client)
        yield
        while time.monotonic() < ends:
            async with aclosing(self._watch(client)) as events:
                async for event in events:
                    if self._apply(event):
                        yield
            await asyncio.sleep(_BETWEEN)

    async def _list(self, client: httpx.AsyncClient) -> None:
        response = await client.get(self._path, params=self._selector, headers=self._cluster.headers())
        _check(response)
        found = response.json()
        self._slices = {item["metadata"]["name"]: item for item in found["items"] or ()}
        self._version = found["metadata"]["resourceVersion"]

    async def _watch(self, client: httpx.AsyncClient) -> AsyncGenerator[dict[str, Any], None]:
        params = {
            **self._selector,
            "watch": "true",
            "resourceVersion": self._version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH),
        }
        async with client.stream("GET", self._path, params=params, headers=self._cluster.headers()) as response:
            _check(response)
            async for line in response.aiter_lines():
                if line:
                    yield json.loads(line)

    def _apply(self, event: dict[str, Any]) -> bool:
        """Apply a watch event. Returns whether a slice has changed. Raises Gone."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            if item.get("code") == 410:
                raise Gone
            raise ValueError(f"the API server reports {item.get('message', item)}")
        self._version = item["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return False
        name = item["metadata"]["name"]
        if kind == "DELETED":
            self._slices.pop(name, None)
        else:
            self._slices[name] = item
        return True


def _check(response: httpx.Response) -> None:
    if response.status_code == 410:
        raise Gone
    response.raise_for_status()


def addresses_of(slices: Iterable[dict[str, Any]], port: str) -> frozenset[str]:
    """Return host:port of all ready endpoints. By the API's definition an unknown condition counts as ready."""
    found: set[str] = set()
    for item in slices:
        number = _port_of(item, port)
        for endpoint in item.get("endpoints") or ():
            if number and (endpoint.get("conditions") or {}).get("ready") is not False:
                found.update(join_address(address, number) for address in endpoint["addresses"])
    return frozenset(found)


def _port_of(item: dict[str, Any], port: str) -> int | None:
    if port.isdecimal():
        return int(port)
    return next((each["port"] for each in item.get("ports") or () if each.get("name") == port), None)
