"""Weights that change while a node serves: which are accepted, and what is never mixed. The nodes are simulated."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import psutil
import pytest
import torch
from fleet import Fleet, NodeProcess
from machine import patience
from node_client import RouterClient, greedy
from safetensors.torch import load_file, save_file

from cli.main import main
from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

SLOW_STEPS = ("--engine", "simulated", "--sim-costs", "step=0.02", "--drain-timeout", "20")
PROMPT = list(range(3, 43))
NORM = "model.norm.weight"


@pytest.fixture(scope="module")
def versions(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with the checkpoints a, b of the same model, and other of another one."""
    folder = tmp_path_factory.mktemp("versions")
    for name in ("a", "b", "other"):
        shutil.copytree(checkpoint, folder / name)
    (weights,) = (folder / "b").glob("*.safetensors")
    save_file({name: tensor + 1 for name, tensor in load_file(weights).items()}, weights)
    config = folder / "other" / "config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 1e-05'))
    assert config.read_text() != (folder / "a" / "config.json").read_text()
    return folder


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with Fleet() as fleet:
        yield fleet


def start(fleet: Fleet, versions: Path, role: str, name: str, *flags: str) -> NodeProcess:
    start_node = fleet.start_prefill if role == "prefill" else fleet.start_decode
    return start_node(versions / name, [*SLOW_STEPS, "--allow-weight-changes", str(versions), *flags])


def reported_share(node: NodeProcess) -> float:
    """Return the share of prompts that the node reports to a router, a while after its first report."""
    with node.channel() as channel:
        reports = iter(pb_grpc.NodeStub(channel).Watch(pb.WatchRequest()))
        next(reports)
        return next(reports).load.prompt_share


def change(*words: str) -> int:
    return main(["weights", *words])


def tokens(node: NodeProcess, prefill_node: str = "") -> list[int]:
    with RouterClient(node.address) as router:
        return router.generate(PROMPT, greedy(4), prefill_node).tokens


def write_patch(path: Path, name: str = NORM) -> Path:
    save_file({f"{name}.indices": torch.tensor([1]), f"{name}.values": torch.tensor([0.5])}, path)
    return path


def test_node_after_a_reload_is_a_node_that_was_started_with_the_checkpoint(
    fleet: Fleet, versions: Path, tmp_path: Path
) -> None:
    node, fresh = (start(fleet, versions, "decode", name) for name in "ab")
    fleet.wait_ready()
    before = node.describe()
    old = tokens(node)
    assert fresh.describe().weights != before.weights
    assert change("reload", node.address, "--model", "b") == 0
    after = node.describe()
    assert after.state == "ready"
    assert after.weights == fresh.describe().weights
    assert after.compat_hash == fresh.describe().compat_hash
    assert after.epoch != before.epoch
    with RouterClient(node.address) as router:
        generated = router.generate(PROMPT, greedy(4))
        assert generated.cached_tokens == 0, "KV of the old weights"
        assert generated.tokens == tokens(fresh) != old
        stale = router.generate(PROMPT, greedy(4), epoch=before.epoch)
        assert stale.failure is not None
        assert stale.failure.code == pb.Failure.DRAINING
    assert change("patch", node.address, "--file", str(write_patch(tmp_path / "patch"))) == 0
    assert tokens(node) != tokens(fresh)
    for order in ("sleep", "wake"):
        assert change(order, node.address) == 0
    assert node.describe().weights == after.weights, "the patch is lost, the reload is not"
    assert tokens(node) == tokens(fresh)


