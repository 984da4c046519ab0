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
from collections.abc import AsyncGenerator, Iterable, Mapping
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
_PAUSE_MIN = 0.5  # seconds before the attempt after a failure
_PAUSE_MAX = 30.0  # seconds


class Cluster(msgspec.Struct, frozen=True):
    """Access to the API server. The token is read for every request, because Kubernetes replaces it every hour."""

    url: str
    token_file: Path
    ca_file: Path | None = None  # None: the system's

    @classmethod
    def from_environment(cls, environ: Mapping[str, str] = os.environ, account: Path = _ACCOUNT) -> Cluster:
        """Return the cluster that this process runs in. Raises ConfigError outside of a cluster."""
        host = environ.get("KUBERNETES_SERVICE_HOST")
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ConfigError(
                "k8s:// works only inside a cluster, and KUBERNETES_SERVICE_HOST is not set here; run in a pod, or use "
                "dns:// or addresses"
            )
        return cls(f"https://{join_address(host, int(port))}", account / "token", account / "ca.crt")

    def connect(self) -> httpx.AsyncClient:
        """Raises OSError or ssl.SSLError if the CA cannot be read; requests raise OSError without a token file."""
        return httpx.AsyncClient(
            auth=self._authorize,
            base_url=self.url,
            event_hooks={"response": [_check]},
            timeout=httpx.Timeout(_GRACE, read=_WATCH + _GRACE),
            trust_env=False,
            verify=ssl.create_default_context(cafile=self.ca_file),
        )

    def _authorize(self, request: httpx.Request) -> httpx.Request:
        request.headers["Authorization"] = f"Bearer {self.token_file.read_text().strip()}"
        return request


class Gone(Exception):
    """The API server no longer has the changes since our version."""


async def _check(response: httpx.Response) -> None:
    if response.status_code == 410:
        raise Gone
    response.raise_for_status()


class ServiceEndpoints:
    """``port`` is the pods' port number, or its name in the service."""

    def __init__(self, cluster: Cluster, namespace: str, service: str, port: str) -> None:
        self._cluster = cluster
        self._name = f"service {namespace}/{service}"
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = {"labelSelector": f"kubernetes.io/service-name={service}"}
        self._port = port

    async def addresses(self) -> AsyncGenerator[frozenset[str], None]:
        previous: frozenset[str] | None = None
        failures = 0
        while True:
            try:
                async with self._cluster.connect() as client:
                    async for slices in self._follow(client):
                        failures = 0
                        current = addresses_of(slices, self._port)
                        if current != previous:
                            previous = current
                            yield current
            except Gone:
                _log.info("%s: changes were missed; listing it again", self._name)
                await asyncio.sleep(_BETWEEN)
            except (httpx.HTTPError, OSError, ValueError, KeyError, TypeError) as exc:
                failures += 1
                reason = str(exc) or type(exc).__name__
                _log.warning("%s cannot be watched: %s; its known addresses stay in use", self._name, reason)
                pause = min(_PAUSE_MAX, _PAUSE_MIN * 2.0 ** min(failures - 1, 10))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))

    async def _follow(self, client: httpx.AsyncClient) -> AsyncGenerator[Iterable[dict[str, Any]], None]:
        """List the slices, then watch them until it is time to list them again. Yields all slices after each change."""
        ends = time.monotonic() + _RESYNC * random.uniform(0.9, 1.1)
        listed = (await client.get(self._path, params=self._selector)).json()
        slices = {item["metadata"]["name"]: item for item in listed["items"] or ()}
        yield slices.values()
        version = listed["metadata"]["resourceVersion"]
        while time.monotonic() < ends:
            async with aclosing(self._watch(client, version)) as events:
                async for event in events:
                    kind = event["type"]
                    item = event["object"]
                    version = item["metadata"]["resourceVersion"]
                    if kind == "BOOKMARK":
                        continue
                    if kind == "DELETED":
                        slices.pop(item["metadata"]["name"], None)
                    else:
                        slices[item["metadata"]["name"]] = item
                    yield slices.values()
            await asyncio.sleep(_BETWEEN)

    async def _watch(self, client: httpx.AsyncClient, version: str) -> AsyncGenerator[dict[str, Any], None]:
        """Yield the events after a version until the server ends the watch. Raises Gone."""
        params = {
            **self._selector,
            "watch": "true",
            "resourceVersion": version,
            "allowWatchBookmarks": "true",
            "timeoutSeconds": str(_WATCH),
        }
        async with client.stream("GET", self._path, params=params) as response:
            async for line in response.aiter_lines():
                if not line:
                    continue
                event = json.loads(line)
                if event["type"] == "ERROR":
                    if event["object"].get("code") == 410:
                        raise Gone
                    raise ValueError(f"the API server reports {event['object'].get('message', event['object'])}")
                yield event


def addresses_of(slices: Iterable[dict[str, Any]], port: str) -> frozenset[str]:
    """Return host:port of all ready endpoints. By the API's definition an unknown condition counts as ready."""
    addresses: set[str] = set()
    for item in slices:
        ports = (entry["port"] for entry in item.get("ports") or () if entry.get("name") == port)
        number = int(port) if port.isdecimal() else next(ports, None)
        for endpoint in item.get("endpoints") or ():
            if number and (endpoint.get("conditions") or {}).get("ready") is not False:
                addresses.update(join_address(address, number) for address in endpoint["addresses"])
    return frozenset(addresses)
