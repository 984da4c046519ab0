"""Choices under a grammar: no step waits for their masks, and a mask that becomes ready wakes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import pytest
from toy import reference
from toy_node import Node

from engine.ipc.messages import Mode, Shutdown, Submit
from engine.scheduler.grammar_workers import GrammarWorkers
from pdserve.config.hub import EMBEDDED_MODEL
from pdserve.config.model_config import load_model_config
from pdserve.grammar import from_regex
from pdserve.records import FinishReason, SamplingParams
from pdserve.rpc.protobuf import pack_tokens

LETTERS = SamplingParams(max_tokens=20, grammar=from_regex("[a-z]{400}"))  # no token of it ends it


def workers(wake: Callable[[], None]) -> GrammarWorkers:
    return GrammarWorkers(str(EMBEDDED_MODEL), load_model_config(EMBEDDED_MODEL), wake)


@pytest.mark.parametrize("depth", [1, 2])
def test_plan_never_waits_for_masks(depth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """While all mask threads stand still, other requests run to their end and no plan blocks on a condition."""
    gate = threading.Event()

    def stand_still() -> None:
        gate.wait()

    node = Node(64, depth, grammars=lambda wake: workers(stand_still))
    node.submit(0, [1, 2, 3], LETTERS, Mode.LOCAL)
    for _ in range(10_000):
        node.step()
        if len(node.tokens[0, 0]) >= 3:  # its grammar is compiled, and each of the two threads has published a mask
            break
        time.sleep(0.001)
    loop, wait = threading.current_thread(), threading.Condition.wait

    def wait_beside_the_loop(condition: threading.Condition, timeout: float | None = None) -> bool:
        assert threading.current_thread() is not loop, "the step loop waits"
        return wait(condition, timeout)

    with monkeypatch.context() as patch:
        patch.setattr(threading.Condition, "wait", wait_beside_the_loop)
        node.submit(1, [4, 5, 6], SamplingParams(max_tokens=30), Mode.LOCAL)
        while (1, 0) not in node.finished:
            node.step()
    assert node.tokens[1, 0] == reference([4, 5, 6], 0, 30)
    assert (0, 0) not in node.finished
    gate.set()
    while (0, 0) not in node.finished:
        node.step()
        time.sleep(0.001)
    assert len(node.tokens[0, 0]) == 20
    node.assert_all_free()
    node.close()


@pytest.mark.parametrize("depth", [1, 2])
def test_mask_that_becomes_ready_wakes_an_idle_loop(depth: int) -> None:
    node = Node(64, depth, grammars=workers)
    loop = threading.Thread(target=node.engine.run)
    loop.start()
    node.send(Submit(1, pack_tokens([1, 2, 3]), LETTERS, Mode.LOCAL))
    tokens: list[int] = []
    ended: FinishReason | None = None
    while ended is None:
        time.sleep(0.001)
        for _, _, token_id, finish, _ in (row for batch in node.received() for row in batch.outputs.rows()):
            tokens.append(token_id)
            ended = finish
    node.send(Shutdown())
    loop.join()
    assert len(tokens) == 20
    steps = [plan for plan in node.runner.launched if plan.scheduled]
    assert len(steps) == 20, "a step computes one token, and no step runs without its mask"
    node.close()
