"""Certificates of temporary authorities, written to the files that pdserve reads."""

from __future__ import annotations

from pathlib import Path

import grpc
import trustme

from pdserve.rpc.tls import SERVER_NAME


def write_identity(directory: Path, ca: trustme.CA, *more: trustme.CA) -> Path:
    """Write a ``--grpc-tls`` directory: a certificate of ``ca``, and trust in ``ca`` and ``more``."""
    directory.mkdir(parents=True, exist_ok=True)
    issued = ca.issue_cert(SERVER_NAME)
    (directory / "ca.pem").write_bytes(b"".join(trusted.cert_pem.bytes() for trusted in (ca, *more)))
    (directory / "cert.pem").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    (directory / "key.pem").write_bytes(issued.private_key_pem.bytes())
    return directory


def write_https(cert: Path, key: Path, ca: trustme.CA) -> None:
    """Write files for ``--tls-cert`` and ``--tls-key``, valid for 127.0.0.1."""
    issued = ca.issue_cert("127.0.0.1")
    cert.write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))
    key.write_bytes(issued.private_key_pem.bytes())


def tls_channel(address: str, credentials: grpc.ChannelCredentials) -> grpc.Channel:
    """Open a separate TLS connection to a node at any address."""
    options = (("grpc.ssl_target_name_override", SERVER_NAME), ("grpc.use_local_subchannel_pool", 1))
    return grpc.secure_channel(address, credentials, options)
