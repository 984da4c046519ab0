"""nginx and HAProxy in front of a router, with and without TLS, configured as their packages' examples do."""

from __future__ import annotations

import getpass
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from machine import patience

# Timeouts are nginx's defaults: 60 s between two reads from the router, 75 s for idle connections.
_NGINX = """
daemon off;
user {user};
worker_processes 1;
pid {directory}/nginx.pid;
error_log {directory}/nginx.log;
events {{}}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    client_max_body_size 64m;
    map $http_upgrade $connection_upgrade {{
        default upgrade;
        '' '';
    }}
    upstream router {{
        server {router};
        keepalive 16;
    }}
    server {{
        listen 127.0.0.1:{plain};
        listen 127.0.0.1:{tls} ssl http2;
        ssl_certificate {directory}/cert.pem;
        ssl_certificate_key {directory}/key.pem;
        location / {{
            proxy_pass http://router;
            proxy_http_version 1.1;
            proxy_set_header Host $host;
            proxy_set_header Upgrade $http_upgrade;
            proxy_set_header Connection $connection_upgrade;
        }}
    }}
}}
"""

# Timeouts are those of Debian's /etc/haproxy/haproxy.cfg.
_HAPROXY = """
global
    maxconn 1000
defaults
    mode http
    timeout connect 5000
    timeout client 50000
    timeout server 50000
frontend all
    bind 127.0.0.1:{plain}
    bind 127.0.0.1:{tls} ssl crt {directory}/both.pem alpn h2,http/1.1
    default_backend router
backend router
    server router {router}
"""

_PROGRAMS = {
    "nginx": (_NGINX, ["nginx", "-c"]),
    "haproxy": (_HAPROXY, ["haproxy", "-db", "-f"]),
}


@contextmanager
def proxy(name: str, directory: Path, router: str) -> Iterator[dict[str, str]]:
    """Run a proxy before the router at an address; yield its URLs by scheme.

    ``directory`` has cert.pem and key.pem. The test is skipped without the program.
    """
    config, command = _PROGRAMS[name]
    if shutil.which(name) is None:
        pytest.skip(f"{name} is missing; install the package {name} to test it")
    plain, tls = _free_ports()
    (directory / "both.pem").write_bytes((directory / "cert.pem").read_bytes() + (directory / "key.pem").read_bytes())
    file = directory / f"{name}.conf"
    user = getpass.getuser()  # nginx's workers run as this user and write large bodies to the directory
    file.write_text(config.format(directory=directory, router=router, plain=plain, tls=tls, user=user))
    with (directory / f"{name}.out").open("wb") as out:
        process = subprocess.Popen([*command, str(file)], stdout=out, stderr=out)
    try:
        for port in (plain, tls):
            _wait_listening(port, process, directory / f"{name}.out")
        yield {"http": f"http://127.0.0.1:{plain}", "https": f"https://127.0.0.1:{tls}"}
    finally:
        process.terminate()
        process.wait(patience(10))


def _free_ports() -> tuple[int, int]:
    with ExitStack() as probes:
        servers = [probes.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(2)]
        return servers[0].getsockname()[1], servers[1].getsockname()[1]


def _wait_listening(port: int, process: subprocess.Popen[bytes], output: Path) -> None:
    end = time.monotonic() + patience(10)
    while True:
        assert process.poll() is None, output.read_text()
        assert time.monotonic() < end, output.read_text()
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
