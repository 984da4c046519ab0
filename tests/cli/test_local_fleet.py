"""The order in which ``pdserve up`` starts processes, and the table of nodes that it prints."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import pytest

from cli.up import local_fleet
from cli.up.flags import make_parser, role_words, router_options, settle_model
from cli.up.local_fleet import FleetPlan, LocalFleet
from cli.up.restarts import STABLE, Restarts
from cli.up.supervisor import Child, Supervisor
from cli.up.welcome import node_table, sampling_line
from pdserve.config.node_config import DeviceInfo
from pdserve.flags.parser import CommandParser
from router.options import RouterOptions, add_router_flags, router_options_from

GIB = 1 << 30


class Starts:
    """Records the processes that a fleet starts, in place of a Supervisor."""

    def __init__(self) -> None:
        self.children: list[Child] = []
        self.flags: dict[str, list[str]] = {}

    def spawn(self, name: str, module: str, argv: Sequence[str]) -> Child:
        child = Child(name, module, cast(Any, None), -1, address=f"127.0.0.1:{9000 + len(self.children)}")
        self.children.append(child)
        self.flags[name] = list(argv)
        return child


def fleet_on(monkeypatch: pytest.MonkeyPatch, num_gpus: int, *flags: str) -> tuple[LocalFleet, Starts]:
    """Return the fleet of ``pdserve up`` on a machine with GPUs, which only placement sees, and what it starts."""
    gpus = [DeviceInfo(kind="cuda", index=index, name="GPU", memory=80 * GIB) for index in range(num_gpus)]
    monkeypatch.setattr(local_fleet, "find_gpus", lambda: gpus)
    devices = gpus or [DeviceInfo(kind="cpu", index=0, name="CPU", memory=80 * GIB)]
    monkeypatch.setattr(local_fleet, "node_devices", lambda options, count: devices[:count])
    args: argparse.Namespace = make_parser().parse_args(flags)
    settle_model(args)
    starts = Starts()
    return LocalFleet(cast(Supervisor, starts), FleetPlan.of(args), args), starts


def settle(fleet: LocalFleet) -> None:
    for _ in range(3):  # prefill nodes, decode nodes, router
        fleet.advance()


def test_nodes_that_share_a_gpu_load_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, starts = fleet_on(monkeypatch, 2, "--prefill", "2", "--decode", "2")
    settle(fleet)
    assert [child.name for child in starts.children] == ["prefill-0", "prefill-1"]
    starts.children[1].state = "ready"
    settle(fleet)
    assert [child.name for child in starts.children][2:] == ["decode-1"]
    starts.children[0].state = "loading"
    settle(fleet)
    assert len(starts.children) == 3
    starts.children[0].state = "ready"
    settle(fleet)
    assert [child.name for child in starts.children][3:] == ["decode-0", "router"]
    assert "0.45" in starts.flags["decode-0"]
    assert not fleet.advance()
    for child in starts.children:
        child.state = "ready"
        child.kv_tokens = 123_456
    assert fleet.advance()
    table = node_table(fleet.nodes).splitlines()
    assert table[0].split("  ")[1:] == [
        "prefill-0",
        "cuda:0 (45% of the memory)",
        "123,456 KV tokens",
        "127.0.0.1:9000",
    ]
    assert [line.split()[1] for line in table] == ["cuda:0", "cuda:1", "cuda:0", "cuda:1"]


def test_nodes_with_own_gpus_load_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, starts = fleet_on(monkeypatch, 3, "--device", "cuda", "--decode-tp", "2")
    settle(fleet)
    assert [child.name for child in starts.children] == ["prefill", "decode", "router"]
    assert [node.device for node in fleet.nodes] == ["cuda:0", "cuda:1, cuda:2"]
    assert "--gpu-memory-utilization" not in starts.flags["decode"]


def test_nodes_of_both_roles_know_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    fleet, starts = fleet_on(monkeypatch, 4, "--elastic", "--tp", "2")
    fleet.advance()
    assert [(child.name, child.module) for child in starts.children[:2]] == [
        ("node-0", "elastic_node"),
        ("node-1", "elastic_node"),
    ]
    addresses = [node.address for node in fleet.nodes]
    for name, address in zip(("node-0", "node-1"), addresses, strict=True):
        flags = starts.flags[name]
        assert [flags[index + 1] for index, flag in enumerate(flags) if flag == "--prefill"] == addresses
        assert flags[flags.index("--port") + 1] == address.rpartition(":")[2]
    assert starts.flags["router"][-4:] == ["--node", addresses[0], "--node", addresses[1]]
    assert [node.device for node in fleet.nodes] == ["cuda:0, cuda:1", "cuda:2, cuda:3"]


@pytest.mark.parametrize(
    ("num_gpus", "flags", "names"),
    [
        (0, [], ["prefill", "decode"]),
        (0, ["--nodes", "3"], ["node-0", "node-1", "node-2"]),
        (0, ["--elastic"], ["node-0", "node-1"]),
        (1, [], ["node"]),
        (2, [], ["node-0", "node-1"]),
        (2, ["--tp", "2"], ["node"]),
        (2, ["--decode", "1"], ["prefill", "decode"]),
        (2, ["--engine", "simulated"], ["prefill", "decode"]),
        (4, ["--device", "cuda:2"], ["node-0", "node-1"]),
        (4, ["--prefill-tp", "2"], ["prefill", "decode"]),
    ],
)
def test_each_gpu_has_a_node_of_both_roles_unless_flags_split_them(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, flags: list[str], names: list[str]
) -> None:
    fleet, _ = fleet_on(monkeypatch, num_gpus, *flags)
    assert [node.name for node in fleet.nodes] == names


def test_each_program_gets_its_own_flags_and_the_common_ones() -> None:
    given = "--policy round-robin --no-dashboard --cors-origin http://a --cors-origin http://b --max-body-bytes 1MiB"
    nodes = "--lease-seconds 5 --decode-ahead 0 --kv-failure-policy fail --max-num-seqs 7"
    common = ["--traces", "http://collector:4318/v1/traces", "--log-requests", "--drain-timeout", "3.0"]
    args = make_parser().parse_args([*given.split(), *nodes.split(), *common, "--port", "9000"])
    router = (
        "--policy round-robin --cors-origin http://a --cors-origin http://b --no-dashboard --max-body-bytes 1048576"
    )
    assert sorted(role_words("router", args)) == sorted([*router.split(), *common, "--port", "9000"])
    assert sorted(role_words("prefill", args)) == sorted(["--lease-seconds", "5.0", "--decode-ahead", "0", *common])
    assert sorted(role_words("decode", args)) == sorted(
        ["--kv-failure-policy", "fail", "--lease-seconds", "5.0", *common]
    )


def test_router_understands_its_flags_from_up() -> None:
    """A program's flags are those that ``up`` was given, after they were parsed."""
    store = "--response-store sqlite:/a/file --response-store-size 1MiB --response-store-seconds 60"
    times = "--request-timeout 2.5 --client-stall-timeout 3 --drain-grace 1 --trace-sample 0.5"
    limits = "--max-logprobs -1 --max-body-bytes 1KiB --migrations 0 --metrics-port 0 --generation-config none"
    argv = ["m", *f"{store} {times} {limits} --tool-call-parser hermes --cors-origin *".split()]
    parser = CommandParser()
    add_router_flags(parser)
    assert router_options(make_parser().parse_args(argv)) == router_options_from(parser.parse_args(argv))
    argv[2] = "memory"
    assert router_options(make_parser().parse_args(argv)).response_store == "memory"


def test_delays_between_restarts_double_and_end() -> None:
    restarts = Restarts()
    delays = []
    while restarts.died(now=10.0, served=0.0):
        delays.append(restarts.delay)
        assert restarts.due == 10.0 + restarts.delay
    assert delays == [0.5, 1, 2, 4]
    assert restarts.died(now=10.0, served=STABLE), "an hour of service ends a row of failures"
    assert restarts.delay == 0.5


def test_start_screen_names_the_sampling_defaults_of_the_model(tmp_path: Path) -> None:
    file = tmp_path / "generation_config.json"
    auto = RouterOptions(models=())
    file.write_text('{"eos_token_id": 2, "temperature": 1.0}')
    assert sampling_line(tmp_path, auto) == ""
    file.write_text('{"temperature": 0.6, "top_k": 20}')
    assert "temperature 0.6, top_k 20" in sampling_line(tmp_path, auto)
    assert sampling_line(tmp_path, RouterOptions(models=(), generation_config="none")) == ""
