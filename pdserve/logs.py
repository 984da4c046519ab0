"""One log format for every process of nodes, routers and ``pdserve up``, on stderr: text, or JSON, an object a line.

    21:04:05.678 INFO    decode: request 5f0c…: done after 0.412 s: …
    {"time":"2026-11-21T21:04:05.678901Z","level":"INFO","logger":"decode_node.request_trace","message":"request …",
     "role":"decode","node":"10.0.0.7:9002","request_id":"5f0c…","trace_id":"4bf92f…"}

Whatever is about a request names it, so that its way is what a search for its id finds. Neither texts nor tokens of
requests are logged.
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
_ABOUT = "about"  # the attribute of a record that ``about`` makes
_TEXT = "%(asctime)s.%(msecs)03d %(levelname)-7s {role}: %(message)s"

_encoder = msgspec.json.Encoder(enc_hook=str)
_who: dict[str, str] = {}  # fields of every line of this process


def add_log_flag(parser: argparse.ArgumentParser | argparse._ArgumentGroup) -> None:
    """``--log-format``, for ``setup_logging``."""
    default = chosen_format()
    parser.add_argument("--log-format", choices=FORMATS, default=default, help="of the log (default %(default)s)")


def chosen_format() -> str:
    """That of this process, or what whoever started it has chosen."""
    found = os.environ.get(_FORMAT, "")
    return found if found in FORMATS else FORMATS[0]


def choose_format(log_format: str) -> None:
    """For this process, and for those that it starts."""
    os.environ[_FORMAT] = log_format


def setup_logging(role: str, log_format: str, text: str = "") -> None:
    """Log to stderr at ``PDSERVE_LOG_LEVEL`` (default INFO). Call once, in a process's main, before it starts others.

    A process whose lines another one passes on has no ``role`` but that one's. ``text`` is logging's format of a line
    where that is not JSON, if it is to be another than the usual one.
    """
    choose_format(log_format)
    if role:
        identify(role=role)
    level = os.environ.get("PDSERVE_LOG_LEVEL", "INFO").upper()
    known = level in logging.getLevelNamesMapping()
    handler = logging.StreamHandler(sys.stderr)
    usual = logging.Formatter(text or _TEXT.format(role=role), "%H:%M:%S")
    handler.setFormatter(_Json() if log_format == "json" else usual)
    logging.basicConfig(handlers=[handler], level=level if known else logging.INFO)
    if not known:
        logging.warning("PDSERVE_LOG_LEVEL %r is no level; using INFO", level)


def identify(**fields: str) -> None:
    """What every line in JSON says of this process from now on."""
    _who.update(fields)


def about(request_id: str, trace_id: str = "", **fields: object) -> dict[str, object]:
    """``extra`` of a line about a request: its id, that of its trace, and what programs may want to read in JSON."""
    named = {"request_id": request_id, "trace_id": trace_id}
    return {_ABOUT: {**{name: value for name, value in named.items() if value}, **fields}}


def json_line(level: str, logger: str, message: str, at: float | None, fields: dict[str, object]) -> str:
    """A line of the log, without its end; ``at`` is in seconds of ``time.time``, None is now."""
    time = datetime.now(UTC) if at is None else datetime.fromtimestamp(at, UTC)
    stamp = time.isoformat(timespec="microseconds").replace("+00:00", "Z")
    line = {"time": stamp, "level": level, "logger": logger, "message": message} | _who | fields
    return _encoder.encode(line).decode()


def passed_on(line: str, fields: dict[str, object]) -> str:
    """A line that a child process has printed, as one of a log in JSON, which says besides what ``fields`` say of it.

    What the child logs has the last word. A library of it may have printed something else.
    """
    found = _parsed(line)
    if found is None:
        return json_line("INFO", "output", line.rstrip(), None, fields)
    return _encoder.encode(_who | fields | found).decode()


def message_of(line: str) -> str:
    """What a line says to a person, be it of a log in JSON or anything else."""
    found = _parsed(line)
    return line.strip() if found is None else str(found["message"])


def _parsed(line: str) -> dict[str, Any] | None:
    """A line of a log in JSON; None for any other."""
    try:
        found = msgspec.json.decode(line) if line.startswith("{") else None
    except msgspec.DecodeError:
        return None
    return found if isinstance(found, dict) and "message" in found else None


class _Json(logging.Formatter):
    """A record as an object in one line; an exception's traceback is its field ``stack``."""

    def format(self, record: logging.LogRecord) -> str:
        fields = dict(getattr(record, _ABOUT, {}))
        if record.exc_info:
            fields["stack"] = self.formatException(record.exc_info)
        return json_line(record.levelname, record.name, record.getMessage(), record.created, fields)
