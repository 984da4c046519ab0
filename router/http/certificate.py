"""HTTPS for clients, with a certificate that is reloaded when its files change."""

from __future__ import annotations

import ssl
from pathlib import Path

from pdserve.rpc.tls import load_chain
from router.file_reload import FileReloader


class Certificate:
    """The files of ``--tls-cert`` and ``--tls-key``, and the SSL context that uses them."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._paths = Path(cert), Path(key)
        self._reloader = FileReloader(self._paths)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        load_chain(self.context, *self._paths)

    async def watch(self) -> None:
        """Use new files for new connections, until cancelled."""
        await self._reloader.watch(self._load)

    async def _load(self) -> None:
        """Try the files in a scratch context first: a failure may leave half a pair in the context."""
        load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._paths)
        load_chain(self.context, *self._paths)
