"""Embeddings, scores and rankings against sentence-transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from environment import PROGRAMS, Environment
from fleet import MODEL_NAME, start_fleet
from pooling_checkpoints import make_classifier, make_embedder, make_reranker

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

MODELS: dict[str, tuple[str, Callable[[Path], Path]]] = {
    "Embeddings": ("auto", make_embedder),
    "Classifier": ("auto", make_classifier),
    "RerankerWithTemplate": ("auto", partial(make_reranker, template=True)),
    "OriginalReranker": ("classify", partial(make_reranker, template=False)),
}


@pytest.mark.parametrize("kind", MODELS)
def test_answers_equal_those_of_sentence_transformers(tmp_path: Path, kind: str) -> None:
    environment = Environment("sentence-transformers")
    task, make = MODELS[kind]
    directory = make(tmp_path / "model")
    with start_fleet(directory, prefill=2, decode=0, prefill_flags=["--task", task, "--dtype", "float32"]) as fleet:
        variables = {"PDSERVE_URL": f"{fleet.url}/v1", "PDSERVE_MODEL": MODEL_NAME, "PDSERVE_MODEL_DIR": str(directory)}
        environment.run(["python", PROGRAMS / "sentence_transformers_pooling.py", kind], variables)
