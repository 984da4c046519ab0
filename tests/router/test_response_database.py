"""The bounds of stored responses, and what a file of them survives."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pdserve.errors import ConfigError
from router.responses_api.response_database import Entry, ResponseDatabase, StoreLimits


def entry(name: str, owner: str = "a", num_bytes: int = 0, status: str = "completed") -> Entry:
    response = json.dumps({"status": status, "text": "x" * num_bytes}).encode()
    return Entry(owner, name, response, b"[]", [f"item {name}"])


@pytest.fixture
def open_database(tmp_path: Path) -> Callable[..., ResponseDatabase]:
    def open_(max_bytes: int = 1_000_000, max_seconds: float = 100.0) -> ResponseDatabase:
        return ResponseDatabase(str(tmp_path / "responses.db"), StoreLimits(max_bytes, max_seconds))

    return open_


def test_owner_with_the_most_bytes_loses_its_oldest_entry(open_database: Callable[..., ResponseDatabase]) -> None:
    database = open_database(100_000)
    database.put(entry("b", owner="b", num_bytes=10_000))
    for number in range(10):
        database.put(entry(str(number), num_bytes=20_000))
    kept = [number for number in range(10) if database.read("response", "a", str(number))]
    assert kept == [6, 7, 8, 9]
    assert database.read("response", "b", "b")
    assert (database.num_entries, database.response_of("a", "item 0"), database.response_of("a", "item 9")) == (
        5,
        None,
        "9",
    )
    assert database.num_bytes <= 100_000


def test_too_large_an_entry_is_refused(open_database: Callable[..., ResponseDatabase]) -> None:
    database = open_database(100_000)
    database.put(entry("1"))
    with pytest.raises(Exception, match="allows 25000 per response"):
        database.put(entry("2", num_bytes=30_000))
    assert database.num_entries == 1


def test_response_that_grows_too_large_has_failed(open_database: Callable[..., ResponseDatabase]) -> None:
    database = open_database(100_000)
    database.put(entry("1", status="in_progress"))
    database.finish("a", "1", entry("1", num_bytes=30_000).response, ["item"], b"")
    failed = json.loads(database.read("response", "a", "1") or b"")
    assert failed["status"] == "failed"
    assert "allows 25000" in failed["error"]["message"]


def test_old_entries_are_gone(open_database: Callable[..., ResponseDatabase]) -> None:
    database = open_database(max_seconds=0.0)
    database.put(entry("1"))
    assert database.read("response", "a", "1") is None
    assert not database.delete("a", "1")
    database.expire()
    assert (database.num_entries, database.num_bytes) == (0, 0)


def test_entries_last_and_unfinished_ones_have_failed(open_database: Callable[..., ResponseDatabase]) -> None:
    database = open_database()
    database.put(entry("1"))
    database.put(entry("2", status="in_progress"))
    with pytest.raises(ConfigError, match="locked"):
        open_database()
    sizes = (database.num_entries, database.num_bytes)
    database.close()
    database = open_database()
    assert (database.num_entries, database.num_bytes) == sizes
    statuses = [json.loads(database.read("response", "a", name) or b"")["status"] for name in "12"]
    assert statuses == ["completed", "failed"]


def test_file_that_is_no_store_is_refused(open_database: Callable[..., ResponseDatabase], tmp_path: Path) -> None:
    (tmp_path / "responses.db").write_bytes(b"something else" * 1000)
    with pytest.raises(ConfigError, match="not a database"):
        open_database()
