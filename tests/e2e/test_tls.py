"""TLS between all processes and to clients, with temporary certificates."""

from __future__ import annotations

import itertools
import ssl
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from certificates import tls_channel, write_https, write_identity
from fleet import Fleet, NodeProcess, start_fleet
from machine import patience

from cli.main import main
from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.errors import ConfigError
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc
from pdserve.rpc.tls import SERVER_NAME, PeerTls
from router.server import Certificate


@pytest.fixture(scope="module")
def ca() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def identity(tmp_path_factory: pytest.TempPathFactory, ca: trustme.CA) -> Path:
    return write_identity(tmp_path_factory.mktemp("tls") / "grpc", ca)


@pytest.fixture(scope="module")
def https(tmp_path_factory: pytest.TempPathFactory, ca: trustme.CA) -> Path:
    directory = tmp_path_factory.mktemp("https")
    write_https(directory / "cert.pem", directory / "key.pem", ca)
    return directory


@pytest.fixture(scope="module")
def fleet(identity: Path, https: Path) -> Iterator[Fleet]:
    """Real nodes with the embedded model and NIXL."""
    flags = ["--grpc-tls", str(identity)]
    pair = ["--tls-cert", str(https / "cert.pem"), "--tls-key", str(https / "key.pem")]
    with start_fleet(
        EMBEDDED_MODEL, 1, 1, True, flags, [*flags, "--handoff-min-tokens", "0"], [*flags, *pair]
    ) as fleet:
        yield fleet


def status(node: NodeProcess, credentials: grpc.ChannelCredentials | None) -> pb.NodeStatus:
    """Call Status over a new connection; credentials None means without TLS."""
    with (
        grpc.insecure_channel(node.address) if credentials is None else tls_channel(node.address, credentials)
    ) as channel:
        return pb_grpc.NodeStub(channel).Status(pb.StatusRequest(), timeout=patience(5.0))


def client(fleet: Fleet, ca: trustme.CA) -> httpx.Client:
    context = ssl.create_default_context()
    ca.configure_trust(context)
    assert fleet.router is not None
    return httpx.Client(
        base_url=f"https://{fleet.router.address}", verify=context, trust_env=False, timeout=patience(30)
    )


def wait_for(condition: Callable[[], bool], seconds: float = 10.0) -> None:
    end = time.monotonic() + patience(seconds)
    while not condition():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.05)


def test_tools_without_tls_say_that_the_other_side_has_it(fleet: Fleet, capsys: pytest.CaptureFixture[str]) -> None:
    assert fleet.router is not None
    for address in (fleet.decode[0].address, fleet.router.address):
        assert main(["weights", "show", address]) == 1
        assert f"{address} speaks TLS only; give --grpc-tls DIR" in capsys.readouterr().err


def test_prompt_travels_with_mutual_tls(fleet: Fleet, ca: trustme.CA, identity: Path) -> None:
    credentials = PeerTls(str(identity)).channel_credentials()
    with client(fleet, ca) as http:
        body = {"prompt": list(range(100, 180)), "max_tokens": 5, "ignore_eos": True}
        answer = http.post("/v1/completions", json=body).json()
    assert answer["usage"]["completion_tokens"] == 5
    counters = status(fleet.decode[0], credentials).counters
    assert counters["pdserve_handoffs_total"] == 1
    assert counters["pdserve_handoff_recomputes_total"] == 0


def test_peers_without_certificate_are_refused(fleet: Fleet, ca: trustme.CA) -> None:
    stranger = trustme.CA()
    foreign = stranger.issue_cert(SERVER_NAME)
    root = ca.cert_pem.bytes()
    key = foreign.private_key_pem.bytes()
    chain = b"".join(blob.bytes() for blob in foreign.cert_chain_pems)
    for node in (*fleet.prefill, *fleet.decode):
        for credentials in (
            None,
            grpc.ssl_channel_credentials(root),
            grpc.ssl_channel_credentials(root, key, chain),
        ):
            with pytest.raises(grpc.RpcError) as refused:
                status(node, credentials)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
    assert fleet.router is not None
    with pytest.raises(httpx.HTTPError):
        httpx.get(f"http://{fleet.router.address}/health", trust_env=False)
    with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
        httpx.get(f"https://{fleet.router.address}/health", trust_env=False)


def test_server_of_another_ca_is_refused(fleet: Fleet, identity: Path, tmp_path: Path) -> None:
    credentials = PeerTls(str(write_identity(tmp_path / "other", trustme.CA()))).channel_credentials()
    with pytest.raises(grpc.RpcError, match="CERTIFICATE_VERIFY_FAILED"):
        status(fleet.decode[0], credentials)


@pytest.mark.slow
def test_renewed_certificates_are_used(fleet: Fleet, ca: trustme.CA, identity: Path, https: Path) -> None:
    """New connections of servers and clients use the new CA; broken files later change nothing."""
    new = trustme.CA()
    write_identity(identity, new)
    write_https(https / "cert.pem", https / "key.pem", new)
    credentials = PeerTls(str(identity)).channel_credentials()
    with client(fleet, new) as http:

        def answers() -> bool:
            try:
                return http.get("/health").status_code == 200
            except httpx.ConnectError:
                return False

        def handed_off() -> bool:
            before = status(fleet.decode[0], credentials).counters["pdserve_handoffs_total"]
            body = {"prompt": [next(numbers)] * 80, "max_tokens": 5, "ignore_eos": True}
            assert http.post("/v1/completions", json=body).json()["usage"]["completion_tokens"] == 5
            return status(fleet.decode[0], credentials).counters["pdserve_handoffs_total"] > before

        numbers = itertools.count(100)
        wait_for(answers)
        fleet.prefill[0].kill()
        fleet.prefill[0].restart()  # its peers reconnect with certificates of the new CA
        wait_for(handed_off)
        for directory in (identity, https):
            (directory / "cert.pem").write_text("nothing")
        assert handed_off()


def test_invalid_certificate_files_are_explained(tmp_path: Path, ca: trustme.CA) -> None:
    directory = write_identity(tmp_path / "a", ca)
    other = write_identity(tmp_path / "b", ca)
    cert = directory / "cert.pem"
    key = directory / "key.pem"
    key.write_bytes((other / "key.pem").read_bytes())
    for make in (lambda: PeerTls(str(directory)), lambda: Certificate(str(cert), str(key))):
        with pytest.raises(ConfigError, match=r"PEM certificate with its unencrypted key.*mismatch"):
            make()
    with pytest.raises(ConfigError, match=r"ca\.pem cannot be read: No such file"):
        PeerTls(str(tmp_path))
    (other / "ca.pem").write_text("nothing")
    with pytest.raises(ConfigError, match=r"ca\.pem has no PEM certificate"):
        PeerTls(str(other))
