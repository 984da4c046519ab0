"""Reloads that fail half-way on one of two ranks: the node has no weights until one succeeds, or it ends."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from checkpoints import change_weight, reference_greedy, reference_model
from fleet import Fleet, NodeProcess, add_tokenizer
from node_client import RouterClient, greedy

from cli.main import main
from pdserve.pb import pdserve_pb2 as pb

FLAGS = ("--max-model-len", "512", "--kv-cache-memory", "1MiB", "--max-num-seqs", "4", "--pp", "2")
MODULES = ("engine.process", "engine.executor.rank_process")  # modules that ranks 0 and 1 run
PROMPT = list(range(3, 20))
END_SECONDS = 20.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]


class FailingNode:
    """A decode node with two ranks and the checkpoints a and b. Reads of one rank fail once ``trigger`` is written."""

    def __init__(self, fleet: Fleet, folder: Path, module: str) -> None:
        self.folder = folder
        self.trigger = folder / "trigger"
        python_path = f"{Path(__file__).parent / 'failing_engine'}:{os.environ.get('PYTHONPATH', '')}"
        environ = {"PYTHONPATH": python_path, "FAILING_MODULE": module, "FAILING_READS": str(self.trigger)}
        flags = [*FLAGS, "--allow-weight-changes", str(folder)]
        self.process: NodeProcess = fleet.start_decode(folder / "a", flags, environ)
        fleet.wait_ready()

    def reload(self, name: str) -> int:
        return main(["weights", "reload", self.process.address, "--model", name])

    def expected(self, name: str, num_tokens: int) -> list[int]:
        return reference_greedy(reference_model(self.folder / name), PROMPT, num_tokens)


@pytest.fixture
def folder(checkpoint: Path, tmp_path: Path) -> Path:
    for name in "ab":
        add_tokenizer(shutil.copytree(checkpoint, tmp_path / name))
    change_weight(tmp_path / "b", "model.layers.0.mlp.down_proj.weight")
    return tmp_path


@pytest.fixture(params=MODULES)
def node(folder: Path, request: pytest.FixtureRequest) -> Iterator[FailingNode]:
    with Fleet() as fleet:
        yield FailingNode(fleet, folder, request.param)


def test_node_without_weights_refuses_requests_until_a_reload_succeeds(
    node: FailingNode, capsys: pytest.CaptureFixture[str]
) -> None:
    with RouterClient(node.process.address) as router:
        node.trigger.write_text("fail")
        assert node.reload("b") == 1
        assert "the test made this read fail" in capsys.readouterr().err
        assert node.process.describe().state == "without weights"
        refused = router.generate(PROMPT, greedy(4)).failure
        assert refused is not None
        assert refused.code == pb.Failure.NODE_FAILED
    assert node.reload("b") == 1, "it fails again"
    node.trigger.unlink()
    for name in "ba":
        assert node.reload(name) == 0
        with RouterClient(node.process.address) as router:
            assert router.generate(PROMPT, greedy(16)).tokens == node.expected(name, 16)


def test_node_ends_if_a_rank_dies_during_a_reload(node: FailingNode) -> None:
    node.trigger.write_text("kill")
    assert node.reload("b") == 1
    node.process.wait_ended(END_SECONDS)
    with RouterClient(node.process.address) as router:
        router.send(PROMPT, greedy(1))
        router.join()
        assert router.error is not None
