"""The SQLite database of stored responses, with bounds on entries, bytes and age. Used by one thread.

When an entry does not fit, the owner with the most bytes loses its oldest one.
"""

from __future__ import annotations

import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec

from pdserve.errors import ConfigError
from router.responses_api.input_items import Item
from router.responses_api.stored_items import PLACE_BYTES, Place, StoredItems, decode_items, image_digests, start_of

StoreError = sqlite3.Error

_VERSION = 4  # schema version
_MAX_ENTRIES = 100_000
_ENTRY_SHARE = 4  # divisor: an entry may have 1/4 of all bytes
_IN_PROGRESS = "in_progress"
_PLACES = msgspec.msgpack.Encoder()
_PLACES_DECODER = msgspec.msgpack.Decoder(list[Place])
_TABLES = """
CREATE TABLE responses (
  number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, created REAL NOT NULL, bytes INTEGER NOT NULL,
  status TEXT NOT NULL, background INTEGER NOT NULL, response BLOB NOT NULL, num_inputs INTEGER NOT NULL,
  places BLOB NOT NULL, items BLOB NOT NULL, events BLOB NOT NULL, UNIQUE (owner, id));
CREATE INDEX by_owner ON responses (owner, number);
CREATE TABLE items (
  owner TEXT NOT NULL, id TEXT NOT NULL, response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE,
  PRIMARY KEY (owner, id)) WITHOUT ROWID;
CREATE INDEX by_response ON items (response);
CREATE TABLE images (owner TEXT NOT NULL, digest TEXT NOT NULL, url BLOB NOT NULL, UNIQUE (owner, digest));
CREATE TABLE image_uses (
  response INTEGER NOT NULL REFERENCES responses ON DELETE CASCADE, owner TEXT NOT NULL, digest TEXT NOT NULL,
  PRIMARY KEY (response, digest)) WITHOUT ROWID;
CREATE INDEX by_image ON image_uses (owner, digest);
"""


class StoreLimits(msgspec.Struct, frozen=True):
    max_bytes: int
    max_seconds: float
    max_conversation: int = 32 * 1024 * 1024  # bytes of stored items that a request may name

    def __str__(self) -> str:
        return (
            f"the router keeps up to {self.max_bytes} bytes, at most {self.max_bytes // _ENTRY_SHARE} per response, "
            f"for {self.max_seconds:.0f} s"
        )


class Entry(msgspec.Struct, frozen=True):
    """``items``: ``num_inputs`` of the input, and those of the output. A stored id keeps its response."""

    owner: str
    id: str
    status: str
    background: bool
    response: bytes  # JSON
    num_inputs: int
    items: StoredItems


class ItemIndex(msgspec.Struct, frozen=True):
    """The items of a response: its input and its output."""

    owner: str
    number: int  # row number
    status: str
    num_inputs: int
    places: list[Place]


