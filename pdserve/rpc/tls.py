"""Mutual TLS between pdserve processes.

    DIR/ca.pem    the CA of this fleet; every process with a certificate of this CA belongs to the fleet
    DIR/cert.pem  this process's certificate for the DNS name "pdserve", with its chain to the CA
    DIR/key.pem   its private key

Peers check the CA and that name, not the address, since nodes change addresses.
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
    """Return a value that changes with the file or its symlink. Raises ConfigError if it cannot be read."""
    try:
        status = path.stat()
    except OSError as exc:
        raise ConfigError(f"{path} cannot be read: {exc.strerror}") from exc
    return status.st_mtime_ns, status.st_ino, status.st_size


def load_chain(context: ssl.SSLContext, cert: Path, key: Path) -> None:
    """Load a certificate and its key. Raises ConfigError if they cannot be used."""
    for path in (cert, key):
        file_stamp(path)
    try:
        context.load_cert_chain(cert, key, password="")  # an encrypted key is an error, not a prompt
    except (ssl.SSLError, OSError) as exc:
        raise ConfigError(f"{cert} and {key} are not a PEM certificate with its unencrypted key: {exc}") from exc


class PeerTls:
    """Credentials from one directory. Changed files apply to new connections; open connections stay."""

    def __init__(self, directory: str) -> None:
        """Raises ConfigError if the files cannot be used."""
        self._paths = tuple(Path(directory) / name for name in FILES)
        self._stamp = self._look()
        self._pems = self._read()
        self._used = self._served = self._stamp

    @property
    def version(self) -> Stamp:
        """The version of the credentials in use; changes when valid new files appear."""
        self._refresh()
        return self._used

    def channel_credentials(self) -> grpc.ChannelCredentials:
        self._refresh()
        ca, cert, key = self._pems
        return grpc.ssl_channel_credentials(ca, key, cert)

    def server_credentials(self) -> grpc.ServerCredentials:
        """Return server credentials that check the files for changes at each new connection."""
        return grpc.dynamic_ssl_server_credentials(
            self._server_configuration(), self._fetch, require_client_authentication=True
        )

    def _fetch(self) -> Any:
        """Return None if unchanged, which grpc's type stubs do not declare."""
        self._refresh()
        return None if self._used == self._served else self._server_configuration()

    def _server_configuration(self) -> grpc.ServerCertificateConfiguration:
        self._served = self._used
        ca, cert, key = self._pems
        return grpc.ssl_server_certificate_configuration([(key, cert)], ca)

    def _refresh(self) -> None:
        """Read changed files. Invalid files leave the previous credentials in use."""
        try:
            stamp = self._look()
            if stamp == self._stamp:
                return
            self._stamp = stamp
            self._pems = self._read()
            self._used = stamp
        except ConfigError as exc:
            _log.error("%s; the previous certificate stays in use", exc)
        else:
            _log.info("reloaded certificate %s", self._paths[1])

    def _look(self) -> Stamp:
        return tuple(map(file_stamp, self._paths))

    def _read(self) -> Pems:
        ca, cert, key = self._paths
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        load_chain(context, cert, key)
        try:
            context.load_verify_locations(ca)
        except (ssl.SSLError, OSError) as exc:
            raise ConfigError(f"{ca} has no PEM certificate: {exc}") from exc
        return ca.read_bytes(), cert.read_bytes(), key.read_bytes()
