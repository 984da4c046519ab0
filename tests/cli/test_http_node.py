"""Flags of a node with an OpenAI server beside it: the command lines of its two processes."""

from __future__ import annotations

import pytest

from cli import decode, serve
from cli.up import http_node
from decode_node.__main__ import make_parser as decode_parser
from router.options import parse_options


def test_processes_get_the_flags_that_are_theirs() -> None:
    words = ["m", "--port", "9002", "--prefill", "p:9001", "--node-id", "d-0", "--tp", "2", "--drain-timeout", "9"]
    args = decode.make_parser().parse_args([*words, "--http", "8000", "--host", "::", "--max-queue", "7"])
    node = decode_parser().parse_args(http_node._node_words(decode._PROGRAM, args))
    assert (node.port, node.prefill, node.node_id, node.tp, node.host) == (9002, ["p:9001"], "d-0", 2, "::")
    router = parse_options(http_node._router_words(decode._PROGRAM, args, "10.0.0.8:9002"))
    assert (router.port, router.decode, router.prefill) == (8000, ("10.0.0.8:9002",), ("p:9001",))
    assert (router.home_node, router.max_queue, router.host, router.migrations) == ("d-0", 7, "::", 0)
    assert router.drain_timeout == node.drain_timeout == 9.0
    assert dict(router.models) == {"m": "m"}


def test_router_beside_an_elastic_node_knows_its_peers() -> None:
    args = serve.make_parser().parse_args(["m", "--http", "1", "--prefill", "dns://peers:9001"])
    router = parse_options(http_node._router_words(serve._PROGRAM, args, "n:9001"))
    assert (router.node, router.home_node) == (("n:9001", "dns://peers:9001"), "n:9001")


def test_flags_of_the_server_need_its_port(capfd: pytest.CaptureFixture[str]) -> None:
    assert decode.main(["m", "--max-queue=7"]) == 2
    assert "--max-queue=7 is a flag of the OpenAI server beside the node; add --http PORT" in capfd.readouterr().err


def test_variables_of_routers_do_not_concern_a_node_without_a_server(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PDSERVE_API_KEY", "k")
    assert decode.main(["/no/such/model", "--device", "cpu"]) == 2
    assert "/no/such/model" in capfd.readouterr().err
