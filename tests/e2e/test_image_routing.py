"""Routers send a prompt to the prefill node that has the embeddings of its image, under whichever prefix."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import pytest
from fleet import MODEL_NAME, Fleet
from image_chats import LETTERS, Message, data_url, image_part
from image_checkpoints import CELL, make_image_checkpoint, random_image
from machine import patience

#: A token of a prompt takes 0.1 ms, and an image of 256 tokens as long as 2,357 tokens.
SIMULATED = ("--engine", "simulated", "--block-size", "16", "--sim-costs", "prompt-token=1e-4")
SIDE = 16 * CELL  # pixels
OUTPUT = 30  # tokens: the report of an image comes before the end of its answer


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    directory = make_image_checkpoint(tmp_path_factory.mktemp("sees") / "model", "qwen3_vl")
    with Fleet() as fleet:
        for _ in range(2):
            fleet.start_prefill(directory, SIMULATED)
        fleet.start_decode(directory, SIMULATED)
        fleet.start_router(directory, ["--policy", "prefix-aware"])
        fleet.wait_ready()
        fleet.wait_until(lambda: len(fleet.decode[0].describe().connected_peers) == 2, 30.0)
        yield fleet


def screenshot(seed: int) -> str:
    """Return the URL of an image that the processor leaves as it is."""
    image = random_image(SIDE, SIDE, seed)
    file = io.BytesIO()
    image.save(file, "PNG")
    return data_url(file.getvalue())


def ask(fleet: Fleet, url: str, text: str) -> None:
    """Ask about an image behind a text, in which prompts differ from their first block on."""
    content: list[Message] = [{"type": "text", "text": text}, image_part(url), {"type": "text", "text": "Where?"}]
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": OUTPUT}
    url = f"{fleet.url}/v1/chat/completions"
    response = httpx.post(url, json={**body, "ignore_eos": True}, trust_env=False, timeout=patience(60.0))
    assert response.status_code == 200, response.text


def texts(count: int, num_tokens: int) -> list[str]:
    rng = random.Random(count)
    return ["".join(rng.choices(LETTERS, k=num_tokens)) for _ in range(count)]


def encoded(fleet: Fleet) -> list[float]:
    """Return the images that each prefill node has encoded."""
    return [node.counter("images_encoded") for node in fleet.prefill]


def test_prompts_go_to_the_node_that_has_encoded_their_image(fleet: Fleet) -> None:
    """Nodes of equal cost rotate, so the other one would encode some of the images again."""
    before = encoded(fleet)
    images = 4
    for number in range(images):
        url = screenshot(number)
        for text in texts(2, 20):
            ask(fleet, url, f"{number} {text}")
    assert sum(encoded(fleet)) - sum(before) == images


def test_a_busy_node_leaves_prompts_to_another_one_that_encodes_the_image_once(fleet: Fleet) -> None:
    url = screenshot(100)
    before = encoded(fleet)
    ask(fleet, url, "first")
    first = [now - then for now, then in zip(encoded(fleet), before, strict=True)]
    assert sorted(first) == [0, 1]
    burst = texts(16, 1500)
    with ThreadPoolExecutor(len(burst)) as pool:
        list(pool.map(lambda text: ask(fleet, url, text), burst))
    assert [now - then for now, then in zip(encoded(fleet), before, strict=True)] == [1, 1]
    for node in fleet.nodes:
        node.wait_idle()
