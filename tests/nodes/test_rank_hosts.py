"""Nodes over several hosts, all of which are this machine here."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import psutil
import pytest
import torch
from checkpoints import change_weight, reference_greedy, reference_model
from fleet import NODE_FLAGS, RUNNER_ENVIRONMENTS, Fleet, add_tokenizer
from machine import patience
from node_client import RouterClient, greedy
from safetensors.torch import save_file

from cli.main import main
from node.node_command import role_parser
from pdserve.checkpoint.digest_cache import NAME
from pdserve.config.config_with_weights import (
    host_digests,
    with_host_digests,
    with_known_digests,
    with_weight_digests,
)
from pdserve.config.device import node_devices
from pdserve.config.multi_host import LocalRanks, local_ranks_from
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.errors import ConfigError

FLAGS = (
    "--block-size",
    "8",
    "--kv-cache-memory",
    "1MiB",
    "--max-model-len",
    "256",
    "--peer-timeout",
    f"{patience(2.0):g}",
)
PROMPT = list(range(3, 40))
END_SECONDS = 5.0


class Host:
    """Another host of a node: it runs ranks, and no frontend."""

    def __init__(self, checkpoint: Path, *flags: str) -> None:
        status, status_write = os.pipe()
        command = [sys.executable, "-m", "decode_node", str(checkpoint), *NODE_FLAGS, *FLAGS, *flags]
        command += ["--status-fd", str(status_write)]
        self.process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, pass_fds=(status_write,))
        os.close(status_write)
        self.status = os.fdopen(status)  # status lines

    def ranks(self) -> list[psutil.Process]:
        children: list[psutil.Process] = psutil.Process(self.process.pid).children()
        return children

    def end(self) -> tuple[int, list[str]]:
        """Wait for its exit; return the status and the lines it printed."""
        _, stderr = self.process.communicate(timeout=patience(END_SECONDS))
        return self.process.returncode, stderr.splitlines()


@contextlib.contextmanager
def host(checkpoint: Path, *flags: str) -> Iterator[Host]:
    host = Host(checkpoint, *flags)
    try:
        yield host
    finally:
        host.process.kill()
        print(host.process.communicate()[1])
        host.status.close()


@pytest.fixture
def leader() -> str:
    """Return an address with a free port, below the ports that the kernel gives to other sockets meanwhile."""
    for port in random.sample(range(20_000, 32_000), 100):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return f"127.0.0.1:{port}"
    raise AssertionError("none of 100 ports is free")


@pytest.fixture
def elsewhere(checkpoint: Path, tmp_path: Path) -> Path:
    """Copy the checkpoint, as on another host."""
    return shutil.copytree(add_tokenizer(checkpoint), tmp_path / "copy")


@pytest.mark.slow
def test_a_killed_rank_on_another_host_ends_the_node(checkpoint: Path, elsewhere: Path, leader: str) -> None:
    split = ("--tp", "2", "--leader", leader)
    with Fleet() as fleet, host(elsewhere, *split, "--rank", "1") as other:
        node = fleet.start_decode(checkpoint, [*FLAGS, *split, "--rank", "0"])
        fleet.start_router(checkpoint)
        fleet.wait_ready()
        assert fleet.complete(PROMPT, 12) == reference_greedy(reference_model(checkpoint), PROMPT, 12)
        (rank,) = other.ranks()
        rank.kill()
        fleet.wait_until(lambda: node.child.state == "ended", END_SECONDS)
        assert "rank 1 (stage 0, shard 1), on another host, has gone" in node.child.last_lines[-1]
        status, lines = other.end()
    assert status == 1
    assert lines[-1] == "pdserve: error: rank 1 (stage 0, shard 1) was killed by SIGKILL"


@pytest.mark.slow
def test_a_host_without_triton_keeps_the_node_on_v1(checkpoint: Path, elsewhere: Path, leader: str) -> None:
    """The leader's kernels run in Triton's interpreter; the other host's kernels do not run."""
    split = ("--tp", "2", "--leader", leader, "--block-size", "16")
    with Fleet() as fleet, host(elsewhere, *split, "--rank", "1"):
        node = fleet.start_decode(checkpoint, [*FLAGS, *split, "--rank", "0"], {"TRITON_INTERPRET": "1"})
        fleet.start_router(checkpoint)
        fleet.wait_ready()
        assert fleet.complete(PROMPT, 12) == reference_greedy(reference_model(checkpoint), PROMPT, 12)
        description = node.describe()
    assert description.runner == "V1"
    assert f"rank 1 on {socket.gethostname()}: no NVIDIA GPU" in description.runner_reasons[0]


