"""The step loop: steps overlap if the runner allows it, and the loop waits only while none is in flight."""

from __future__ import annotations

import threading
import time
from array import array

import pytest
from toy import reference
from toy_node import Node, long_step, wait_until

from pdserve.ipc.messages import Mode, Shutdown, StartRead, Submit
from pdserve.records import FinishReason
from pdserve.sampling_params import SamplingParams


@pytest.mark.parametrize(("depth", "overlapped"), [(1, 0), (2, 9)])
def test_next_step_is_launched_before_the_last_result_is_taken(depth: int, overlapped: int) -> None:
    node = Node(16, depth)
    node.submit(0, [1, 2, 3], SamplingParams(max_tokens=10), Mode.LOCAL)
    node.run()
    assert node.tokens[0, 0] == reference([1, 2, 3], 0, 10)
    assert node.scheduler.status().totals.steps == 10
    assert node.runner.num_overlapped == overlapped
    node.close()


def test_result_that_arrives_during_a_launch_is_emitted_then() -> None:
    node = Node(16, 2, layered=True)
    node.submit(0, [1, 2, 3], SamplingParams(max_tokens=10), Mode.LOCAL)
    node.run()
    assert node.tokens[0, 0] == reference([1, 2, 3], 0, 10)
    assert node.runner.behind.count(1) == 9, "each step is launched behind another one"
    assert node.runner.num_overlapped == 0, "no result waits until a launch has ended"
    node.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_connector_orders_are_carried_out_without_tokens_to_compute(depth: int) -> None:
    """Also while the last step is in flight, a read is ordered and its end reported."""
    node = Node(16, depth)
    node.submit(0, [1] * 10, SamplingParams(max_tokens=3), Mode.HANDOFF)
    node.submit(1, [2] * 10, SamplingParams(max_tokens=1), Mode.LOCAL)
    node.step()
    node.obey(StartRead(0, "unknown", (1, 2, 3), 10))
    reads = [read for _ in range(3) for read in node.step().reads]
    while not reads:
        time.sleep(0.001)  # the connector's thread is at work
        reads += node.step().reads
    assert [(read.rid, "no connection" in read.result.error) for read in reads] == [(0, True)]
    node.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_loop_serves_until_shutdown(depth: int) -> None:
    node = Node(16, depth)
    loop = threading.Thread(target=node.engine.run)
    loop.start()
    tokens = []
    for rid in range(3):
        node.send(Submit(rid, array("I", [rid] * 6).tobytes(), SamplingParams(max_tokens=5), Mode.LOCAL))
        ended = None
        while ended is not FinishReason.LENGTH:
            time.sleep(0.001)
            for sampled, _, token_id, finish, _ in (row for batch in node.received() for row in batch.outputs.rows()):
                tokens.append((sampled, token_id))
                ended = finish
    node.send(Shutdown())
    loop.join()
    assert tokens == [(rid, token) for rid in range(3) for token in reference([rid] * 6, 0, 5)]
    # Besides the steps that compute: one per request that tells the runner of its end, the first step, and the last.
    assert sum(not plan.scheduled for plan in node.runner.launched) <= 3 + 2
    node.close()


def test_commands_are_carried_out_while_a_long_step_executes() -> None:
    """A handoff is reserved and read then, and the next step has the prompts that have arrived."""
    node = Node(64, 2, seconds=lambda plan: 1000.0)
    node.submit(0, [0] * 4, SamplingParams(max_tokens=100), Mode.LOCAL)
    node.submit(1, [1] * 10, SamplingParams(max_tokens=1), Mode.LOCAL)
    for _ in range(6):
        node.step()  # measures what steps take
    with long_step(node):
        num_steps = len(node.runner.launched)
        prompts = [[3] * 5, [4] * 6]
        for rid, prompt in enumerate(prompts, 3):
            node.send(Submit(rid, array("I", prompt).tobytes(), SamplingParams(max_tokens=1), Mode.LOCAL))
        node.send(Submit(5, array("I", [5] * 10).tobytes(), SamplingParams(max_tokens=3), Mode.HANDOFF))
        wait_until(lambda: any(batch.reserved for batch in node.received()))
        node.send(StartRead(5, "unknown", (1, 2, 3), 10))
        wait_until(lambda: any(batch.reads for batch in node.received()))
    for _ in range(2):
        node.step()
    assert [new.tokens(0, new.num_tokens).tolist() for new in node.runner.launched[num_steps].new] == prompts
    node.close()
