"""/v1/embeddings (OpenAI), /v1/score (vLLM) and /v1/rerank (Jina, Cohere): their differences."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import msgspec

from router.dialect.dialect import BodyT, Dialect
from router.dialect.operation import COMPUTES, Operation
from router.fleet.fleet import ModelLimits
from router.fleet.policy import EMBED, POOLING
from router.generation.usage import Usage
from router.pooling.answers import AnswerFields, Vectors, embedding_list, ranking, score_list
from router.pooling.prompts import embedding_prompts, pair_prompts
from router.pooling.request_bodies import (
    EmbeddingBody,
    RerankBody,
    ScoreBody,
    parse_embeddings,
    parse_rerank,
    parse_score,
)
from router.pooling.response_objects import EmbeddingList, Ranking, ScoreList
from router.text.prompt import Prompt
from router.text.prompt_encoder import PromptEncoder


class PoolingDialect(Dialect[BodyT]):
    """A protocol whose answers are made of vectors."""

    tasks: ClassVar[Sequence[str]]  # node tasks that can serve it

    @abstractmethod
    async def prompts(self, body: BodyT, encoder: PromptEncoder, limits: ModelLimits) -> list[Prompt]:
        """Return a prompt per vector. Raises RequestError."""

    def dimensions(self, body: BodyT) -> int:
        """Values of each vector that the client wants; 0: all."""
        return 0

    @abstractmethod
    def answer(self, body: BodyT, vectors: Vectors, usage: Usage, fields: AnswerFields) -> msgspec.Struct:
        """Return the response object. Called on a thread. Raises RequestError."""


class EmbeddingsDialect(PoolingDialect[EmbeddingBody]):
    name = "embeddings"
    trace_name = "embeddings"
    paths = ("/v1/embeddings",)
    operation = Operation(summary="Embed texts", response=EmbeddingList, statuses=COMPUTES, body=EmbeddingBody)
    tasks = (EMBED,)

    def parse(self, data: bytes) -> EmbeddingBody:
        return parse_embeddings(data)

    async def prompts(self, body: EmbeddingBody, encoder: PromptEncoder, limits: ModelLimits) -> list[Prompt]:
        return await embedding_prompts(body, encoder, limits)

    def dimensions(self, body: EmbeddingBody) -> int:
        return body.dimensions or 0

    def answer(self, body: EmbeddingBody, vectors: Vectors, usage: Usage, fields: AnswerFields) -> EmbeddingList:
        return embedding_list(body, vectors, usage, fields=fields)


class ScoreDialect(PoolingDialect[ScoreBody]):
    name = "score"
    trace_name = "score"
    paths = ("/v1/score", "/score")
    operation = Operation(summary="Score pairs of texts", response=ScoreList, statuses=COMPUTES, body=ScoreBody)
    tasks = POOLING

    def parse(self, data: bytes) -> ScoreBody:
        return parse_score(data)

    async def prompts(self, body: ScoreBody, encoder: PromptEncoder, limits: ModelLimits) -> list[Prompt]:
        return await pair_prompts(body, encoder, limits)

    def answer(self, body: ScoreBody, vectors: Vectors, usage: Usage, fields: AnswerFields) -> ScoreList:
        return score_list(body, vectors, usage, fields=fields)


class RerankDialect(PoolingDialect[RerankBody]):
    name = "rerank"
    trace_name = "rerank"
    paths = ("/v1/rerank", "/v2/rerank", "/rerank")
    operation = Operation(
        summary="Rank documents by their relevance to a query",
        response=Ranking,
        statuses=COMPUTES,
        body=RerankBody,
    )
    tasks = POOLING

    def parse(self, data: bytes) -> RerankBody:
        return parse_rerank(data)

    async def prompts(self, body: RerankBody, encoder: PromptEncoder, limits: ModelLimits) -> list[Prompt]:
        return await pair_prompts(body, encoder, limits)

    def answer(self, body: RerankBody, vectors: Vectors, usage: Usage, fields: AnswerFields) -> Ranking:
        return ranking(body, vectors, usage, fields=fields)