@pytest.mark.slow
def test_a_forced_v2_fails_with_the_rank_whose_host_lacks_triton(
    checkpoint: Path, elsewhere: Path, leader: str
) -> None:
    split = ("--tp", "2", "--leader", leader, "--block-size", "16")
    with Fleet() as fleet, host(elsewhere, *split, "--rank", "1"):
        node = fleet.start_decode(checkpoint, [*FLAGS, *split, "--rank", "0"], RUNNER_ENVIRONMENTS["V2"])
        fleet.wait_until(lambda: node.child.state == "ended", 30.0)
        error = node.child.last_lines[-1]
    assert "V2 cannot run on all hosts" in error
    assert f"rank 1 on {socket.gethostname()}: no NVIDIA GPU" in error


@pytest.mark.parametrize(
    ("number", "status"),
    [pytest.param(signal.SIGTERM, 0, marks=pytest.mark.slow, id="stops"), pytest.param(signal.SIGKILL, 1, id="dies")],
)
def test_ranks_on_other_hosts_exit_with_the_leader(
    checkpoint: Path, elsewhere: Path, leader: str, number: int, status: int
) -> None:
    split = ("--tp", "2", "--leader", leader)
    with Fleet() as fleet, host(elsewhere, *split, "--rank", "1") as other:
        node = fleet.start_decode(checkpoint, [*FLAGS, *split, "--rank", "0"])
        fleet.wait_ready()
        ranks = other.ranks()
        node.signal(number)
        ended, lines = other.end()
        _, left = psutil.wait_procs(ranks, patience(END_SECONDS))
    assert (ended, left) == (status, [])
    if status:
        assert lines[-1] == f"pdserve: error: the leader at {leader} has gone"


@pytest.mark.slow
def test_ranks_on_other_hosts_keep_running_until_the_node_has_drained(
    checkpoint: Path, elsewhere: Path, leader: str
) -> None:
    """All hosts receive SIGTERM at once, as from a cluster: the answer is complete and all exit with status 0."""
    split = ("--tp", "2", "--leader", leader)
    with Fleet() as fleet, host(elsewhere, *split, "--rank", "1") as other:
        node = fleet.start_decode(checkpoint, [*FLAGS, *split, "--rank", "0"])
        fleet.wait_ready()
        with RouterClient(node.address) as client:
            running = client.send(PROMPT, greedy(200))
            assert running.started.wait(patience(END_SECONDS))
            other.process.terminate()
            node.signal(signal.SIGTERM)
            assert len(running.wait().tokens) == 200
            client.half_close()
            status, _ = other.end()
        node.wait_ended(END_SECONDS)
        assert (node.child.process.returncode, status) == (0, 0)


@pytest.mark.slow
def test_a_load_error_on_another_host_is_the_error_of_the_node(checkpoint: Path, elsewhere: Path, leader: str) -> None:
    split = ("--tp", "2", "--leader", leader)
    with Fleet() as fleet, host(elsewhere, *split, "--rank", "1") as other:
        while "connecting to the leader" not in other.status.readline():  # it reads the headers before
            pass
        (elsewhere / "model.safetensors").unlink()
        node = fleet.start_decode(checkpoint, [*FLAGS, *split, "--rank", "0"])
        fleet.wait_until(lambda: node.child.state == "ended", 60.0)
        assert node.child.process.returncode == 2
        assert node.child.last_lines[-1].startswith("pdserve: error: rank 1 (stage 0, shard 1): ")
        assert str(elsewhere) in node.child.last_lines[-1]
        status, lines = other.end()
    assert status == 2
    assert any(str(elsewhere) in line for line in lines)


