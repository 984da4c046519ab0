"""V2 that the oracle chose, on prefill and decode nodes whose stages have unlike layers. Triton is interpreted.

The only fast tests of V2 with pipeline stages, of a V2 prefill node and of an error in a stage of V2 (``NEVER_SLOW`` in
tests/support/fast_set.py). They share a fleet, whose decode node the last test ends.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fleet import Fleet, NodeProcess, add_tokenizer
from node_client import RouterClient

from pdserve.config.runner_oracle import VARIABLE
from pdserve.sampling_params import SamplingParams

FLAGS = ("--max-batch-tokens", "32", "--max-num-seqs", "4", "--max-model-len", "128", "--kv-cache-memory", "1MiB")
PROMPT = list(range(3, 43))  # longer than a step, so that its KV is read in parts
OUTPUT = 4
END_SECONDS = 20.0

pytestmark = pytest.mark.timeout(240)


class Staged(NamedTuple):
    fleet: Fleet
    model: Path
    failing: Path  # once this file exists, the second stage of D fails

    @property
    def prefill(self) -> NodeProcess:
        return self.fleet.prefill[0]

    @property
    def decode(self) -> NodeProcess:
        return self.fleet.decode[0]


@pytest.fixture(scope="module")
def staged(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Staged]:
    folder = tmp_path_factory.mktemp("staged")
    model = add_tokenizer(make_checkpoint(folder / "model", "llama", num_hidden_layers=3))
    failing = folder / "fail"
    python_path = f"{Path(__file__).parents[1] / 'nodes' / 'failing_engine'}:{os.environ.get('PYTHONPATH', '')}"
    usable = {"TRITON_INTERPRET": "1"}
    failing_stage = {"FAILING_MODULE": "engine.executor.rank_process", "FAILING_TRIGGER": str(failing)}
    with Fleet() as fleet:
        fleet.start_prefill(model, (*FLAGS, "--pp", "2", "--stage-layers", "2,1"), usable)
        flags = (*FLAGS, "--pp", "2", "--stage-layers", "1,2", "--handoff-min-tokens", "1")
        fleet.start_decode(model, flags, usable | failing_stage | {"PYTHONPATH": python_path})
        fleet.start_router(model)
        fleet.wait_ready()
        yield Staged(fleet, model, failing)


def test_v2_that_the_oracle_chose_serves_a_handoff_between_unlike_stages(staged: Staged) -> None:
    """No variable forces the runner."""
    for node in staged.fleet.nodes:
        description = node.describe()
        assert description.runner == "V2"
        assert VARIABLE not in "; ".join(description.runner_reasons)
    expected = reference_greedy(reference_model(staged.model), PROMPT, OUTPUT)
    assert staged.fleet.complete(PROMPT, OUTPUT) == expected
    assert (staged.decode.counter("handoffs"), staged.decode.counter("handoff_failures")) == (1, 0)
    assert staged.decode.counter("local_prefills") == 0


def test_choices_of_a_handoff_between_stages_of_v2_are_those_of_one_node(staged: Staged) -> None:
    sampling = SamplingParams(OUTPUT, n=2, temperature=1.0, seed=11, logprobs=1, ignore_eos=True)
    before = staged.decode.counter("handoffs")
    with RouterClient(staged.decode.address) as client:
        alone = client.send(PROMPT, sampling, "", cache_salt="alone").wait()
        handed_off = client.send(PROMPT, sampling, staged.prefill.address, cache_salt="handed off").wait()
    assert staged.decode.counter("handoffs") == before + 1
    assert handed_off.failure is None
    assert handed_off.choices == alone.choices
    for choice, tokens in alone.logprobs.items():
        for got, wanted in zip(handed_off.logprobs[choice], tokens, strict=True):
            assert got.logprob == pytest.approx(wanted.logprob, abs=1e-4)
    for node in staged.fleet.nodes:
        node.wait_idle()


def test_a_failing_stage_of_v2_ends_its_node_which_names_it(staged: Staged) -> None:
    node = staged.decode
    node.child.last_lines = deque(node.child.last_lines)  # keep all lines from now on
    staged.failing.touch()
    with RouterClient(node.address) as client:
        client.send(PROMPT, SamplingParams(OUTPUT), "", cache_salt="another")
        staged.fleet.wait_until(lambda: node.child.state == "ended", END_SECONDS)
    message = "rank 1 (stage 1, shard 0): RuntimeError: the test made this forward pass fail"
    assert node.child.process.returncode == 1
    assert node.child.last_lines[-1].endswith(message), node.child.last_lines
    assert node.output.count("Traceback (most recent call last)") == 1, "only the rank that failed logs a traceback"
