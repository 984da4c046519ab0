"""The log format of all processes, on stderr: text, or JSON with one object per line.

    2026-11-21 21:04:05.678 INFO    decode: request 5f0c…: done after 0.412 s: …
    {"time":"2026-11-21T21:04:05.678901Z","level":"INFO","logger":"decode_node.request_trace","message":"request …",
     "role":"decode","node":"10.0.0.7:9002","request_id":"5f0c…","trace_id":"4bf92f…"}

Each line about a request carries its id. Texts and tokens of requests are never logged.
"""

from __future__ import annotations

import faulthandler
import logging
import os
import re
import signal
import sys
import time
from datetime import UTC, datetime
from math import inf
from typing import Any

import msgspec

from pdserve.flags.declaration import Flag

FORMATS = ("text", "json")
LEVELS = ("debug", "info", "warning", "error")
LOG_FORMAT = Flag("log format", choices=FORMATS)
LOG_LEVEL = Flag(
    ", ".join(LEVELS), metavar="LEVEL", parse=str.lower, choices=LEVELS, unset="PDSERVE_LOG_LEVEL, else info"
)
_FORMAT = "PDSERVE_LOG_FORMAT"
_LEVEL = "PDSERVE_LOG_LEVEL"
_STDERR = 2
_LIMITED_SECONDS = 10.0
_FIELDS = "request_fields"  # attribute of a log record, set by ``request_fields``
_TEXT = "%(asctime)s.%(msecs)03d %(levelname)-7s {name}: %(message)s"
_TEXT_LINE = re.compile(
    r"(?P<start>\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d{3} (?P<level>[A-Z]+) +)(?P<name>[^:]*): (?P<message>.*)", re.DOTALL
)

_PACKAGES = ("pdserve", "cli", "router", "node", "prefill_node", "decode_node", "elastic_node", "engine", "runner",
             "connector", "__main__")  # fmt: skip

_encoder = msgspec.json.Encoder(enc_hook=str)
_early_warnings: list[str] = []  # found before ``setup_logging``
_process_fields: dict[str, str] = {}  # JSON fields of every line of this process


def chosen_format() -> str:
    """Return the log format of this process, which child processes inherit."""
    log_format = os.environ.get(_FORMAT, "")
    return log_format if log_format in FORMATS else FORMATS[0]


def choose_format(log_format: str) -> None:
    """Set the log format of this process and of its child processes."""
    os.environ[_FORMAT] = log_format


def setup_logging(role: str, log_format: str, level: str = "", name: str = "") -> None:
    """Log to stderr, and print the stack of each thread there at SIGUSR1.

    Call once, before starting child processes, which inherit format and level.

    ``role`` is empty in a process whose parent relays its lines; ``name`` begins its text lines. Without ``level``,
    ``PDSERVE_LOG_LEVEL`` decides (default INFO).
    """
    choose_format(log_format)
    if role:
        set_process_fields(role=role)
    if level:
        os.environ[_LEVEL] = level
    level = os.environ.get(_LEVEL, "INFO").upper()
    is_level = level in logging.getLevelNamesMapping()
    handler = logging.StreamHandler(sys.stderr)
    text_formatter = logging.Formatter(_TEXT.format(name=name or role), "%Y-%m-%d %H:%M:%S")
    handler.setFormatter(_JsonFormatter() if log_format == "json" else text_formatter)
    number = logging.getLevelNamesMapping().get(level, logging.INFO)
    # Below INFO, libraries write more lines than this program: theirs stay at WARNING.
    logging.basicConfig(handlers=[handler], level=number if number >= logging.INFO else logging.WARNING)
    for package in _PACKAGES:
        logging.getLogger(package).setLevel(number)
    faulthandler.register(signal.SIGUSR1, file=_STDERR)
    if not is_level:
        logging.warning("PDSERVE_LOG_LEVEL %r is not a log level; using INFO", level)
    for message in _early_warnings:
        logging.getLogger("pdserve").warning("%s", message)
    _early_warnings.clear()


def warn_early(message: str) -> None:
    """Have ``setup_logging`` log a warning; the log format is not known before it."""
    _early_warnings.append(message)


def set_process_fields(**fields: str) -> None:
    """Add fields to every later JSON line of this process."""
    _process_fields.update(fields)


class LimitedWarnings(logging.Filter):
    """Limit warnings that clients or peers can cause without end: each text passes once per 10 s, with a count.

    The count is of suppressed warnings. The text is the format string, without arguments. Other levels pass.
    """

    def __init__(self) -> None:
        super().__init__()
        self._left_out: dict[object, int] = {}  # by text
        self._pass_at: dict[object, float] = {}  # time.monotonic() at which a text may pass again

    def filter(self, record: logging.LogRecord) -> bool:
        text = record.msg
        now = time.monotonic()
        if record.levelno != logging.WARNING:
            return True
        if now < self._pass_at.get(text, -inf):
            self._left_out[text] += 1
            return False
        if more := self._left_out.get(text):
            record.msg = f"{text}; {more} more such warnings since the last one"
        self._left_out[text] = 0
        self._pass_at[text] = now + _LIMITED_SECONDS
        return True


def request_fields(request_id: str, trace_id: str = "", **fields: object) -> dict[str, object]:
    """Return the ``extra`` of a log line about a request: request id, trace id and further JSON fields."""
    ids = {"request_id": request_id, "trace_id": trace_id}
    return {_FIELDS: {**{name: value for name, value in ids.items() if value}, **fields}}


def json_line(level: str, logger: str, message: str, at: float | None, fields: dict[str, object]) -> str:
    """Format one JSON line without newline. ``at`` is in seconds of ``time.time``; None means now."""
    when = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    stamp = when.isoformat(timespec="microseconds").replace("+00:00", "Z")
    line = {"time": stamp, "level": level, "logger": logger, "message": message} | _process_fields | fields
    return _encoder.encode(line).decode()


def relayed_line(line: str, fields: dict[str, object]) -> str:
    """Format a line of a child process as a JSON line. The child's own fields override ``fields``."""
    record = _parse_json_line(line)
    if record is None:  # a library of the child printed it
        return json_line("INFO", "output", line.rstrip(), None, fields)
    return _encoder.encode(_process_fields | fields | record).decode()


def message_of(line: str) -> str:
    """Return the message of a log line, or any other line as it is."""
    if match := _TEXT_LINE.fullmatch(line):
        return match["message"].strip()
    record = _parse_json_line(line)
    return line.strip() if record is None else str(record["message"])


def relayed_text(line: str, child: str) -> str:
    """Return a text line of a child process under the name ``child``, which replaces the role in log lines."""
    match = _TEXT_LINE.fullmatch(line)
    if match is None:  # a library of the child printed it
        return f"{child}: {line}"
    part = "" if child.startswith(match["name"]) else f" {match['name']}"
    return f"{match['start']}{child}{part}: {match['message']}"


def level_of(line: str) -> str:
    """Return the level of a log line, empty for any other line."""
    if match := _TEXT_LINE.fullmatch(line):
        return match["level"]
    return str((_parse_json_line(line) or {}).get("level", ""))


def _parse_json_line(line: str) -> dict[str, Any] | None:
    """Return None if the line is not a JSON log line."""
    try:
        record = msgspec.json.decode(line) if line.startswith("{") else None
    except (msgspec.DecodeError, RecursionError):
        return None
    return record if isinstance(record, dict) and "message" in record else None


class _JsonFormatter(logging.Formatter):
    """Format a record as one JSON object; field ``stack`` holds the traceback."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, _FIELDS, {}))
        if record.exc_info:
            fields["stack"] = self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, record.getMessage(), record.created, fields)
