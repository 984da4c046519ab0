"""Bodies for bench/hostile.py that a decoder, a tokenizer or a grammar takes long for, and uploads that never end."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

_COMPLETIONS, _CHAT, _RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
_LISTS = "[" + "[]," * 4_000_000 + "1]"


def _chat(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def _call(arguments: str) -> bytes:
    function = {"name": "f", "arguments": arguments}
    return _chat(messages=[{"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}])


def _prompt(numbers: bytes) -> bytes:
    return b'{"max_tokens":1,"prompt":[%b1]}' % numbers


def _ebnf() -> str:
    names = [f"r{i}" for i in range(2600)]
    return "\n".join([f"root ::= {' | '.join(names)}", *(f'{name} ::= "a" [b-z]* ( "x" | "y" )+' for name in names)])


def _tags() -> bytes:
    structures = [{"begin": f"{i}<", "end": "a"} for i in range(3000)]
    triggers = [f"{i}<" for i in reversed(range(3000))]
    return _chat(response_format={"type": "structural_tag", "structures": structures, "triggers": triggers})


def _tools() -> bytes:
    properties = {f"p{i}": {"type": "string", "description": "x" * 500} for i in range(200)}
    functions = [{"name": f"f{i}", "parameters": {"type": "object", "properties": properties}} for i in range(128)]
    return _chat(tools=[{"type": "function", "function": each} for each in functions], tool_choice="required")


def _prompts(prompt: str | list[int]) -> bytes:
    return json.dumps({"prompt": [prompt] * 1024, "max_tokens": 1}).encode()


def _messages(content: Any) -> bytes:
    return _chat(messages=[{"role": "user", "content": content}] * 10_000)


#: Name, path and maker of each body.
BODIES: tuple[tuple[str, str, Callable[[], bytes]], ...] = (
    ("1 M numbers with exponents", _COMPLETIONS, lambda: _prompt(b"1.7976931348623157e308," * 1_000_000)),
    ("8,000 numbers of 4,000 digits", _COMPLETIONS, lambda: _prompt((b"1" * 4000 + b",") * 8_000)),
    ("60 KB of numbers with exponents", _COMPLETIONS, lambda: _prompt(b"1.7976931348623157e308," * 2_700)),
    ("1 M token ids in 1,024 prompts", _COMPLETIONS, lambda: _prompts([300] * 1000)),
    ("1,024 prompts of 20 KB", _COMPLETIONS, lambda: _prompts("word " * 4000)),
    ("30 MB of escapes", _COMPLETIONS, lambda: b'{"prompt":"%b"}' % (b"\\u00e9" * 5_000_000)),
    ("1 M keys", _CHAT, lambda: _chat(metadata=dict.fromkeys(map(str, range(1_000_000)), 1))),
    ("2 M equal keys", _CHAT, lambda: b'{%b"messages":[]}' % (b'"messages":[{}],' * 2_000_000)),
    ("12 MB of lists in arguments", _CHAT, lambda: _call(f'{{"a":{_LISTS}}}')),
    ("12 MB of lists in the text of a schema", _CHAT, lambda: _chat(guided_json=f'{{"a":{_LISTS}}}')),
    ("12 MB of lists in the text of a tag", _CHAT, lambda: _chat(structured_outputs={"structural_tag": _LISTS})),
    ("3,000 structures, 3,000 triggers", _CHAT, _tags),
    ("120 KB of EBNF", _CHAT, lambda: _chat(guided_grammar=_ebnf())),
    ("20 MB of a Lark grammar", _CHAT, lambda: _chat(guided_grammar="start: " + '"a" ' * 5_000_000)),
    ("190,000 choices", _CHAT, lambda: _chat(guided_choice=["c"] * 190_000)),
    ("128 tools of 100 KB", _CHAT, _tools),
    ("10,000 messages of 4 parts", _CHAT, lambda: _messages([{"type": "text", "text": "a"}] * 4)),
    ("10,000 messages of 3 KB", _CHAT, lambda: _messages("word " * 600)),
    ("20 MB of an image", _CHAT, lambda: _chat(messages=[{"role": "user", "content": [{"type": "A" * 20_000_000}]}])),
    ("90,000 items", _RESPONSES, lambda: json.dumps({"input": [{"type": "function_call"}] * 90_000}).encode()),
    ("4 MB of emoji to tokenize", "/tokenize", lambda: json.dumps({"prompt": "🙂🤣" * 500_000}).encode()),
)


UPLOADS, UPLOAD_BYTES, HELD = 100, 12_000_000, 2.0  # seconds
UPLOADS_NAME = f"{UPLOADS} uploads of {UPLOAD_BYTES // 10**6} MB that never end"


def hold_uploads(address: str) -> tuple[str, int, int]:
    """Begin uploads and hold them. Return how many got a 503, and the bytes sent and received."""
    host, _, port = address.rpartition(":")
    sockets, sent = [], 0
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % (2 * UPLOAD_BYTES)
    for _ in range(UPLOADS):
        sockets.append(socket.create_connection((host, int(port)), timeout=30))
        sockets[-1].sendall(head + b" " * UPLOAD_BYTES)
        sent += UPLOAD_BYTES
    time.sleep(HELD)
    answers = []
    for sock in sockets:
        sock.setblocking(False)
        with suppress(BlockingIOError):
            answers.append(sock.recv(1 << 16))
        sock.close()
    refused = sum(answer.startswith(b"HTTP/1.1 503 ") for answer in answers)
    return f"503: {refused} of {UPLOADS}", sent, sum(map(len, answers))
