"""From vectors to response objects."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from pdserve.errors import RequestError
from router.fleet.policy import EMBED
from router.generation.usage import Usage
from router.pooling.request_bodies import EmbeddingBody, PairBody, PoolingBody, RerankBody
from router.pooling.response_objects import (
    EmbeddingList,
    PoolingUsage,
    RankedDocument,
    RankedResult,
    Ranking,
    Score,
    ScoreList,
    embeddings,
)

Vectors = Sequence[bytes]  # little-endian float32


class AnswerFields(msgspec.Struct, frozen=True):
    model: str
    request_id: str
    created: int
    task: str
    weights: str


def make_answer(body: PoolingBody, vectors: Vectors, usage: Usage, fields: AnswerFields) -> msgspec.Struct:
    """Return the response object. Raises RequestError for scores of a classifier with several labels."""
    counts, id, weights = PoolingUsage.of(usage), fields.request_id, f"fp_{fields.weights}" if fields.weights else None
    if isinstance(body, EmbeddingBody):
        data = embeddings(vectors, body.encoding_format)
        return EmbeddingList(f"embd-{id}", fields.created, fields.model, data, counts, weights)
    assert isinstance(body, PairBody)
    scores = _scores(body, vectors, fields.task)
    if isinstance(body, RerankBody):
        return Ranking(f"rerank-{id}", fields.model, _ranked(body, scores), counts, weights)
    scored = [Score(index, score) for index, score in enumerate(scores)]
    return ScoreList(f"score-{id}", fields.created, fields.model, scored, counts, weights)


def _scores(body: PairBody, vectors: Vectors, task: str) -> list[float]:
    """A score per document: the model's, or the cosine similarity of embeddings."""
    values = np.stack([np.frombuffer(vector, "<f4") for vector in vectors]).astype(np.float64)
    if task == EMBED:
        values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
        num_queries = len(body.pairs[0])
        found: list[float] = (values[:num_queries] * values[num_queries:]).sum(axis=1).tolist()
        return found
    if values.shape[1] != 1:
        raise RequestError(f"the model has {values.shape[1]} labels; a score needs one: use another model", "model")
    return [score for (score,) in values.tolist()]


def _ranked(body: RerankBody, scores: Sequence[float]) -> list[RankedResult]:
    """The ``top_n`` documents, the best first, equal ones in the order of the request."""
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n or None]
    results = [RankedResult(index, scores[index]) for index in best]
    if body.return_documents:
        texts = body.texts
        for result in results:
            result.document = RankedDocument(texts[result.index])
    return results
