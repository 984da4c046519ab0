"""An exception in a rank's forward pass: the log has its traceback, and the node's error names the rank.

tests/e2e/test_chosen_runner.py has a quick one, in a stage of V2.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from fleet import Fleet, add_tokenizer
from node_client import RouterClient, greedy

from pdserve.config.runner_oracle import VARIABLE

FLAGS = ("--max-model-len", "64", "--kv-cache-memory", "1MiB", "--max-num-seqs", "4", "--max-batch-tokens", "32")
RUNNERS = {"V1": {VARIABLE: "0"}, "V2": {VARIABLE: "1", "TRITON_INTERPRET": "1"}}
MODULES = ("engine.process", "engine.executor.rank_process")  # modules that ranks 0 and 1 run
MESSAGE = "RuntimeError: the test made this forward pass fail"
PROMPT = range(3, 20)
END_SECONDS = 20.0

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def fleet() -> Iterator[Fleet]:
    with closing(Fleet()) as fleet:
        yield fleet


STAGES = {  # stages, the rank that fails, its name
    "one rank": (1, 0, ""),
    "stage 0": (2, 0, "rank 0 (stage 0, shard 0): "),
    "stage 1": (2, 1, "rank 1 (stage 1, shard 0): "),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("stages", "failing", "name", "runner"),
    [pytest.param(*case, runner, id=f"{of}-{runner}") for of, case in STAGES.items() for runner in RUNNERS],
)
def test_a_failing_forward_pass_is_logged_with_its_traceback_and_names_its_rank(
    fleet: Fleet, checkpoint: Path, tmp_path: Path, stages: int, failing: int, name: str, runner: str
) -> None:
    trigger = tmp_path / "fail"
    python_path = f"{Path(__file__).parent / 'failing_engine'}:{os.environ.get('PYTHONPATH', '')}"
    environ = {"PYTHONPATH": python_path, "FAILING_MODULE": MODULES[failing], "FAILING_TRIGGER": str(trigger)}
    node = fleet.start_decode(add_tokenizer(checkpoint), [*FLAGS, "--pp", str(stages)], environ | RUNNERS[runner])
    node.child.last_lines = deque(node.child.last_lines)  # keep all lines from now on
    fleet.wait_ready()
    with RouterClient(node.address) as client:
        assert len(client.generate(PROMPT, greedy(2)).tokens) == 2
        assert f"runner {runner}" in node.output
        trigger.touch()
        client.send(PROMPT, greedy(2), cache_salt="another")
        fleet.wait_until(lambda: node.child.state == "ended", END_SECONDS)
    assert node.child.process.returncode == 1
    assert node.child.last_lines[-1].endswith(f"{name}{MESSAGE}"), node.child.last_lines
    assert "Traceback (most recent call last)" in node.output
    assert ", in failing_forward" in node.output
    assert node.output.count("Traceback (most recent call last)") == 1, "only the rank that failed logs a traceback"
