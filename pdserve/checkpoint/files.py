"""Bounded reads of a checkpoint's files. A hostile file costs neither time nor memory: it is refused by its size."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from pdserve.errors import CheckpointError

#: Errors that msgspec raises for hostile JSON.
DECODE_ERRORS = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)

MAX_TOKENIZER_CONFIG = 16 << 20  # bytes of tokenizer_config.json
MAX_TOKENIZER = 128 << 20  # bytes of tokenizer.json; real ones have up to 40 MB
_MAX_NESTING = 64  # levels of objects and lists in a JSON file; real ones have fewer than ten
_TOO_DEEP = f"is nested more than {_MAX_NESTING} levels deep; correct it or download the checkpoint again"


@contextlib.contextmanager
def open_regular(path: Path) -> Iterator[tuple[int, os.stat_result]]:
    """Open a regular file and yield its descriptor and status; a pipe or device is refused without waiting.

    Raises CheckpointError, also for an OSError in the body.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise CheckpointError(f"{path} is not a regular file; download the checkpoint again")
            yield fd, status
        finally:
            os.close(fd)
    except OSError as exc:
        raise CheckpointError(f"{path} cannot be read ({exc}); check the file and its permissions") from exc


def read_file(path: Path, most: int) -> bytes:
    """Return the content of a regular file of at most ``most`` bytes. Raises CheckpointError."""
    with open_regular(path) as (fd, status), open(fd, "rb", closefd=False) as file:
        data = b"" if status.st_size > most else file.read(most + 1)
        if max(status.st_size, len(data)) > most:
            raise CheckpointError(
                f"{path} has {max(status.st_size, len(data))} bytes, the limit is {most}; download the checkpoint again"
            )
        return data


def read_text(path: Path, most: int) -> str:
    """Return a UTF-8 text of at most ``most`` bytes, without a byte order mark. Raises CheckpointError."""
    try:
        return read_file(path, most).decode("utf-8-sig")
    except UnicodeDecodeError as exc:
        raise CheckpointError(f"{path} is not UTF-8 ({exc}); download the checkpoint again") from exc


def read_object(path: Path, most: int) -> dict[str, Any]:
    """Return the JSON object in a file of at most ``most`` bytes. Raises CheckpointError."""
    data = read_file(path, most)
    try:
        values = _decode(data)
    except RecursionError as exc:
        raise CheckpointError(f"{path} {_TOO_DEEP}") from exc
    except DECODE_ERRORS as exc:
        raise CheckpointError(f"{path} cannot be read as JSON ({exc}); download the checkpoint again") from exc
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds a {type(values).__name__}, not an object; download the checkpoint again")
    _check_nesting(path, values)
    return values


def _decode(data: bytes) -> Any:
    """Decode JSON, also with NaN and Infinity, which Python's encoder writes (Nemotron-H: time_step_limit)."""
    try:
        return msgspec.json.decode(data)
    except msgspec.DecodeError as exc:
        try:
            return json.loads(data.decode())
        except ValueError:
            raise exc from None  # the message already names the place


def _check_nesting(path: Path, values: dict[str, Any]) -> None:
    """Check level by level, so that nesting costs no stack."""
    level: list[Any] = [values]
    for _ in range(_MAX_NESTING):
        inner: list[Any] = []
        for value in level:
            inner += value.values() if isinstance(value, dict) else value
        level = [value for value in inner if isinstance(value, dict | list)]
        if not level:
            return
    raise CheckpointError(f"{path} {_TOO_DEEP}")