def test_refused_changes_leave_a_node_as_it_was(
    fleet: Fleet, versions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = start(fleet, versions, "decode", "a")
    closed = fleet.start_decode(versions / "a", SLOW_STEPS)
    fleet.wait_ready()
    before = node.describe()
    old = tokens(node)
    (versions / "loop").symlink_to(versions / "loop")
    deep = "/".join(["x" * 200] * 15)
    (versions / deep).mkdir(parents=True)
    garbage = tmp_path / "garbage"
    garbage.write_bytes(b"no safetensors" * 100)
    for words, reason in (
        (("reload", closed.address, "--model", "b"), "--allow-weight-changes"),
        (("reload", node.address, "--model", "../../etc"), "is not below"),
        (("reload", node.address, "--model", "a\0b"), "is not below"),
        (("reload", node.address, "--model", "none"), "config.json"),
        (("reload", node.address, "--model", "loop"), "Too many levels of symbolic links"),
        (("reload", node.address, "--model", "x" * 5000), "File name too long"),
        (("reload", node.address, "--model", "/".join(["x" * 200] * 30)), "File name too long"),
        (("reload", node.address, "--model", deep), "config.json"),
        (("reload", node.address, "--model", "a/config.json"), "Not a directory"),
        (("wake", node.address, "--model", "loop"), "Too many levels of symbolic links"),
        (("reload", node.address, "--model", "other"), "rms_norm_eps"),
        (("patch", node.address, "--file", str(garbage)), "safetensors"),
        (("patch", closed.address, "--file", str(write_patch(tmp_path / "patch"))), "--allow-weight-changes"),
    ):
        assert change(*words) == 1
        assert reason in (error := capsys.readouterr().err)
        assert len(error) < 5000
    with grpc.insecure_channel(node.address) as channel, pytest.raises(grpc.RpcError) as refused:
        pb_grpc.WeightChangesStub(channel).Reload(pb.ReloadRequest(model_dir="b", when="keep"), timeout=patience(10.0))
    assert refused.value.details() == "when 'keep' is none of wait, abort"
    assert "Traceback" not in node.output
    after = node.describe()
    assert (after.epoch, after.weights, after.state) == (before.epoch, before.weights, "ready")
    assert tokens(node) == old


def test_running_requests_end_or_are_handed_over_before_a_change(fleet: Fleet, versions: Path) -> None:
    node = start(fleet, versions, "decode", "a")
    fleet.wait_ready()
    with RouterClient(node.address) as router:
        expected = router.generate(PROMPT, greedy(40)).tokens
        running = router.send(PROMPT, greedy(40))
        running.started.wait(patience(20.0))
        router.half_close()
        assert change("reload", node.address, "--model", "b") == 0
        assert running.wait().tokens == expected
    with RouterClient(node.address) as router:
        running = router.send(PROMPT, greedy(1000))
        running.started.wait(patience(20.0))
        router.half_close()
        assert change("reload", node.address, "--model", "a", "--when", "abort") == 0
        failure = running.wait().failure
        assert failure is not None
        assert failure.code == pb.Failure.DRAINING
        assert running.choices[0] != expected[: len(running.choices[0])], "they are tokens of b"
    assert tokens(node) == expected[:4]


def test_checkpoint_that_is_replaced_while_the_node_drains_is_refused(
    fleet: Fleet, versions: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A trainer renames a new file into place. Weights and announced digests belong to one version."""
    for name in "ab":
        shutil.copytree(versions / name, tmp_path / name)
    node = start(fleet, tmp_path, "decode", "a")
    fleet.wait_ready()
    before = node.describe()
    new = shutil.copy(tmp_path / "a" / "model.safetensors", tmp_path / "new")
    with RouterClient(node.address) as router, ThreadPoolExecutor(1) as pool:
        expected = router.generate(PROMPT, greedy(4)).tokens
        running = router.send(PROMPT, greedy(900))
        running.started.wait(20.0)
        changed = pool.submit(change, "reload", node.address, "--model", "b")
        fleet.wait_until(lambda: node.describe().state == "draining", 20.0)
        os.replace(new, tmp_path / "b" / "model.safetensors")
        router.cancel(running)
        assert changed.result() == 1
    assert "model.safetensors' in" in (error := capsys.readouterr().err)
    assert "changed between the digests of its weights and their load" in error
    after = node.describe()
    assert (after.state, after.epoch, after.weights) == ("ready", before.epoch, before.weights)
    assert tokens(node) == expected
    assert change("reload", node.address, "--model", "b") == 0
    assert tokens(node) == expected, "the trainer's file has the weights of a"
    assert node.describe().weights == before.weights


def test_nodes_exchange_kv_only_with_those_of_their_weights(fleet: Fleet, versions: Path, tmp_path: Path) -> None:
    prefill = start(fleet, versions, "prefill", "a")
    decode = start(fleet, versions, "decode", "a", "--handoff-min-tokens", "1")
    fleet.wait_ready()
    name = prefill.describe().node_id
    patch = str(write_patch(tmp_path / "patch"))

    def connected() -> bool:
        return list(decode.describe().connected_peers) == [name]

    first = tokens(decode, name)
    for words in (("reload", "--model", "b"), ("patch", "--file", patch)):
        assert change(words[0], prefill.address, *words[1:]) == 0
        fleet.wait_until(lambda: not connected(), 20.0)
        assert tokens(decode, name) == first, "computed by D alone"
        assert change(words[0], decode.address, *words[1:]) == 0
        fleet.wait_until(connected, 20.0)
        handed_off = prefill.counter("leases_released")
        second = tokens(decode, name)
        assert second != first
        assert prefill.counter("leases_released") == handed_off + 1
        first = second
    for node in (prefill, decode):
        node.wait_idle()
    assert change("show", prefill.address, decode.address) == 0


def test_sleeping_node_has_no_engine_and_wakes_as_a_new_node(fleet: Fleet, versions: Path) -> None:
    prefill = start(fleet, versions, "prefill", "a")
    decode = start(fleet, versions, "decode", "a", "--handoff-min-tokens", "1")
    fleet.wait_ready()
    name = prefill.describe().node_id

    def connected() -> bool:
        return list(decode.describe().connected_peers) == [name]

    for _ in range(3):
        expected = tokens(decode, name)
    for node in (prefill, decode):
        assert 0.0 <= reported_share(node) <= 1.0
        before = node.describe()
        handed_off = prefill.counter("leases_released")
        assert change("sleep", node.address, "--when", "abort") == 0
        assert node.describe().state == "asleep"
        assert not psutil.Process(node.pid).children()
        fleet.wait_until(lambda: not connected(), 20.0)
        if node is prefill:
            assert tokens(decode, name) == expected, "computed by D alone"
        assert change("wake", node.address) == 0
        after = node.describe()
        assert (after.state, after.weights, after.compat_hash) == ("ready", before.weights, before.compat_hash)
        assert after.epoch != before.epoch
        fleet.wait_until(connected, 20.0)
        assert tokens(decode, name) == expected
        assert prefill.counter("leases_released") == handed_off + 1
        assert 0.0 <= reported_share(node) <= 1.0, "its engine began to count again"
        node.wait_idle()


def test_node_that_cannot_wake_stays_asleep(fleet: Fleet, versions: Path, tmp_path: Path) -> None:
    shutil.copytree(versions / "a", tmp_path / "a")
    (weights,) = (tmp_path / "a").glob("*.safetensors")
    content = weights.read_bytes()
    node = start(fleet, tmp_path, "decode", "a")
    fleet.wait_ready()
    expected = tokens(node)
    for _ in range(2):
        assert change("sleep", node.address) == 0
    weights.write_bytes(b"no safetensors")
    assert change("wake", node.address) == 1
    assert node.describe().state == "asleep"
    weights.write_bytes(content)
    for name in ("b", "other"):
        shutil.copytree(versions / name, tmp_path / name)
    (tmp_path / "b" / "config.json").unlink()
    for name in ("b", "other", "../a"):
        assert change("wake", node.address, "--model", name) == 1
        assert node.describe().state == "asleep"
    for _ in range(2):
        assert change("wake", node.address) == 0
    assert tokens(node) == expected
    assert change("wake", node.address, "--model", "a") == 1, "it is awake"
    assert change("sleep", node.address) == 0
    shutil.copy(tmp_path / "a" / "config.json", tmp_path / "b")
    assert change("wake", node.address, "--model", "b") == 0
    other = tokens(node)
    assert other != expected
    assert change("reload", node.address, "--model", "a") == 0
    assert change("reload", node.address, "--model", "b") == 0
    assert tokens(node) == other, "it woke with the weights of b"
