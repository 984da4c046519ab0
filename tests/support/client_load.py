"""Randomized client load with known answers: each answer must equal the undisturbed fleet's."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
from answers import LOGPROB_TOLERANCE, Answer, ErrorAnswer, first_difference, send_completion
from fleet import MODEL_NAME

VOCABULARY = 4096  # size of the embedded tokenizer's vocabulary
LOGPROBS = {"logprobs": 2}
PENALTIES = {"presence_penalty": 0.7, "frequency_penalty": 0.2, "repetition_penalty": 1.2}
GRAMMARS = (
    {"structured_outputs": {"regex": "[a-z ]{10,200}"}},
    {"structured_outputs": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 5}}},
)
DISCONNECT_SHARE = 0.1  # share of the clients that disconnect before the end of the answer
#: An answer that is larger than all buffers between a node and its client.
UNBUFFERED = {"n": 4, "max_tokens": 400, "logprobs": 20, "stream": True, "ignore_eos": True}


def new_body(rng: random.Random, max_prompt: int, max_tokens: int) -> dict[str, Any]:
    """Return a random completion request: n, penalties, grammars, log-probabilities, streamed or not."""

    def new_prompt() -> list[int]:
        return rng.choices(range(3, VOCABULARY), k=rng.randint(1, max_prompt))

    body: dict[str, Any] = {
        "model": MODEL_NAME,
        "prompt": new_prompt() if rng.random() < 0.8 else [new_prompt(), new_prompt()],
        "max_tokens": rng.randint(max_tokens // 4, max_tokens),
        "temperature": rng.choice([0.0, 0.9]),
        "seed": rng.getrandbits(60),
        "n": rng.choice([1, 1, 3]),
        "stream": rng.random() < 0.7,
        "ignore_eos": rng.random() < 0.5,
    }
    for fields in (LOGPROBS, PENALTIES, rng.choice(GRAMMARS)):
        if rng.random() < 0.4:
            body |= fields
    return body


def new_unbuffered_body(rng: random.Random) -> dict[str, Any]:
    """Return a random request whose nodes must pause while its client does not read."""
    body = {"model": MODEL_NAME, "prompt": rng.choices(range(3, VOCABULARY), k=rng.randint(1, 300)), **UNBUFFERED}
    return body | {"temperature": 0.9, "seed": rng.getrandbits(60)} | (PENALTIES if rng.random() < 0.4 else {})


@dataclass
class Load:
    """Requests, their expected answers, and the outcomes of all requests sent so far.

    Clients of an answer with UNBUFFERED's log-probabilities read slowly: they pause up to three times. Each client
    thinks for ``think`` seconds on average before its next request.
    """

    bodies: list[dict[str, Any]]
    expected: list[Answer] = field(default_factory=list)
    versions: dict[str, list[Answer]] = field(default_factory=dict)  # expected answers by weights, if these change
    outcomes: Counter[str] = field(default_factory=Counter)
    in_flight: dict[str, int] = field(default_factory=dict)  # indices of requests by salt
    tokens: int = 0
    slowest: float = 0.0  # longest seconds of an answer, with pauses
    failures: list[str] = field(default_factory=list)  # errors and answers that differ from the expected one
    headers: dict[str, str] = field(default_factory=dict)  # headers of every request
    tolerance: float = LOGPROB_TOLERANCE
    think: float = 0.0

    async def record_expected(self, url: str, rng: random.Random) -> None:
        """Send every request and keep its answer. Some requests get a stop string from the middle of their answer."""
        async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False, headers=self.headers) as client:
            first = await asyncio.gather(*(send_completion(client, body) for body in self.bodies))
            for body, answer in zip(self.bodies, first, strict=True):
                text = answer.choices[0].text
                if rng.random() < 0.4 and len(text) > 20:
                    middle = len(text) // 2
                    body["stop"] = text[middle : middle + 4]
            self.expected = list(await asyncio.gather(*(send_completion(client, body) for body in self.bodies)))

    async def record_version(self, url: str) -> None:
        """Keep the answers of a fleet with other weights, after ``record_expected``."""
        self.versions.setdefault(self.expected[0].weights, self.expected)
        async with httpx.AsyncClient(base_url=url, timeout=60.0, trust_env=False, headers=self.headers) as client:
            answers = list(await asyncio.gather(*(send_completion(client, body) for body in self.bodies)))
        (weights,) = {answer.weights for answer in answers}
        self.versions[weights] = answers

    async def run(self, url: str, clients: int, seconds: float, seed: int) -> None:
        """Run ``clients`` clients for ``seconds``, each with one request at a time."""
        end = time.monotonic() + seconds
        limits = httpx.Limits(max_connections=2 * clients)
        options: dict[str, Any] = {"timeout": 120.0, "trust_env": False, "limits": limits, "headers": self.headers}
        async with httpx.AsyncClient(base_url=url, **options) as client:
            await self.run_until(lambda: time.monotonic() > end, client, clients, seed)

    async def run_until(self, is_over: Callable[[], bool], client: httpx.AsyncClient, clients: int, seed: int) -> None:
        """Run clients over one HTTP client until ``is_over``, then wait for the requests in flight."""
        await asyncio.gather(*(self._run_client(client, random.Random(seed + i), is_over) for i in range(clients)))

    async def _run_client(self, client: httpx.AsyncClient, rng: random.Random, is_over: Callable[[], bool]) -> None:
        while not is_over():
            await asyncio.sleep(rng.uniform(0, 2 * self.think))
            index = rng.randrange(len(self.bodies))
            disconnects = rng.random() < DISCONNECT_SHARE
            salt = str(rng.getrandbits(60))
            body = {**self.bodies[index], "cache_salt": salt}  # avoids the prefix cache
            disconnect_after = rng.randint(1, 20) if disconnects and body["stream"] else float("inf")
            slow = body.get("logprobs") == UNBUFFERED["logprobs"]
            pauses = sorted((rng.randint(1, 1600), rng.uniform(0.2, 4.0)) for _ in range(rng.randint(1, 3) * slow))
            self.in_flight[salt] = index
            began = time.monotonic()
            try:
                answer = await send_completion(client, body, disconnect_after, pauses)
            except (ErrorAnswer, httpx.HTTPError, AssertionError) as exc:
                self._add("error", 0, f"request {index}: {type(exc).__name__}: {exc}")
                continue
            finally:
                del self.in_flight[salt]
            expected = self.versions.get(answer.weights, self.expected)[index]
            self.slowest = max(self.slowest, time.monotonic() - began)
            if answer.num_tokens >= disconnect_after:
                self._add("left", answer.num_tokens)
            elif answer.matches(expected, self.tolerance):
                self._add("exact", answer.num_tokens)
            else:
                difference = first_difference(answer, expected)
                self._add("different", answer.num_tokens, f"request {index}: {difference}")

    def _add(self, outcome: str, num_tokens: int, failure: str = "") -> None:
        self.outcomes[outcome] += 1
        self.tokens += num_tokens
        if failure:
            self.failures.append(failure)
