"""A server of the Hugging Face hub's API for one repository: listing, files, ranges. It counts the bytes of files."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, Self

COMMIT = "0123456789abcdef0123456789abcdef01234567"
REVISIONS = ("main", COMMIT)


class FakeHub:
    """Serves the files of ``directory`` as the repository ``name``."""

    def __init__(self, name: str, directory: Path) -> None:
        self.name = name
        self.files = {path.name: path for path in sorted(directory.iterdir()) if path.is_file()}
        self.sent: dict[str, int] = {}  # file → bytes
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    @contextmanager
    def running(self) -> Iterator[Self]:
        thread = threading.Thread(target=self._server.serve_forever)
        thread.start()
        try:
            yield self
        finally:
            self._server.shutdown()
            self._server.server_close()
            thread.join()

    def entries(self) -> list[dict[str, Any]]:
        return [
            {"type": "file", "path": name, "size": path.stat().st_size, "oid": _etag(path)}
            for name, path in self.files.items()
        ]


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        pass

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        wanted = json.loads(body)["paths"] if body[:1] == b"{" else []
        self._json([entry for entry in self.hub.entries() if entry["path"] in wanted])

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        api = f"/api/models/{self.hub.name}"
        repository = f"/{self.hub.name}/resolve/"
        if path.startswith(f"{api}/tree/"):
            self._json(self.hub.entries())
        elif path == api or path.startswith(f"{api}/revision/"):
            siblings = [{"rfilename": name} for name in self.hub.files]
            self._json({"id": self.hub.name, "modelId": self.hub.name, "sha": COMMIT, "siblings": siblings})
        elif path.startswith(repository) and path.rpartition("/")[2] in self.hub.files:
            self._file(path.rpartition("/")[2])
        else:
            self._send(404, b"{}", {"X-Error-Code": "EntryNotFound"})

    def _json(self, value: object) -> None:
        self._send(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def _file(self, name: str) -> None:
        path = self.hub.files[name]
        size = path.stat().st_size
        begin = 0
        end = size
        status = 200
        if ranges := self.headers.get("Range"):
            first, _, last = ranges.removeprefix("bytes=").partition("-")
            begin = int(first)
            end = min(size, int(last or size - 1) + 1)
            status = 206
        with path.open("rb") as file:
            file.seek(begin)
            data = file.read(end - begin)
        if self.command == "GET":
            self.hub.sent[name] = self.hub.sent.get(name, 0) + len(data)
        headers = {"ETag": f'"{_etag(path)}"', "X-Repo-Commit": COMMIT, "Accept-Ranges": "bytes"}
        if status == 206:
            headers["Content-Range"] = f"bytes {begin}-{end - 1}/{size}"
        self._send(status, data, headers)

    def _send(self, status: int, data: bytes, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


def _etag(path: Path) -> str:
    return hashlib.sha1(path.name.encode()).hexdigest()
