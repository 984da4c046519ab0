"""Embeddings through a router and real prefill nodes, against plain transformers."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from fleet import Fleet, start_fleet
from pooling_checkpoints import make_embedder

from router.text.tokenizer import Tokenizer

TEXTS = ["", "a", "naïve café", *(f"number {index}, " * (index % 9) + "and the quick brown fox" for index in range(97))]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_embedder(tmp_path_factory.mktemp("models") / "embedder")


@pytest.fixture(scope="module")
def fleet(embedder: Path) -> Iterator[Fleet]:
    with start_fleet(embedder, prefill=2, decode=0) as fleet:
        yield fleet


@pytest.fixture(scope="module")
def expected(embedder: Path) -> list[list[float]]:
    model: Any = transformers.AutoModel.from_pretrained(embedder, dtype=torch.float32)
    tokenizer = Tokenizer.load(embedder)
    with torch.no_grad():
        states = [model(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0, -1] for text in TEXTS]
        vectors: list[list[float]] = torch.nn.functional.normalize(torch.stack(states), dim=-1).tolist()
    return vectors


def embed(fleet: Fleet, texts: Sequence[str], **fields: Any) -> list[list[float]]:
    return [entry["embedding"] for entry in fleet.post("/v1/embeddings", {"input": list(texts), **fields})["data"]]


def test_vectors_are_those_of_the_model(fleet: Fleet, expected: list[list[float]]) -> None:
    assert np.abs(np.array(embed(fleet, TEXTS)) - expected).max() < 1e-5
    assert np.abs(np.array(embed(fleet, TEXTS[:3])) - expected[:3]).max() < 1e-5  # cached, in another batch


def test_killed_prefill_node_leaves_exact_vectors(fleet: Fleet, expected: list[list[float]]) -> None:
    killed = threading.Event()

    def answers(client: int) -> list[list[list[float]]]:
        """Send the texts again and again, under salts of their own, until the last answer comes after the kill."""
        vectors: list[list[list[float]]] = []
        last = False
        while not last:
            last = killed.is_set()
            vectors.append(embed(fleet, TEXTS, cache_salt=f"{client} {len(vectors)}"))
        return vectors

    with ThreadPoolExecutor() as pool:
        clients = [pool.submit(answers, client) for client in range(3)]
        try:
            fleet.wait_until(lambda: fleet.prefill[1].status().running > 0, 20)
            fleet.prefill[1].kill()
        finally:
            killed.set()
        vectors = [answer for client in clients for answer in client.result()]
    assert np.abs(np.array(vectors) - expected).max() < 1e-5
