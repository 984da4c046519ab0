"""Another OpenAI-compatible server, with fixed events."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TRANSFER = {"remote_host": "here"}


class Peer:
    """A server that answers as vLLM does, and keeps the bodies of completions."""

    def __init__(
        self,
        status: int,
        event: str = '{"choices":[{"text":"a","token_ids":[1]}]}',
        transfer: dict[str, str] | None = TRANSFER,
    ) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.paths: set[str] = set()  # paths of POST requests
        self._status = status
        self._event = event  # per token
        self._transfer = transfer
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), self._handler())
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,))
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Peer:
        self._thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()

    @property
    def prompts(self) -> list[list[int]]:
        """Prompts of all completions, without order."""
        return sorted(body["prompt"] for body in self.bodies)

    def _handler(self) -> type[BaseHTTPRequestHandler]:
        peer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self._answer(200, json.dumps({"data": [{"id": "m"}]}))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                peer.bodies.append(body)
                peer.paths.add(self.path)
                if peer._status != 200:
                    self._answer(peer._status, '{"error":{"message":"full"}}')
                elif not body["stream"]:
                    self._answer(200, json.dumps({"kv_transfer_params": peer._transfer}))
                else:
                    events = [peer._event] * body["max_tokens"] + ["[DONE]"]
                    self._answer(200, "".join(f"data: {event}\n\n" for event in events))

            def _answer(self, status: int, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Write nothing."""

        return Handler
