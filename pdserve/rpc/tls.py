"""TLS between pdserve's own processes: each shows a certificate of one CA, and wants to see one.

    DIR/ca.pem    the CA of this fleet, and of nothing else: whoever has a certificate of it belongs to the fleet
    DIR/cert.pem  this process's certificate, for the DNS name "pdserve", with what links it to the CA
    DIR/key.pem   its private key

Addresses say nothing here, since nodes come and go under any: a certificate is good for its CA and that name.
"""

from __future__ import annotations

import logging
import ssl
from pathlib import Path
from typing import Any

import grpc

from pdserve.errors import ConfigError

SERVER_NAME = "pdserve"
FILES = ("ca.pem", "cert.pem", "key.pem")

_log = logging.getLogger(__name__)

Pems = tuple[bytes, bytes, bytes]  # as FILES
Stamp = tuple[tuple[int, int, int], ...]


def file_stamp(path: Path) -> tuple[int, int, int]:
    """Changes whenever the file does, or the link to it. Raises ConfigError when it is not there."""
    try:
        found = path.stat()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    return found.st_mtime_ns, found.st_ino, found.st_size


def load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Raises ConfigError when there is no such pair of certificate and key."""
    for path in (cert, key):
        file_stamp(path)
    try:
        context.load_cert_chain(cert, key, password="")  # of an encrypted key nobody could be asked for the password
    except (ssl.SSLError, OSError) as exc:
        raise ConfigError(f"{cert} and {key} are no certificate with its unencrypted key, in PEM: {exc}") from exc


class PeerTls:
    """The files of one directory, read again by servers when they have changed: connections that stand go on."""

    def __init__(self, directory: str) -> None:
        """Raises ConfigError when they cannot be used."""
        self._paths = tuple(Path(directory) / name for name in FILES)
        self._stamp = self._look()
        self._pems = self._read()
        self._used = self._served = self._stamp

    @property
    def version(self) -> Stamp:
        """Another one whenever the files have changed and can be used."""
        self._refresh()
        return self._used

    def channel_credentials(self) -> grpc.ChannelCredentials:
        """Of the files as they are now."""
        self._refresh()
        ca, cert, key = self._pems
        return grpc.ssl_channel_credentials(ca, key, cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Looks at the files whenever somebody connects."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(),
            self._fetch,
            require_client_authentication=True,
        )

    def _fetch(self) -> Any:
        """None for no change, which the types of grpc do not know."""
        self._refresh()
        return None if self._used == self._served else self._server_configuration()

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        self._served = self._used
        ca, cert, key = self._pems
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def _refresh(self) -> None:
        """Take up files that have changed. Broken ones leave those of before in force."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._pems = self._read()
            self._used = stamp
        except ConfigError as exc:
            _log.error("%s; the certificate of before stays in use", exc)
        else:
            _log.info("%s was read again", self._paths[1])

    def _look(self) -> Stamp:
        return tuple(map(file_stamp, self._paths))

    def _read(self) -> Pems:
        ca, cert, key = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_chain(context, cert, key)
        try:
            context.load_verify_locations(ca)
        except (ssl.SSLError, OSError) as exc:
            raise ConfigError(f"{ca} holds no certificate in PEM: {exc}") from exc
        return ca.read_bytes(), cert.read_bytes(), key.read_bytes()