class ResponseDatabase:
    """``num_entries`` and ``num_bytes`` may be read from any thread."""

    def __init__(self, path: str, limits: StoreLimits) -> None:
        """Raises ConfigError."""
        self.limits = limits
        self.num_entries = self.num_bytes = 0
        self._bytes_of: dict[str, int] = {}  # bytes by owner
        try:
            self._open(path)
        except (sqlite3.Error, OSError) as exc:
            raise ConfigError(f"--response-store sqlite:{path} cannot be used: {exc}") from exc

    def close(self) -> None:
        self._connection.close()

    def put(self, entry: Entry) -> None:
        """Add an entry, or replace it. Raises StoreError."""
        size = len(entry.response) + entry.items.json_bytes + PLACE_BYTES
        self._check_size(size + entry.items.image_bytes)
        row = {
            "owner": entry.owner,
            "id": entry.id,
            "created": time.time(),
            "bytes": size,
            "status": entry.status,
            "background": entry.background,
            "response": entry.response,
            "num_inputs": entry.num_inputs,
            "places": _PLACES.encode(entry.items.places),
            "items": entry.items.data,
            "events": b"",
        }
        with self._transaction() as db:
            self._remove(entry.owner, entry.id)
            columns = ", ".join(row)
            values = ", ".join("?" * len(row))
            added = db.execute(f"INSERT INTO responses ({columns}) VALUES ({values})", tuple(row.values()))
            number = added.lastrowid or 0
            self._add_items(entry.owner, entry.items.places, number)
            self._count(entry.owner, 1, size)
            self._add_images(entry.owner, entry.items.images, number)
            self._evict()

    def finish(
        self, owner: str, response_id: str, status: str, response: bytes, output: StoredItems, events: bytes
    ) -> None:
        """Replace the response of an entry, unless it was deleted; one that is too large fails. Raises StoreError."""
        row = self._connection.execute(
            "SELECT number, bytes, response, items, places FROM responses WHERE owner = ? AND id = ?",
            (owner, response_id),
        ).fetchone()
        if row is None:
            return
        number, size, started, data, places = row
        before = StoredItems(data, _PLACES_DECODER.decode(places))
        added = len(response) + len(events) + output.json_bytes
        try:
            self._check_size(size + added + before.image_bytes)
        except StoreError as exc:
            response = _failed(started, f"the response is not stored: {exc}")
            status = "failed"
            output = StoredItems(b"", [])
            events = b""
            added = 0
        items = before.followed_by(output)
        values = (status, response, items.data, _PLACES.encode(items.places), events, added, number)
        with self._transaction() as db:
            columns = "status = ?, response = ?, items = ?, places = ?, events = ?, bytes = bytes + ?"
            db.execute(f"UPDATE responses SET {columns} WHERE number = ?", values)
            self._add_items(owner, output.places, number)
            self._count(owner, 0, added)
            self._evict()

    def read(self, column: str, owner: str, response_id: str) -> bytes | None:
        """Return one of the columns response and events; None if there is no such entry."""
        row = self._row(column, owner, response_id)
        return None if row is None else bytes(row[0])

    def is_background(self, owner: str, response_id: str) -> bool:
        row = self._row("background", owner, response_id)
        return row is not None and bool(row[0])

    def index(self, owner: str, response_id: str) -> ItemIndex | None:
        """Return where the items of a response are; None if there is no such entry."""
        row = self._row("number, status, num_inputs, places", owner, response_id)
        if row is None:
            return None
        number, status, num_inputs, places = row
        return ItemIndex(owner, number, status, num_inputs, places=_PLACES_DECODER.decode(places))

    def read_items(self, index: ItemIndex, first: int, end: int) -> Iterator[Item]:
        """Yield items ``first`` … ``end`` - 1 of a response, and read no others."""
        start = start_of(index.places, first)
        stop = start_of(index.places, end)
        with self._connection.blobopen("responses", "items", index.number, readonly=True) as items:
            items.seek(start)
            data = bytes(items.read(stop - start))
        places = index.places[first:end]
        sql = "SELECT url FROM images WHERE owner = ? AND digest = ?"
        images: dict[str, str] = {}
        for digest in image_digests(data, places, start):
            (url,) = self._connection.execute(sql, (index.owner, digest)).fetchone()
            images[digest] = url.decode()
        return decode_items(data, places, images, start)

    def response_of(self, owner: str, item_id: str) -> str | None:
        """Return the id of the response that holds an item."""
        sql = "SELECT r.id FROM items i JOIN responses r ON r.number = i.response WHERE i.owner = ? AND i.id = ?"
        row = self._connection.execute(f"{sql} AND r.created > ?", (owner, item_id, self._oldest)).fetchone()
        return None if row is None else str(row[0])

    def delete(self, owner: str, response_id: str) -> bool:
        """Return whether there was such an entry."""
        with self._transaction():
            return self._row("number", owner, response_id) is not None and self._remove(owner, response_id)

    def expire(self) -> None:
        with self._transaction() as db:
            sql = "SELECT owner, id FROM responses WHERE created <= ? ORDER BY number"
            for owner, response_id in db.execute(sql, (self._oldest,)).fetchall():
                self._remove(owner, response_id)

    @property
    def _oldest(self) -> float:
        return time.time() - self.limits.max_seconds

    def _open(self, path: str) -> None:
        if path != ":memory:":
            os.close(os.open(path, os.O_CREAT | os.O_RDWR, 0o600))
        self._connection = db = sqlite3.connect(path, timeout=0.0)
        db.execute("PRAGMA locking_mode = EXCLUSIVE")  # no other process uses the file
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = NORMAL")
        db.execute("PRAGMA secure_delete = ON")
        db.execute("PRAGMA foreign_keys = ON")
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version == 0:
            db.executescript(f"BEGIN IMMEDIATE; {_TABLES} PRAGMA user_version = {_VERSION}; COMMIT")
        elif version != _VERSION:
            raise sqlite3.DatabaseError(f"its tables have version {version}, not {_VERSION}; choose another file")
        with self._transaction():
            self._fail_interrupted()
        self._recount()
        self.expire()
        with self._transaction():
            self._evict()

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Connection]:
        try:
            with self._connection as db:
                yield db
        except sqlite3.Error:
            self._recount()
            raise

    def _recount(self) -> None:
        self.num_entries = self.num_bytes = 0
        self._bytes_of.clear()
        sql = "SELECT owner, COUNT(*), SUM(bytes) FROM responses GROUP BY owner"
        images = "SELECT owner, 0, SUM(LENGTH(url)) FROM images GROUP BY owner"
        for owner, entries, size in self._connection.execute(f"{sql} UNION ALL {images}"):
            self._count(owner, entries, size)

    def _fail_interrupted(self) -> None:
        db = self._connection
        sql = "SELECT number, response FROM responses WHERE status = ?"
        for number, data in db.execute(sql, (_IN_PROGRESS,)).fetchall():
            failed = _failed(data, "the router ended before the response was complete")
            db.execute("UPDATE responses SET response = ?, status = 'failed' WHERE number = ?", (failed, number))

    def _check_size(self, size: int) -> None:
        limit = self.limits.max_bytes // _ENTRY_SHARE
        if size > limit:
            raise sqlite3.DataError(f"it has {size} bytes; --response-store-size allows {limit} per response")

    def _row(self, columns: str, owner: str, response_id: str) -> tuple[Any, ...] | None:
        sql = f"SELECT {columns} FROM responses WHERE owner = ? AND id = ? AND created > ?"
        row: tuple[Any, ...] | None = self._connection.execute(sql, (owner, response_id, self._oldest)).fetchone()
        return row

    def _add_items(self, owner: str, places: Sequence[Place], number: int) -> None:
        rows = [(owner, place.id, number) for place in places]
        self._connection.executemany("INSERT OR IGNORE INTO items VALUES (?, ?, ?)", rows)

    def _add_images(self, owner: str, images: Mapping[str, str], number: int) -> None:
        """Add the images of an entry that its owner has not stored yet."""
        for digest, url in images.items():
            sql = "INSERT OR IGNORE INTO images (owner, digest, url) VALUES (?, ?, ?)"
            data = url.encode()
            if self._connection.execute(sql, (owner, digest, data)).rowcount:
                self._count(owner, 0, len(data))
            self._connection.execute("INSERT INTO image_uses VALUES (?, ?, ?)", (number, owner, digest))

    def _remove(self, owner: str, response_id: str) -> bool:
        """Remove an entry, and the images that no other one has. Return whether there was one."""
        db = self._connection
        of_response = "SELECT number FROM responses WHERE owner = ? AND id = ?"
        sql = f"SELECT digest FROM image_uses WHERE response IN ({of_response})"
        digests = db.execute(sql, (owner, response_id)).fetchall()
        sql = "DELETE FROM responses WHERE owner = ? AND id = ? RETURNING bytes"
        removed = db.execute(sql, (owner, response_id)).fetchall()
        for (size,) in removed:
            self._count(owner, -1, -size)
        uses = "SELECT 1 FROM image_uses u WHERE u.owner = images.owner AND u.digest = images.digest"
        sql = f"DELETE FROM images WHERE owner = ? AND digest = ? AND NOT EXISTS ({uses}) RETURNING LENGTH(url)"
        for (digest,) in digests:
            for (size,) in db.execute(sql, (owner, digest)).fetchall():
                self._count(owner, 0, -size)
        return bool(removed)

    def _evict(self) -> None:
        while self.num_bytes > self.limits.max_bytes or self.num_entries > _MAX_ENTRIES:
            owner = max(self._bytes_of, key=self._bytes_of.__getitem__)
            sql = "SELECT id FROM responses WHERE owner = ? ORDER BY number LIMIT 1"
            self._remove(owner, self._connection.execute(sql, (owner,)).fetchone()[0])

    def _count(self, owner: str, entries: int, size: int) -> None:
        self.num_entries += entries
        self.num_bytes += size
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + size
        if not self._bytes_of[owner]:
            del self._bytes_of[owner]


def _failed(response: bytes, message: str) -> bytes:
    error = {"code": "server_error", "message": message}
    return msgspec.json.encode({**msgspec.json.decode(response), "status": "failed", "error": error})
