"""Nodes of two neighbouring versions of the protocol understand each other: messages, hashes and handshakes."""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_schema import breaking_changes, current_schema, dump, load

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.config.compatibility import PROTOCOL_VERSION, SPOKEN_PROTOCOLS, common_protocol, compat_hash
from pdserve.config.device import node_devices
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve

BEFORE = load(Path(__file__).with_name("protocol_5.txt").read_text())  # at commit c4bc7ac2

versions = st.integers(5, 20)


def test_messages_only_gained_fields() -> None:
    assert breaking_changes(BEFORE, current_schema()) == []


@pytest.mark.parametrize(
    ("message", "field", "value", "found"),
    [
        ("KVReady", "num_tokens", "5:uint32", "KVReady.num_tokens: 4:uint32 before, 5:uint32 now"),
        ("KVReady", "lease_ms", "2:uint32", "KVReady.lease_ms: 2:uint64 before, 2:uint32 now"),
        ("KVReady", "block_ids", "", "KVReady.block_ids: 3:uint32* before, nothing now"),
        ("Failure", "code", "1:uint32", "Failure.code: 1:Code before, 1:uint32 now"),
        ("enum Failure.Code", "DRAINING", "5", "enum Failure.Code.DRAINING: 6 before, 5 now"),
        ("service Node", "Watch", "", "service Node.Watch: 01WatchRequest>NodeReport before, nothing now"),
        ("PrefillEvent", "failed", "7:Failure", "PrefillEvent.failed: 7:Failure@kind before, 7:Failure now"),
    ],
)
def test_other_changes_are_found(message: str, field: str, value: str, found: str) -> None:
    changed = deepcopy(BEFORE)
    changed[message] |= {field: value}
    changed[message] = {name: each for name, each in changed[message].items() if each}
    assert breaking_changes(BEFORE, changed) == [found]


def test_a_schema_survives_its_text() -> None:
    assert load(dump(current_schema())) == current_schema()


def test_the_window_has_two_versions() -> None:
    assert list(SPOKEN_PROTOCOLS) == [PROTOCOL_VERSION - 1, PROTOCOL_VERSION]
    assert common_protocol(0) == 5, "nodes of version 5 do not describe it"


@given(versions, versions)
def test_nodes_speak_the_older_of_neighbouring_versions(one: int, other: int) -> None:
    common = common_protocol(one, other)
    assert common == common_protocol(other, one)
    spoken = {one - 1, one} & {other - 1, other}
    assert (common is None) == (abs(one - other) > 1)
    assert common is None or common == max(spoken, default=None)


def test_versions_before_the_window_have_none_in_common() -> None:
    assert common_protocol(4, 4) is None
    assert common_protocol(4, 5) is None


def test_nodes_of_the_release_before_have_the_same_hash_of_the_embedded_model() -> None:
    """A field that ModelConfig gains belongs into LATER_FIELDS, or no node pairs with one of the release before."""
    options = NodeOptions(model=str(EMBEDDED_MODEL), device="cpu")
    fields = resolve(options, node_devices(options, 1)[0], {}).compat_fields
    assert compat_hash(fields) == "e7c8ce31bb0d9eb9913c748308e623a210283fe2d04ca99d26eb6b4fa1b9d19e", fields
