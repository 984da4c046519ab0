"""Request bodies of /v1/embeddings (OpenAI), /v1/score (vLLM) and /v1/rerank (Jina, Cohere)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from pdserve.errors import RequestError
from pdserve.ranges import within
from router.completions_api.body_parsing import convert, parse_json
from router.text.prompt import pack_prompts

MAX_INPUTS = 2048  # OpenAI's limit of texts in a request


class PoolingBody(msgspec.Struct, kw_only=True, frozen=True):
    """Fields of all pooling endpoints."""

    model: str | None = None
    user: str | None = None
    cache_salt: str = ""
    priority: Annotated[int, Meta(description="Lower values run earlier.")] = 0


class EmbeddingBody(PoolingBody, kw_only=True, frozen=True):
    input: str | list[str | int | list[int]]
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: int | None = None
    add_special_tokens: bool = True
    truncate_prompt_tokens: Annotated[
        int | None, Meta(description="Keep so many tokens of a text; -1: as many as fit.")
    ] = None

    def pack_inputs(self) -> list[str | bytes]:
        """The inputs one by one: texts, or packed token ids. Raises RequestError for a mixture."""
        return pack_prompts(self.input, "input")


class PairBody(PoolingBody, kw_only=True, frozen=True):
    """Pairs of a query and a document."""

    max_tokens_per_doc: Annotated[
        int | None, Meta(description="Keep so many tokens of a document, its first ones.")
    ] = None
    instruction: Annotated[str | None, Meta(description="For a reranker whose template has one.")] = None

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        """Queries and documents; a single query belongs to all documents."""
        raise NotImplementedError


class ScoreBody(PairBody, kw_only=True, frozen=True):
    """``queries`` and ``documents`` are vLLM's newer names of ``text_1`` and ``text_2``."""

    text_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    queries: str | list[str] | None = None
    documents: str | list[str] | None = None

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        return _texts(self, "text_1", "queries"), _texts(self, "text_2", "documents")


class TextDocument(msgspec.Struct, frozen=True):
    text: str


class RerankBody(PairBody, kw_only=True, frozen=True):
    query: str
    documents: list[str | TextDocument]
    top_n: Annotated[int | None, Meta(description="Default and 0: all.")] = None
    return_documents: bool = True

    @property
    def pairs(self) -> tuple[list[str], list[str]]:
        return [self.query], self.texts

    @property
    def texts(self) -> list[str]:
        return [document if isinstance(document, str) else document.text for document in self.documents]


def parse_embeddings(data: bytes) -> EmbeddingBody:
    body = convert(parse_json(data), EmbeddingBody, token_ids=("input",))
    _check(body, "input", len(body.input) if isinstance(body.input, list) and not _is_one(body.input) else 1)
    if body.dimensions is not None:
        within("dimensions", body.dimensions, 1, 2**31 - 1)
    if body.truncate_prompt_tokens is not None and body.truncate_prompt_tokens != -1:
        within("truncate_prompt_tokens", body.truncate_prompt_tokens, 1, 2**31 - 1)
    return body


def _is_one(given: Sequence[str | int | list[int]]) -> bool:
    """Whether a list is the token ids of one input."""
    return bool(given) and isinstance(given[0], int)


def parse_score(data: bytes) -> ScoreBody:
    body = convert(parse_json(data), ScoreBody)
    _check_pairs(body)
    return body


def parse_rerank(data: bytes) -> RerankBody:
    body = convert(parse_json(data), RerankBody)
    _check_pairs(body)
    if body.top_n is not None:
        within("top_n", body.top_n, 0, 2**31 - 1)
    return body


def _check_pairs(body: PairBody) -> None:
    queries, documents = body.pairs
    if body.max_tokens_per_doc is not None:
        within("max_tokens_per_doc", body.max_tokens_per_doc, 1, 2**31 - 1)
    _check(body, "documents", max(len(queries), len(documents)))
    if not documents:
        raise RequestError("documents is empty; give at least one text", "documents")
    if len(queries) not in (1, len(documents)):
        text = f"{len(queries)} queries for {len(documents)} documents; give one query, or as many as documents"
        raise RequestError(text, "queries")


def _check(body: PoolingBody, field: str, num_inputs: int) -> None:
    within("priority", body.priority, -(2**31), 2**31 - 1)
    if num_inputs > MAX_INPUTS:
        raise RequestError(f"{field} has {num_inputs} texts; the limit is {MAX_INPUTS}, send fewer", field)


def _texts(body: ScoreBody, first: str, second: str) -> list[str]:
    given = [value for name in (first, second) if (value := getattr(body, name)) is not None]
    if len(given) != 1:
        raise RequestError(f"give either {first} or {second}", second if given else first)
    return [given[0]] if isinstance(given[0], str) else given[0]
