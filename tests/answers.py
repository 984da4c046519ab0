"""Completions as a client has them in the end, however they came: compared with what an undisturbed fleet said."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx

LOGPROB_TOLERANCE = 1e-3  # the same tokens computed in batches of other sizes


class ErrorAnswer(Exception):
    """A client was told of an error."""


@dataclass
class Said:
    """Of one choice."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    tokens: list[str] = field(default_factory=list)  # these three where log-probabilities were asked for
    offsets: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def add(self, choice: dict[str, Any]) -> None:
        """A chunk's part of it, or all."""
        assert not self.finish_reason, "a chunk came after the end of its choice"
        self.token_ids += choice.get("token_ids") or []
        self.text += choice["text"]
        self.finish_reason = choice["finish_reason"] or ""
        if logprobs := choice["logprobs"]:
            self.tokens += logprobs["tokens"]
            self.offsets += logprobs["text_offset"]
            self.logprobs += logprobs["token_logprobs"]

    def same_as(self, other: Said) -> bool:
        mine, theirs = (
            (said.token_ids, said.text, said.finish_reason, said.tokens, said.offsets, len(said.logprobs))
            for said in (self, other)
        )
        pairs = zip(self.logprobs, other.logprobs, strict=False)
        return mine == theirs and all(abs(a - b) < LOGPROB_TOLERANCE for a, b in pairs)


@dataclass
class Answer:
    """Of one request, with its choices by index."""

    choices: dict[int, Said] = field(default_factory=dict)
    prompt_tokens: int = 0
    completion_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(said.token_ids) for said in self.choices.values())

    def add(self, event: dict[str, Any]) -> None:
        """A chunk or a body. Raises ErrorAnswer."""
        if "error" in event:
            raise ErrorAnswer(event["error"]["message"])
        for choice in event["choices"]:
            self.choices.setdefault(choice["index"], Said()).add(choice)
        if usage := event.get("usage"):
            self.prompt_tokens, self.completion_tokens = usage["prompt_tokens"], usage["completion_tokens"]

    def same_as(self, other: Answer) -> bool:
        """Token for token, text for text; prompt tokens are counted once, and so is each output token."""
        return (
            self.choices.keys() == other.choices.keys()
            and all(said.same_as(other.choices[index]) for index, said in self.choices.items())
            and (self.prompt_tokens, self.completion_tokens) == (other.prompt_tokens, other.completion_tokens)
        )


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """As events are delimited: httpx's own would also end a line at U+2028 and its like, which outputs may hold."""
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


async def ask(client: httpx.AsyncClient, body: dict[str, Any], leave_after: float = float("inf")) -> Answer:
    """The answer to a completion; a streamed one is left after so many tokens. Raises ErrorAnswer."""
    answer = Answer()
    if not body.get("stream"):
        response = await client.post("/v1/completions", json={**body, "return_token_ids": True})
        answer.add(response.json())
        return answer
    body = {**body, "return_token_ids": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        if response.status_code != 200:
            answer.add(json.loads(await response.aread()))
        async for line in lines_of(response):
            if line.startswith("data: {"):
                answer.add(json.loads(line.removeprefix("data: ")))
            if answer.num_tokens >= leave_after:
                return answer
    assert line == "data: [DONE]" or not line, line
    return answer
