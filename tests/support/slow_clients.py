"""Clients that do not read their streams."""

from __future__ import annotations

import json
import socket
from http.client import HTTPResponse
from typing import Any

from fleet import MODEL_NAME

#: A stream that is far larger than all buffers between a node and the client.
UNREAD = {"n": 8, "max_tokens": 2000, "logprobs": 20}


def send_unread(url: str, fields: dict[str, Any]) -> socket.socket:
    """Send a streaming completion request and return the connection, of which nothing has been read."""
    body = {"model": MODEL_NAME, "prompt": [5] * 40, "ignore_eos": True, "stream": True, **fields}
    data = json.dumps(body).encode()
    host, _, port = url.removeprefix("http://").rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.settimeout(60.0)
    client.connect((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
    client.sendall(head.encode() + data)
    return client


def read_tokens(client: socket.socket) -> list[int]:
    """Read the stream of a connection of ``send_unread`` to its end. Return the token ids of its only choice."""
    with HTTPResponse(client) as response:
        response.begin()
        lines = response.read().decode().split("\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
    return [token for event in events for choice in event["choices"] for token in choice["token_ids"] or ()]
