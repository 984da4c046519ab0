"""From vectors to response objects."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from pdserve.errors import RequestError
from router.fleet.policy import EMBED
from router.generation.usage import Usage
from router.pooling.request_bodies import EmbeddingBody, PairBody, RerankBody, ScoreBody
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
    weights: str  # empty: unknown

    @property
    def fingerprint(self) -> str | None:
        return f"fp_{self.weights}" if self.weights else None


def embedding_list(body: EmbeddingBody, vectors: Vectors, usage: Usage, fields: AnswerFields) -> EmbeddingList:
    return EmbeddingList(
        id=f"embd-{fields.request_id}",
        created=fields.created,
        model=fields.model,
        data=embeddings(vectors, body.encoding_format),
        usage=PoolingUsage.of(usage),
        system_fingerprint=fields.fingerprint,
    )


def score_list(body: ScoreBody, vectors: Vectors, usage: Usage, fields: AnswerFields) -> ScoreList:
    """Raises RequestError for scores of a classifier with several labels."""
    scores = _scores(body, vectors, fields.task)
    return ScoreList(
        id=f"score-{fields.request_id}",
        created=fields.created,
        model=fields.model,
        data=[Score(index, score) for index, score in enumerate(scores)],
        usage=PoolingUsage.of(usage),
        system_fingerprint=fields.fingerprint,
    )


def ranking(body: RerankBody, vectors: Vectors, usage: Usage, fields: AnswerFields) -> Ranking:
    """Raises RequestError for scores of a classifier with several labels."""
    return Ranking(
        id=f"rerank-{fields.request_id}",
        model=fields.model,
        results=_ranked(body, _scores(body, vectors, fields.task)),
        usage=PoolingUsage.of(usage),
        system_fingerprint=fields.fingerprint,
    )


def _scores(body: PairBody, vectors: Vectors, task: str) -> list[float]:
    """A score per document: the model's, or the cosine similarity of embeddings."""
    values = np.stack([np.frombuffer(vector, "<f4") for vector in vectors]).astype(np.float64)
    if task == EMBED:
        values /= np.maximum(np.linalg.norm(values, axis=1, keepdims=True), 1e-12)
        num_queries = len(body.pairs[0])
        similarities: list[float] = (values[:num_queries] * values[num_queries:]).sum(axis=1).tolist()
        return similarities
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