@pytest.mark.slow
@pytest.mark.parametrize("host_of_leader", ["127.0.0.1", "localhost"])
def test_hosts_with_two_ranks_each_serve_as_one_node(
    checkpoint: Path, elsewhere: Path, leader: str, host_of_leader: str
) -> None:
    """4 shards of 2 KV heads on two hosts."""
    leader = leader.replace("127.0.0.1", host_of_leader)
    split = ("--tp", "4", "--leader", leader, "--local-ranks", "2")
    with Fleet() as fleet, host(elsewhere, *split, "--node-rank", "1") as other:
        fleet.start_decode(checkpoint, [*FLAGS, *split, "--node-rank", "0"])
        fleet.start_router(checkpoint)
        fleet.wait_ready()
        assert fleet.complete(PROMPT, 12) == reference_greedy(reference_model(checkpoint), PROMPT, 12)
        assert len(other.ranks()) == 2


@pytest.mark.slow
def test_weights_of_ranks_on_two_hosts_are_reloaded_but_not_patched(
    checkpoint: Path, elsewhere: Path, leader: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = shutil.copytree(elsewhere, tmp_path / "other")
    change_weight(other, "model.layers.1.mlp.up_proj.weight")
    expected = {path: reference_greedy(reference_model(path), PROMPT, 12) for path in (elsewhere, other)}
    patch = tmp_path / "patch.safetensors"
    save_file({"model.norm.weight.rows.0": torch.ones(1)}, patch)
    split = ("--tp", "2", "--leader", leader)
    with Fleet() as fleet, host(elsewhere, *split, "--rank", "1"):
        flags = [*FLAGS, *split, "--rank", "0", "--allow-weight-changes", str(tmp_path)]
        node = fleet.start_decode(checkpoint, flags)
        fleet.wait_ready()
        for path, when in ((other, "wait"), (elsewhere, "abort"), (other, "wait")):
            assert main(["weights", "reload", node.address, "--model", path.name, "--when", when]) == 0
            with RouterClient(node.address) as router:
                assert router.generate(PROMPT, greedy(12)).tokens == expected[path]
        for words, reason in (
            (("patch", node.address, "--file", str(patch)), "a patch reaches the ranks of one host only; reload"),
            (("sleep", node.address), "ranks on other hosts cannot be started again from here"),
            (("reload", node.address, "--model", "absent"), "absent"),
        ):
            assert main(["weights", *words]) == 1
            assert reason in capsys.readouterr().err
        with RouterClient(node.address) as router:
            assert router.generate(PROMPT, greedy(12)).tokens == expected[other]
        assert node.describe().state == "ready"


@pytest.mark.slow
@pytest.mark.parametrize("split", ["--tp", "--pp"])
@pytest.mark.parametrize("changed", ["model.layers.1.mlp.up_proj.weight", "model.norm.weight"])
def test_hosts_with_other_weights_end_the_node(
    checkpoint: Path, elsewhere: Path, leader: str, split: str, changed: str
) -> None:
    """Stages digest their own layers: the changed one is on the leader's host alone, and there it is as it was."""
    group = "layers.1.mlp" if "layers" in changed else "norm"
    change_weight(elsewhere, changed)
    flags = (split, "2", "--leader", leader)
    with Fleet() as fleet, host(elsewhere, *flags, "--rank", "1"):
        node = fleet.start_decode(checkpoint, [*FLAGS, *flags, "--rank", "0"])
        if split == "--pp" and group != "norm":
            fleet.wait_ready()
            return
        fleet.wait_until(lambda: node.child.state == "ended", 60.0)
    assert node.child.process.returncode == 2
    assert f"weights of {group}: " in node.child.last_lines[-1]
    assert "on the host of rank 1" in node.child.last_lines[-1]


def test_a_host_digests_its_stages_and_all_of_them_together_the_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """A second host, which shares the cache, adds its part; a node of one host then reads nothing."""
    copy = Path(shutil.copytree(checkpoint, tmp_path / "copy", ignore=shutil.ignore_patterns(NAME)))
    time.sleep(0.03)  # digests of a file that has just changed are not cached
    options = NodeOptions(model=str(copy), device="cpu", pp=2, tp=2)
    config = resolve(options, node_devices(options, 1)[0])
    first = host_digests(config, range(2))
    assert with_known_digests(config) is None
    second = host_digests(config, range(2, 4))
    assert {"embed_tokens", "norm"} < first.groups.keys() & second.groups.keys()
    common = {group for group in first.groups.keys() & second.groups.keys() if group.startswith("layers.")}
    assert not common
    whole = with_known_digests(config)
    assert whole == with_host_digests(config, (first, second)) == with_weight_digests(config)
    with pytest.raises(ConfigError, match=r"weights of norm: 0 on the host of rank 2, .* give all hosts the same"):
        with_host_digests(config, (first, msgspec.structs.replace(second, groups=second.groups | {"norm": "0"})))


@pytest.mark.parametrize(
    ("here", "there", "words"),
    [
        (["--tp", "2"], ["--tp", "4"], ("tp 4 there", "tp 2 at the leader")),
        (["--pp", "2"], ["--tp", "2"], ("tp 2 there", "tp 1 at the leader")),
    ],
)
def test_a_rank_with_another_split_is_rejected_with_both_values_in_one_line(
    checkpoint: Path, elsewhere: Path, leader: str, here: list[str], there: list[str], words: tuple[str, str]
) -> None:
    with Fleet() as fleet:
        fleet.start_decode(checkpoint, [*FLAGS, *here, "--leader", leader, "--rank", "0"])
        with host(elsewhere, *there, "--leader", leader, "--rank", "1") as other:
            status, lines = other.end()
    assert status == 2
    assert len(lines) == 1
    assert all(word in lines[0] for word in words), lines


@pytest.mark.parametrize(
    ("flags", "local"),
    [
        ([], LocalRanks(range(4))),
        (["--leader", "h:1", "--rank", "0"], LocalRanks(range(1), "h:1")),
        (["--leader", "h:1", "--rank", "3"], LocalRanks(range(3, 4), "h:1")),
        (["--leader", "[::1]:80", "--node-rank", "1", "--local-ranks", "2"], LocalRanks(range(2, 4), "[::1]:80")),
        (["--leader", "h:1", "--node-rank", "0", "--local-ranks", "4"], LocalRanks(range(4))),
    ],
)
def test_flags_select_the_ranks_of_this_host(flags: list[str], local: LocalRanks) -> None:
    assert local_ranks_from(role_parser("x", "").parse_args(["m", *flags]), 4) == local


@pytest.mark.parametrize(
    ("flags", "word"),
    [
        (["--rank", "1"], "--leader HOST:PORT"),
        (["--node-rank", "1", "--local-ranks", "2"], "--leader HOST:PORT"),
        (["--leader", "h:1"], "--rank R"),
        (["--leader", "h:1", "--rank", "0", "--node-rank", "0", "--local-ranks", "1"], "--rank R"),
        (["--leader", "h:1", "--node-rank", "1"], "--local-ranks G"),
        (["--leader", "h:1", "--rank", "0", "--local-ranks", "1"], "--local-ranks G"),
        (["--leader", "h:1", "--rank", "4"], "rank 4"),
        (["--leader", "h:1", "--node-rank", "1", "--local-ranks", "3"], "rank 5"),
        (["--leader", "h", "--rank", "0"], "HOST:PORT"),
        (["--leader", "h:0", "--rank", "0"], "HOST:PORT"),
        (["--leader", "h:1", "--rank", "-1"], "-1"),
    ],
)
def test_contradicting_host_flags_are_errors(flags: list[str], word: str) -> None:
    with pytest.raises(ConfigError) as refused:
        local_ranks_from(role_parser("x", "").parse_args(["m", *flags]), 4)
    assert word in str(refused.value)
