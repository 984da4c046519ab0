"""Completions and chats as a client received them, streamed or not; their comparison with an undisturbed fleet's."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import httpx

NO_PAUSE = (float("inf"), 0.0)
LOGPROB_TOLERANCE = 1e-3  # largest difference for equal tokens in batches of other sizes


class ErrorAnswer(Exception):
    """The client received an error."""


@dataclass
class ChoiceAnswer:
    """One choice of an answer."""

    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    finish_reason: str = ""
    tokens: list[str] = field(default_factory=list)  # this and the next two: only for requests with log-probabilities
    offsets: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)  # None: the first token of an echoed prompt
    best: list[list[float]] = field(default_factory=list)  # log-probabilities of the best tokens at each position
    stop_reason: str | int | None = None

    def add(self, choice: dict[str, Any]) -> None:
        """Append a chunk of the choice, or the whole choice."""
        assert not self.finish_reason, "a chunk came after the end of its choice"
        self.token_ids += choice.get("token_ids") or []
        message = choice.get("delta") or choice.get("message") or {}  # a chat has one of them
        self.text += choice["text"] if "text" in choice else message.get("content") or ""
        self.finish_reason = choice["finish_reason"] or ""
        self.stop_reason = choice.get("stop_reason")
        logprobs = choice["logprobs"] or {}
        if "content" in logprobs:
            self._add_chat_logprobs(logprobs["content"])
        elif logprobs:
            self.tokens += logprobs["tokens"]
            self.offsets += logprobs["text_offset"]
            self.logprobs += logprobs["token_logprobs"]
            self.best += [sorted((best or {}).values()) for best in logprobs["top_logprobs"] or ()]
        self.add_prompt_logprobs(choice)

    def add_prompt_logprobs(self, fields: dict[str, Any]) -> None:
        for position in fields.get("prompt_logprobs") or ():
            self.best.append(sorted(candidate["logprob"] for candidate in (position or {}).values()))

    def _add_chat_logprobs(self, content: Sequence[dict[str, Any]]) -> None:
        for token in content:
            self.tokens.append(token["token"])
            self.logprobs.append(token["logprob"])
            self.best.append(sorted(best["logprob"] for best in token["top_logprobs"]))

    def matches(self, other: ChoiceAnswer, tolerance: float = LOGPROB_TOLERANCE) -> bool:
        mine, theirs = (
            (answer.token_ids, answer.text, answer.finish_reason, answer.stop_reason, answer.tokens, answer.offsets)
            for answer in (self, other)
        )
        return mine == theirs and self.logprob_error(other) < tolerance

    def logprob_error(self, other: ChoiceAnswer) -> float:
        """Return the largest difference of two log-probabilities at the same place; infinity if one has more.

        The best tokens at a position are compared without their names: tokens of almost equal logits may swap places.
        """
        mine: list[Sequence[float | None]] = [self.logprobs, *self.best]
        theirs: list[Sequence[float | None]] = [other.logprobs, *other.best]
        if list(map(len, mine)) != list(map(len, theirs)):
            return float("inf")
        pairs = zip(chain.from_iterable(mine), chain.from_iterable(theirs), strict=True)
        return max((_distance(a, b) for a, b in pairs), default=0.0)


def _distance(a: float | None, b: float | None) -> float:
    if a is None or b is None:
        return 0.0 if a is b else float("inf")
    return abs(a - b)


@dataclass
class Answer:
    """The answer to one request, with its choices by index."""

    choices: dict[int, ChoiceAnswer] = field(default_factory=dict)
    weights: str = ""  # weight version that the answer names
    prompt_tokens: int = 0
    image_tokens: int = 0  # prompt tokens of images
    completion_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(len(choice.token_ids) for choice in self.choices.values())

    def add(self, event: dict[str, Any]) -> None:
        """Append a chunk, or a whole response body. Raises ErrorAnswer."""
        if "error" in event:
            raise ErrorAnswer(event["error"]["message"])
        weights = event["system_fingerprint"] or ""
        assert self.weights in ("", weights), f"the answer names {self.weights}, then {weights}"
        self.weights = weights
        for choice in event["choices"]:
            self.choices.setdefault(choice["index"], ChoiceAnswer()).add(choice)
        if event.get("prompt_logprobs"):  # a chat has them beside its choices
            self.choices[0].add_prompt_logprobs(event)
        if usage := event.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.image_tokens = usage["prompt_tokens_details"].get("image_tokens", 0)
            self.completion_tokens = usage["completion_tokens"]

    def matches(self, other: Answer, tolerance: float = LOGPROB_TOLERANCE) -> bool:
        """Return whether all choices and token counts are equal; log-probabilities within ``tolerance``."""
        mine, theirs = (
            (answer.prompt_tokens, answer.image_tokens, answer.completion_tokens) for answer in (self, other)
        )
        return (
            self.choices.keys() == other.choices.keys()
            and all(choice.matches(other.choices[index], tolerance) for index, choice in self.choices.items())
            and mine == theirs
        )


def first_difference(answer: Answer, expected: Answer) -> str:
    """Say where two answers that do not match begin to differ."""
    for index, choice in sorted(expected.choices.items()):
        other = answer.choices.get(index, ChoiceAnswer())
        if choice.token_ids != other.token_ids:
            both = zip(other.token_ids, choice.token_ids, strict=False)
            at = next(
                (at for at, (a, b) in enumerate(both) if a != b), min(len(other.token_ids), len(choice.token_ids))
            )
            tokens = f"{other.token_ids[at : at + 5]} instead of {choice.token_ids[at : at + 5]}"
            return f"choice {index} differs from token {at} of {len(choice.token_ids)} on: {tokens}"
    return f"{answer} instead of {expected}"


async def sse_lines(response: httpx.Response) -> AsyncIterator[str]:
    r"""Yield the lines of a server-sent event stream, split at \n only.

    httpx's aiter_lines also splits at U+2028 and other separators, which outputs may contain.
    """
    rest = b""
    async for data in response.aiter_bytes():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield line.decode()


async def send_completion(
    client: httpx.AsyncClient,
    body: dict[str, Any],
    disconnect_after: float = float("inf"),
    pauses: Iterable[tuple[int, float]] = (),
) -> Answer:
    """Send a request and return its answer: a chat if it has messages, else a completion. Raises ErrorAnswer.

    The client of a streamed answer disconnects after ``disconnect_after`` tokens. ``pauses`` are numbers of tokens,
    ascending, each with the seconds in which it then reads nothing.
    """
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    remaining = iter(pauses)
    pause_at, seconds = next(remaining, NO_PAUSE)
    answer = Answer()
    if not body.get("stream"):
        response = await client.post(path, json={**body, "return_token_ids": True})
        answer.add(response.json())
        return answer
    body = {**body, "return_token_ids": True, "stream_options": {"include_usage": True}}
    async with client.stream("POST", path, json=body) as response:
        if response.status_code != 200:
            answer.add(json.loads(await response.aread()))
        async for line in sse_lines(response):
            if line.startswith("data: {"):
                answer.add(json.loads(line.removeprefix("data: ")))
            if answer.num_tokens >= disconnect_after:
                return answer
            while answer.num_tokens >= pause_at:
                await asyncio.sleep(seconds)
                pause_at, seconds = next(remaining, NO_PAUSE)
    assert line == "data: [DONE]" or not line, line
    return answer
