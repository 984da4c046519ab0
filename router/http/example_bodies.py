"""A small request of each kind of body, for the OpenAPI document. A router with one model needs no ``model``."""

from __future__ import annotations

from typing import Any

from router.completions_api.request_bodies import ChatBody, CompletionBody
from router.http.endpoints.adapter_endpoints import LoadAdapterBody, UnloadAdapterBody
from router.http.endpoints.small_endpoints import DetokenizeBody, TokenizeBody
from router.messages_api.request import CountTokensRequest, MessagesRequest
from router.pooling.request_bodies import EmbeddingBody, RerankBody, ScoreBody
from router.responses_api.request import CompactRequest, ResponsesRequest

_ASKED = [{"role": "user", "content": "Name three rivers."}]

EXAMPLE_BODIES: dict[type, dict[str, Any]] = {
    CompletionBody: {"prompt": "Three rivers are", "max_tokens": 32},
    ChatBody: {"messages": _ASKED, "max_tokens": 200},
    ResponsesRequest: {"input": "Name three rivers.", "max_output_tokens": 200},
    CompactRequest: {
        "model": "MODEL",
        "input": [*_ASKED, {"role": "assistant", "content": "The Nile, the Rhine and the Indus."}],
    },
    MessagesRequest: {"messages": _ASKED, "max_tokens": 200},
    CountTokensRequest: {"messages": _ASKED},
    EmbeddingBody: {"input": ["a river", "a bridge"]},
    ScoreBody: {"text_1": "capital of France", "text_2": ["Paris", "a river"]},
    RerankBody: {"query": "capital of France", "documents": ["Paris", "a river"]},
    LoadAdapterBody: {"lora_name": "sql", "lora_path": "sql-v2"},
    UnloadAdapterBody: {"lora_name": "sql"},
    TokenizeBody: {"prompt": "Three rivers are"},
    DetokenizeBody: {"tokens": [72, 101, 108]},
}
