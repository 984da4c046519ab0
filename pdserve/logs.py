"""The log format of all processes, on stderr: text, or JSON with one object per line.

    21:04:05.678 INFO    decode: request 5f0c…: done after 0.412 s: …
    {"time":"2026-11-21T21:04:05.678901Z","level":"INFO","logger":"decode_node.request_trace","message":"request …",
     "role":"decode","node":"10.0.0.7:9002","request_id":"5f0c…","trace_id":"4bf92f…"}

Each line about a request carries its id. Texts and tokens of requests are never logged.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

FORMATS = ("text", "json")
_FORMAT = "PDSERVE_LOG_FORMAT"
_FIELDS = "request_fields"  # attribute of a log record, set by ``request_fields``
_TEXT = "%(asctime)s.%(msecs)03d %(levelname)-7s {role}: %(message)s"

_encoder = msgspec.json.Encoder(enc_hook=str)
_process_fields: dict[str, str] = {}  # JSON fields of every line of this process


def add_log_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    default = chosen_format()
    parser.add_argument("--log-format", choices=FORMATS, default=default, help="log format (default %(default)s)")


def chosen_format() -> str:
    """Return the log format of this process, which child processes inherit."""
    found = os.environ.get(_FORMAT, "")
    return found if found in FORMATS else FORMATS[0]


def choose_format(log_format: str) -> None:
    """Set the log format of this process and of its child processes."""
    os.environ[_FORMAT] = log_format


def setup_logging(role: str, log_format: str, text: str = "") -> None:
    """Log to stderr at ``PDSERVE_LOG_LEVEL`` (default INFO). Call once, before starting child processes.

    ``role`` is empty in a process whose parent relays its lines. ``text`` overrides the format of text lines.
    """
    choose_format(log_format)
    if role:
        set_process_fields(role=role)
    level = os.environ.get("PDSERVE_LOG_LEVEL", "INFO").upper()
    known = level in logging.getLevelNamesMapping()
    handler = logging.StreamHandler(sys.stderr)
    text_formatter = logging.Formatter(text or _TEXT.format(role=role), "%H:%M:%S")
    handler.setFormatter(_JsonFormatter() if log_format == "json" else text_formatter)
    logging.basicConfig(handlers=[handler], level=level if known else logging.INFO)
    if not known:
        logging.warning("PDSERVE_LOG_LEVEL %r is not a log level; using INFO", level)


def set_process_fields(**fields: str) -> None:
    """Add fields to every later JSON line of this process."""
    _process_fields.update(fields)


def request_fields(request_id: str, trace_id: str = "", **fields: object) -> dict[str, object]:
    """Return the ``extra`` of a log line about a request: request id, trace id and further JSON fields."""
    ids = {"request_id": request_id, "trace_id": trace_id}
    return {_FIELDS: {**{name: value for name, value in ids.items() if value}, **fields}}


def json_line(level: str, logger: str, message: str, at: float | None, fields: dict[str, object]) -> str:
    """Format one JSON line without newline. ``at`` is in seconds of ``time.time``; None means now."""
    time = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    stamp = time.isoformat(timespec="microseconds").replace("+00:00", "Z")
    line = {"time": stamp, "level": level, "logger": logger, "message": message} | _process_fields | fields
    return _encoder.encode(line).decode()


def relayed_line(line: str, fields: dict[str, object]) -> str:
    """Format a line of a child process as a JSON line. The child's own fields override ``fields``."""
    found = _parse_json_line(line)
    if found is None:  # a library of the child printed it
        return json_line("INFO", "output", line.rstrip(), None, fields)
    return _encoder.encode(_process_fields | fields | found).decode()


def message_of(line: str) -> str:
    """Return the message of a JSON line, or any other line as it is."""
    found = _parse_json_line(line)
    return line.strip() if found is None else str(found["message"])


def _parse_json_line(line: str) -> dict[str, Any] | None:
    """Return None if the line is not a JSON log line."""
    try:
        found = msgspec.json.decode(line) if line.startswith("{") else None
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) and "message" in found else None


class _JsonFormatter(logging.Formatter):
    """Format a record as one JSON object; field ``stack`` holds the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, _FIELDS, {}))
        if record.exc_info:
            fields["stack"] = self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, record.getMessage(), record.created, fields)
