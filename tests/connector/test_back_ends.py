"""The connector back ends that ``--kv-connector`` names."""

from __future__ import annotations

import inspect

import pytest

from connector import _METHODS, BACK_ENDS, build, load
from connector.setup import ConnectorSetup
from pdserve.errors import ConfigError
from pdserve.protocols import KVConnector


@pytest.mark.parametrize("name", BACK_ENDS)
def test_named_back_ends_have_all_methods(name: str) -> None:
    assert load(name).__name__.lower().startswith(name.replace("none", "null"))


def test_all_methods_of_the_protocol_are_asked_for() -> None:
    assert set(_METHODS) == {name for name, _ in inspect.getmembers(KVConnector, inspect.isfunction) if name[0] != "_"}


def test_a_class_of_the_operator_is_built_with_the_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    connector = build("recording_connector:RecordingConnector", ConnectorSetup("agent-e1"))
    assert type(connector).__name__ == "RecordingConnector"
    connector.close()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("ucx", "'ucx' is not one of nixl, simulated, none; name it, or module:Class"),
        ("no_such_module:Class", "no_such_module cannot be imported: .* put its folder into PYTHONPATH"),
        ("recording_connector:Missing", "recording_connector has no class 'Missing'"),
        ("recording_connector:FILE", "recording_connector has no class 'FILE'"),
        ("recording_connector:Unfinished", "the class lacks connect, disconnect, read, poll, close"),
    ],
)
def test_a_wrong_back_end_is_refused_with_the_remedy(name: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=f"--kv-connector .*{problem}"):
        load(name)
