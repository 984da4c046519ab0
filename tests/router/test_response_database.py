"""The bounds of stored responses, and what a file of them survives."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.errors import ConfigError, RequestError
from router.responses_api.response_database import Entry, ResponseDatabase, StoreLimits
from router.responses_api.response_store import find_conversation
from router.responses_api.stored_items import Place, StoredItems, encode_items, num_values


def entry(name: str, owner: str = "a", num_bytes: int = 0, status: str = "completed") -> Entry:
    response = json.dumps({"status": status, "text": "x" * num_bytes}).encode()
    items = StoredItems(b"{}", [Place(f"item {name}", 2, 1)])
    return Entry(owner, name, status, False, response, 0, items)


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
    database.finish("a", "1", "completed", entry("1", num_bytes=30_000).response, StoredItems(b"", []), b"")
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


def put_items(database: ResponseDatabase, items: StoredItems, name: str = "1") -> None:
    database.put(Entry("a", name, "completed", False, b"{}", len(items.places), items))


def message(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": text, **fields}


def test_item_is_read_without_the_others(open_database: Callable[..., ResponseDatabase]) -> None:
    database = open_database()
    items = encode_items([message("one", id="1"), message("two", id="2"), message("three", id="3")])
    damaged = b"#" * items.places[0].end + items.data[items.places[0].end : items.places[1].end]
    put_items(database, StoredItems(damaged + b"#" * (len(items.data) - len(damaged)), items.places))
    _, by_id = find_conversation(database, "a", None, ["2"])
    assert by_id["2"]["content"] == [{"type": "input_text", "text": "two"}]


@pytest.mark.parametrize(
    ("items", "references"),
    [
        ([message("x" * 600), message("x" * 600)], []),
        ([message("x" * 300, id="1")], ["1", "1", "1"]),
        ([message("x", id="1")], ["1"] * 11),
    ],
)
def test_conversation_that_a_request_names_is_bounded(items: list[dict[str, Any]], references: list[str]) -> None:
    database = ResponseDatabase(":memory:", StoreLimits(1_000_000, 100.0, 1000))
    put_items(database, encode_items(items))
    with pytest.raises(RequestError, match="more than 1000 bytes; compact"):
        find_conversation(database, "a", None if references else "1", references)


def test_values_of_a_conversation_are_bounded() -> None:
    database = ResponseDatabase(":memory:", StoreLimits(100_000_000, 100.0))
    part = {"type": "input_text", "text": ""}
    put_items(database, encode_items([{"role": "user", "content": [part] * 5000}] * 6))
    assert len(find_conversation(database, "a", "1", [])[0]) == 6
    put_items(database, encode_items([{"role": "user", "content": [part] * 5000}] * 7), "2")
    with pytest.raises(RequestError, match="more than 100000 values; compact the conversation"):
        find_conversation(database, "a", "2", [])


# Items with 60,000 objects or lists that are empty, in each field that keeps any.
EMPTY: Any = [{}, []] * 30_000
EMPTY_VALUES = [
    {"type": "web_search_call", "action": {"queries": EMPTY}},
    {"type": "mcp_call", "output": EMPTY},
    {"type": "local_shell_call", "action": EMPTY},
    {"type": "agent_message", "content": [EMPTY]},
]


@pytest.mark.parametrize("item", EMPTY_VALUES, ids=lambda item: item["type"])
def test_empty_values_of_a_conversation_are_bounded(item: dict[str, Any]) -> None:
    database = ResponseDatabase(":memory:", StoreLimits(100_000_000, 100.0))
    put_items(database, encode_items([item, item]))
    with pytest.raises(RequestError, match="more than 100000 values; compact the conversation"):
        find_conversation(database, "a", "1", [])


@pytest.mark.parametrize("kind", ["message", "reasoning", "function_call_output"])
def test_parts_without_a_known_field_are_not_kept(kind: str) -> None:
    parts: Any = [{}, {"more": [{}]}, {"type": "input_text", "text": "x"}]
    (item,) = encode_items([{"type": kind, "content": parts, "summary": parts, "output": parts}]).decoded()
    lists = [value for value in item.values() if isinstance(value, list)]
    assert lists
    assert all(value == parts[2:] for value in lists)


values = st.recursive(
    st.none() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=4),
    max_leaves=30,
)


@given(st.dictionaries(st.text(max_size=3), values, max_size=4))
def test_each_key_and_each_list_item_counts(item: dict[str, Any]) -> None:
    def count(value: Any) -> int:
        inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        return len(inner) + sum(map(count, inner))

    assert num_values(item) == count(item)


def test_a_file_of_another_version_is_refused(open_database: Callable[..., ResponseDatabase]) -> None:
    database = open_database(100_000_000)
    database._connection.execute("PRAGMA user_version = 2")
    database.close()
    with pytest.raises(ConfigError, match="version 2, not 4; choose another file"):
        open_database(100_000_000)


def test_unknown_fields_of_items_are_not_kept() -> None:
    many: Any = [[]] * 10_000
    part = {"type": "output_text", "text": "x", "annotations": many, "logprobs": many, "more": many}
    call = {"type": "function_call", "id": "fc", "call_id": "c", "name": "f", "arguments": "{}", "status": many}
    items = encode_items(
        [
            {"role": "assistant", "content": [part], "id": "msg", "name": "n", "more": many},
            {**call, "more": many},
            {"type": "function_call_output", "call_id": "c", "output": [part], "id": many, "more": {"a": many}},
            {
                "type": "reasoning",
                "id": "rs",
                "content": [{**part, "type": "reasoning_text"}],
                "summary": [],
                "x": many,
            },
        ]
    )
    assert items.num_bytes < 2000
    first, second, third, fourth = items.decoded()
    text = {"type": "output_text", "text": "x", "annotations": []}
    common = {"status": "completed", "type": "message"}
    assert first == {**common, "id": "msg", "role": "assistant", "content": [text]}
    assert second == {**call, "status": "completed"}
    assert (third["output"], third["id"][:4]) == ([text], "fco_")
    assert (fourth["content"], fourth["summary"]) == ([{"type": "reasoning_text", "text": "x"}], [])


def image(name: str, size: int = 10_000) -> dict[str, Any]:
    return {"type": "input_image", "image_url": f"data:image/png;base64,{name * size}", "detail": "auto"}


def asked(*images: dict[str, Any], **fields: Any) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "input_text", "text": "What?"}, *images], **fields}


def test_responses_share_images_and_the_last_one_frees_them(open_database: Callable[..., ResponseDatabase]) -> None:
    database = open_database()
    conversation: list[dict[str, Any]] = []
    sizes = []
    for turn in range(4):
        conversation.append(asked(*([image("a"), image("b"), image("a")] if turn < 2 else []), id=f"msg_{turn}"))
        put_items(database, encode_items(conversation), str(turn))
        sizes.append(database.num_bytes)
    assert 20_000 < sizes[0] < 22_000
    assert all(after - before < 5_000 for before, after in pairwise(sizes))
    database.close()
    database = open_database()
    assert database.num_bytes == sizes[-1]
    for turn in (0, 2, 3):
        database.delete("a", str(turn))
        items, _ = find_conversation(database, "a", "1", [])
        assert [item["content"][1:] for item in items] == [[image("a"), image("b"), image("a")]] * 2
        assert items[0]["content"][1]["image_url"] is items[1]["content"][3]["image_url"], "equal images share memory"
    assert database.num_bytes > 20_000
    database.delete("a", "1")
    assert (database.num_entries, database.num_bytes) == (0, 0)


def test_images_of_an_owner_are_not_those_of_others(open_database: Callable[..., ResponseDatabase]) -> None:
    database = open_database()
    for owner in ("a", "b"):
        database.put(Entry(owner, "1", "completed", False, b"{}", 1, encode_items([asked(image("a"), id="msg")])))
    both = database.num_bytes
    database.delete("a", "1")
    assert database.num_bytes == both // 2
    (item,), _ = find_conversation(database, "b", "1", [])
    assert item["content"][1] == image("a")


def test_a_client_s_digest_names_no_image() -> None:
    part = {**image("a"), "digest": "0" * 64, "image_url": "data:,"}
    (item,) = encode_items([asked(part), asked(image("b"))]).decoded()[:1]
    assert item["content"][1] == {"type": "input_image", "image_url": "data:,", "detail": "auto"}


def test_images_of_a_conversation_count_as_often_as_it_has_them() -> None:
    database = ResponseDatabase(":memory:", StoreLimits(1_000_000, 100.0, 25_000))
    put_items(database, encode_items([asked(image("a"), image("a"))]))
    assert len(find_conversation(database, "a", "1", [])[0]) == 1
    put_items(database, encode_items([asked(image("a"), image("a"), image("a"))]), "2")
    with pytest.raises(RequestError, match="more than 25000 bytes; compact"):
        find_conversation(database, "a", "2", [])
    with pytest.raises(Exception, match="allows 250000 per response"):
        put_items(database, encode_items([asked(*[image("a")] * 30)]), "3")
