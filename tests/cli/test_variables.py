"""Variables PDSERVE_… that no command reads are named, each with the name that was probably meant."""

from __future__ import annotations

import argparse
import re
from pathlib import Path

import pytest

from cli.commands import COMMANDS, parser_of
from cli.variables import WITHOUT_FLAG, unread_variables
from node.node_command import role_parser
from pdserve.flags.sources import variables_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def node() -> argparse.ArgumentParser:
    return role_parser("pdserve decode", "")


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("PDSERVE_USE_V2_RUNNER", "PDSERVE_USE_V2_MODEL_RUNNER"),
        ("PDSERVE_MAX_NUM_SEQ", "PDSERVE_MAX_NUM_SEQS"),
        ("PDSERVE_LOGLEVEL", "PDSERVE_LOG_LEVEL"),
        ("PDSERVE_METRIC_PORT", "PDSERVE_METRICS_PORT"),
    ],
)
def test_a_misspelled_variable_is_named_with_the_one_that_was_meant(
    node: argparse.ArgumentParser, name: str, meant: str
) -> None:
    assert unread_variables(node, {name: "1", "PATH": "/bin", meant: "1"}) == {name: meant}


def test_variables_of_other_commands_and_of_kubernetes_are_none(node: argparse.ArgumentParser) -> None:
    others = {"PDSERVE_MAX_QUEUE": "5", "PDSERVE_API_KEY": "k", "PDSERVE_DECODE": "2", "PDSERVE_TRACEBACK": "1"}
    links = {
        "PDSERVE_SERVICE_HOST": "10.0.0.1",
        "PDSERVE_PORT": "tcp://10.0.0.1:8000",
        "PDSERVE_ROUTER_SERVICE_HOST": "10.0.0.1",
        "PDSERVE_ROUTER_SERVICE_PORT_HTTP": "8000",
        "PDSERVE_ROUTER_PORT": "tcp://10.0.0.1:8000",
        "PDSERVE_ROUTER_PORT_8000_TCP_ADDR": "10.0.0.1",
    }
    assert unread_variables(node, others | links) == {}


def test_all_variables_of_the_documentation_are_known() -> None:
    page = (ROOT / "docs" / "environment.md").read_text()
    listed = set(re.findall(r"`(PDSERVE_[A-Z0-9_]+)`", page))
    names = WITHOUT_FLAG.union(*(variables_of(parser_of(name)) for name in COMMANDS))
    assert listed <= names
    assert listed >= WITHOUT_FLAG
