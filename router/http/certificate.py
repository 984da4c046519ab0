"""TLS for clients: a certificate that is taken up anew when its files change."""

from __future__ import annotations

import asyncio
import logging
import ssl
from pathlib import Path

from pdserve.errors import ConfigError
from pdserve.rpc.tls import file_stamp, load_chain

logger = logging.getLogger(__name__)

LOOK_SECONDS = 1.0  # between two looks at the files


class Certificate:
    """The pair of ``--tls-cert`` and ``--tls-key``, and the context that shows it."""

    def __init__(self, cert: str, key: str) -> None:
        """Raises ConfigError when they cannot be used."""
        self._paths = Path(cert), Path(key)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.minimum_version = ssl.TLSVersion.TLSv1_2
        self.context.set_alpn_protocols(["http/1.1"])
        self._stamp = self._look()
        load_chain(self.context, *self._paths)

    async def watch(self) -> None:
        """Have new connections see new files, for ever; broken ones leave those of before in use."""
        complaint = ""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            try:
                stamp = await asyncio.to_thread(self._look)
                if stamp == self._stamp:
                    continue
                self._stamp = stamp
                load_chain(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), *self._paths)  # a failure may leave half of a pair
                load_chain(self.context, *self._paths)
            except ConfigError as exc:
                if str(exc) != complaint:
                    logger.error("%s; the certificate of before stays in use", exc)
                complaint = str(exc)
            else:
                complaint = ""
                logger.info("%s was read again", self._paths[0])

    def _look(self) -> tuple[object, ...]:
        return tuple(map(file_stamp, self._paths))
