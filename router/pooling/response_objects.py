"""Response objects of the pooling endpoints, for encoding and for the OpenAPI document."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import UNSET, Struct, UnsetType

from router.completions_api.response_objects import PromptTokensDetails
from router.dialect.json_pieces import lazy_list
from router.generation.usage import Usage


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails

    @classmethod
    def of(cls, usage: Usage) -> PoolingUsage:
        return cls(usage.prompt_tokens, usage.prompt_tokens, PromptTokensDetails(usage.cached_tokens))


class Embedding(Struct):
    index: int
    embedding: list[float] | str  # base64 of little-endian float32
    object: Literal["embedding"] = "embedding"


class EmbeddingList(Struct):
    id: str
    created: int
    model: str
    data: list[Embedding]
    usage: PoolingUsage
    system_fingerprint: str | None  # version of the weights; None: unknown
    object: Literal["list"] = "list"


class Score(Struct):
    index: int
    score: float
    object: Literal["score"] = "score"


class ScoreList(Struct):
    id: str
    created: int
    model: str
    data: list[Score]
    usage: PoolingUsage
    system_fingerprint: str | None  # version of the weights; None: unknown
    object: Literal["list"] = "list"


class RankedDocument(Struct):
    text: str


class RankedResult(Struct):
    index: int  # index of the document in the request
    relevance_score: float
    document: RankedDocument | UnsetType = UNSET


class Ranking(Struct):
    id: str
    model: str
    results: list[RankedResult]  # the best first
    usage: PoolingUsage
    system_fingerprint: str | None  # version of the weights; None: unknown


def embeddings(vectors: Sequence[bytes], encoding_format: str) -> list[Embedding]:
    """Embeddings of little-endian float32 vectors, encoded one by one."""

    def encoded(vector: bytes) -> list[float] | str:
        if encoding_format == "base64":
            return base64.b64encode(vector).decode()
        values: list[float] = np.frombuffer(vector, "<f4").tolist()
        return values

    return lazy_list(lambda: ([Embedding(index, encoded(vector))] for index, vector in enumerate(vectors)))
