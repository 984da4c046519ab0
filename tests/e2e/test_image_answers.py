"""Chats with images through real processes: tokens, log-probabilities and usage are those of the library.

python -m pytest -m slow tests/e2e/test_image_answers.py     other families, one node, nodes that die, and 200 random
                                                             conversations of each family
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from fleet import RUNNER_ENVIRONMENTS, Fleet, NodeProcess
from image_chats import LETTERS, Message, data_url, image_part, num_images, random_file
from image_checkpoints import KINDS, make_image_checkpoint
from served_images import OUTPUT, Served, conversations, flags_of

QUICK = "qwen3_vl"
CONVERSATIONS = 200

pytestmark = pytest.mark.timeout(300)

FAMILIES = [kind if kind == QUICK else pytest.param(kind, marks=pytest.mark.slow) for kind in KINDS]


@pytest.fixture(scope="module", params=FAMILIES)
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_image_checkpoint(tmp_path_factory.mktemp("sees") / "model", request.param)


@pytest.fixture(scope="module")
def served(directory: Path) -> Iterator[Served]:
    """Two nodes of each role. Nodes D encode no images."""
    with Fleet() as fleet:
        for _ in range(2):
            fleet.start_prefill(directory, flags_of(directory))
        for _ in range(2):
            fleet.start_decode(directory, (*flags_of(directory), "--handoff-min-tokens", "0"))
        yield Served(directory, fleet)


@pytest.fixture(scope="module")
def alone(directory: Path) -> Iterator[Served]:
    """One node, which encodes images."""
    with Fleet() as fleet:
        fleet.start_decode(directory, (*flags_of(directory), "--images", "on"))
        yield Served(directory, fleet)


def question(seed: int, num_tokens: int) -> list[Message]:
    """Return a question with so many tokens of text behind an image, and another image at the end."""
    rng = random.Random(seed)
    text = "".join(rng.choices(LETTERS, k=num_tokens))
    first, last = (image_part(data_url(random_file(rng))) for _ in range(2))
    return [{"role": "user", "content": [first, {"type": "text", "text": text}, last]}]


def test_answers_behind_handoffs_are_the_library_s(served: Served) -> None:
    chats = conversations(1, 8)
    assert sum(map(num_images, chats)) > 8
    for _ in range(2):
        served.check(chats)  # the second time, all is in the prefix caches
    fleet = served.fleet
    assert sum(node.counter("handoffs") for node in fleet.decode) > len(chats)
    assert sum(node.counter("handoff_failures") for node in fleet.decode) == 0
    assert sum(node.counter("images_encoded") for node in fleet.decode) == 0
    assert sum(node.counter("images_encoded") for node in fleet.prefill) > 0


def test_choices_behind_a_handoff_see_an_image_in_the_last_block(served: Served) -> None:
    if served.reference.gemma is not None:
        pytest.skip("choices of a model with windows compute the last block: a node without a tower refuses them")
    check_choices(served, OUTPUT)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_choices_on_v2_see_an_image_in_the_last_block(directory: Path) -> None:
    """V2 copies the block, in Triton's interpreter."""
    flags = flags_of(directory)
    if json.loads((directory / "config.json").read_text())["model_type"].startswith("gemma"):
        pytest.skip("choices of a model with windows compute the last block: a node without a tower refuses them")
    with Fleet() as fleet:
        fleet.start_prefill(directory, flags)
        fleet.start_decode(directory, (*flags, "--handoff-min-tokens", "0"), RUNNER_ENVIRONMENTS["V2"])
        served = Served(directory, fleet)
        assert fleet.decode[0].describe().runner == "V2"
        check_choices(served, 6)


def check_choices(served: Served, output: int) -> None:
    """Sample choices behind an image whose last tokens D has the KV of, and no pixels."""
    chats = (question(7, length) for length in range(20, 100))
    messages = next(filter(served.ends_in_last_block, chats))
    before = served.migrations("images")
    answer = served.ask(messages, output, n=3, temperature=1.0, seed=5)
    assert len({tuple(choice["token_ids"]) for choice in answer["choices"]}) == 3
    served.compare_choices(messages, answer)
    assert served.migrations("images") == before
    for node in served.fleet.nodes:
        node.wait_idle()


@pytest.mark.slow
def test_answers_of_one_node_are_the_library_s(alone: Served) -> None:
    chats = conversations(1, 8)
    for _ in range(2):
        alone.check(chats)
    alone.fleet.decode[0].wait_idle()


@pytest.mark.slow
def test_prompt_goes_on_where_its_node_died(served: Served) -> None:
    """D lacks the pixels. The router sends them to the other prefill node."""
    fleet = served.fleet
    messages = question(3, 3000)
    before = served.migrations("images")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.ask, messages, OUTPUT)
        node = computing(fleet, fleet.prefill)
        node.kill()
        served.compare(messages, answer.result())
    assert served.migrations("images") > before
    node.restart()


@pytest.mark.slow
def test_answer_goes_on_where_its_node_died(served: Served) -> None:
    fleet = served.fleet
    messages = question(4, 60)
    before = served.migrations("lost")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.ask, messages, 300)
        node = computing(fleet, fleet.decode, sampled=20)
        node.kill()
        served.compare(messages, answer.result())
    assert served.migrations("lost") > before
    node.restart()


@pytest.mark.slow
@pytest.mark.parametrize("towers", [False, True], ids=["positions", "towers"])
def test_preempted_answers_are_the_library_s(towers: bool, tmp_path: Path) -> None:
    """Node D holds the KV of a few answers. Without a tower it lacks the pixels of prompts that it computes again."""
    directory = make_image_checkpoint(tmp_path / "model", QUICK)
    few = ("--kv-cache-memory", "2MiB", "--max-model-len", "900")
    with Fleet() as fleet:
        fleet.start_prefill(directory, flags_of(directory))
        fleet.start_decode(directory, (*flags_of(directory), *few, *(("--images", "on") if towers else ())))
        served = Served(directory, fleet)
        served.check([question(20 + number, 20) for number in range(8)], output=250)
        assert fleet.decode[0].counter("preemptions") > 0
        for node in fleet.nodes:
            node.wait_idle()


def computing(fleet: Fleet, nodes: Sequence[NodeProcess], sampled: int = 0) -> NodeProcess:
    """Wait for the node that runs the only request, until it has sampled so many tokens of it."""
    before = {node.name: node.counter("sampled_tokens") for node in nodes}

    def is_computing(node: NodeProcess) -> bool:
        running = node.status().running > 0
        return running and node.counter("sampled_tokens") >= before[node.name] + sampled

    fleet.wait_until(lambda: any(map(is_computing, nodes)), 30.0)
    return next(node for node in nodes if node.status().running)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(2))
def test_random_conversations_are_the_library_s(seed: int, served: Served, alone: Served) -> None:
    """Each one behind a handoff, and on one node."""
    chats = conversations(100 + seed, CONVERSATIONS // 2, longest=300)
    for begin in range(0, len(chats), 8):
        for where in (served, alone):
            where.check(chats[begin : begin + 8])
    for node in (*served.fleet.nodes, *alone.fleet.nodes):
        node.wait_idle()
