"""Users whose prompts differ by an image only, at the same time: each gets the answer to its own.

A token of a simulated node follows from the images, their places and all tokens before it.
"""

from __future__ import annotations

import asyncio
import io
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import numpy as np
import pytest
from fleet import MODEL_NAME, Fleet
from image_chats import LETTERS, data_url, image_part
from image_checkpoints import CELL, make_image_checkpoint
from machine import patience
from PIL import Image
from stepper import Stepper

import runner
from pdserve.config.device import node_devices
from pdserve.config.node_config import NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolve import resolve
from pdserve.images import EncodedImage, ImageSpan, image_digest

SIMULATED = ("--engine", "simulated", "--block-size", "16", "--sim-speed", "20")
OUTPUT = 8  # tokens
AT_ONCE = 32  # requests


@dataclass
class Served:
    fleet: Fleet
    config: NodeConfig


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """Two nodes of each role; nodes D encode no images."""
    directory = make_image_checkpoint(tmp_path_factory.mktemp("sees") / "model", "qwen3_vl")
    options = NodeOptions(model=str(directory), engine="simulated", sim_speed=float("inf"))
    config = resolve(options, node_devices(options, 1)[0], {})
    with Fleet() as fleet:
        for _ in range(2):
            fleet.start_prefill(directory, SIMULATED)
        for _ in range(2):
            fleet.start_decode(directory, SIMULATED)
        fleet.start_router(directory, ["--policy", "prefix-aware"])
        fleet.wait_ready()
        fleet.wait_until(lambda: all(len(node.describe().connected_peers) == 2 for node in fleet.decode), 30.0)
        yield Served(fleet, config)


class Picture:
    """An image that the processor leaves as it is."""

    def __init__(self, rows: int, columns: int, seed: int) -> None:
        self.rows = rows
        self.columns = columns
        self.pixels = np.random.default_rng(seed).integers(0, 256, (rows * CELL, columns * CELL, 3), np.uint8)

    @property
    def url(self) -> str:
        file = io.BytesIO()
        Image.fromarray(self.pixels).save(file, "PNG")
        return data_url(file.getvalue())


def expected(config: NodeConfig, ids: list[int], picture: Picture) -> list[int]:
    """Return the tokens of the simulated runner alone."""
    accepted = config.image_input
    assert accepted is not None
    height, width, _ = picture.pixels.shape
    data = picture.pixels.tobytes()
    digest = image_digest(accepted.fingerprint, height, width, data)
    span = ImageSpan(ids.index(accepted.token_id), picture.rows, picture.columns, digest)
    assert ids.count(accepted.token_id) == span.num_tokens
    stepper = Stepper(runner.build(config, lambda stage, fraction: None))
    stepper.pixels[digest] = EncodedImage(digest, height, width, data)
    (running,) = stepper.generate([ids], OUTPUT, images=[(span,)])
    return running.output


@pytest.mark.parametrize(
    "pairs", [40, pytest.param(1000, marks=[pytest.mark.slow, pytest.mark.timeout(1200)])], ids=["few", "many"]
)
def test_users_with_images_of_equal_size_get_their_own_answers(served: Served, pairs: int) -> None:
    asyncio.run(check_pairs(served, pairs))
    for node in served.fleet.nodes:
        node.wait_idle()


async def check_pairs(served: Served, pairs: int) -> None:
    limits = httpx.Limits(max_connections=None)
    timeout = patience(120.0)
    async with httpx.AsyncClient(base_url=served.fleet.url, trust_env=False, timeout=timeout, limits=limits) as client:
        turns = asyncio.Semaphore(AT_ONCE // 2)
        await asyncio.gather(*(check_pair(served.config, client, turns, number) for number in range(pairs)))


async def check_pair(config: NodeConfig, client: httpx.AsyncClient, turns: asyncio.Semaphore, number: int) -> None:
    """Two users ask at once, with images of equal size; then one asks again."""
    rng = random.Random(number)
    rows = rng.randint(2, 5)
    columns = rng.randint(2, 5)
    pictures = [Picture(rows, columns, 2 * number + user) for user in range(2)]
    text = "".join(rng.choices(LETTERS, k=rng.randint(0, 40)))
    async with turns:
        answers = await asyncio.gather(*(ask(client, text, picture) for picture in pictures))
        again = await ask(client, text, pictures[1])
    tokens = [expected(config, answer["prompt_token_ids"], pic) for answer, pic in zip(answers, pictures, strict=True)]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
    assert tokens[0] != tokens[1]
    assert [answer["choices"][0]["token_ids"] for answer in (*answers, again)] == [*tokens, tokens[1]]


async def ask(client: httpx.AsyncClient, text: str, picture: Picture) -> dict[str, Any]:
    content = [{"type": "text", "text": text}, image_part(picture.url), {"type": "text", "text": "Which?"}]
    body = {"model": MODEL_NAME, "messages": [{"role": "user", "content": content}], "max_tokens": OUTPUT}
    body |= {"temperature": 0.0, "ignore_eos": True, "return_token_ids": True}
    response = await client.post("/v1/chat/completions", json=body)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer
