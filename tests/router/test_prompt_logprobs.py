"""Log-probabilities of prompts over HTTP, as evaluation harnesses and clients of vLLM ask for them."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from checkpoints import reference_model
from fleet import Fleet
from machine import patience

from router.text.tokenizer import Tokenizer

VOCABULARY = 512
STEP = 32  # tokens; longer prompts take several steps


@pytest.fixture(scope="module")
def client(small_fleet: Fleet) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small_fleet.url, timeout=patience(60)) as client:
        yield client


@pytest.fixture(scope="module")
def expected(small_model: Path) -> Any:
    """Log-probabilities [tokens - 1, vocabulary] of what follows each token of a prompt but the last."""
    model = reference_model(small_model)

    @torch.no_grad()
    def expected(token_ids: list[int]) -> torch.Tensor:
        logits: torch.Tensor = model(torch.tensor([token_ids])).logits
        return logits[0, :-1].log_softmax(-1)

    return expected


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Tokenizer:
    return Tokenizer.load(small_model)


def prompt_of(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(3, 300), k=length)


def post(client: httpx.Client, path: str = "/v1/completions", **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"temperature": 0, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    fields: dict[str, Any] = answer.json()
    return fields


def own(expected: Any, token_ids: list[int]) -> list[float]:
    values: list[float] = expected(token_ids).gather(1, torch.tensor(token_ids[1:])[:, None])[:, 0].tolist()
    return values


@pytest.mark.parametrize("max_tokens", [0, 1])
def test_harness_request_returns_scored_prompt(client: httpx.Client, expected: Any, max_tokens: int) -> None:
    """As lm-evaluation-harness does: several prompts as token ids, echo, logprobs 1, and one token or none."""
    prompts = [prompt_of(length, length) for length in (1, 5, 3 * STEP + 7)]
    fields: dict[str, Any] = {"prompt": prompts, "max_tokens": max_tokens, "logprobs": 1, "echo": True, "seed": 1234}
    answer = post(client, **fields)
    assert answer["usage"]["completion_tokens"] == max_tokens * len(prompts)
    for prompt, choice in zip(prompts, answer["choices"], strict=True):
        logprobs = choice["logprobs"]
        assert {len(values) for values in logprobs.values()} == {len(prompt) + max_tokens}
        first, *others = logprobs["token_logprobs"][: len(prompt)]
        assert first is None
        assert others == pytest.approx(own(expected, prompt), abs=1e-4)
        assert logprobs["top_logprobs"][0] is None
        best = expected(prompt).amax(-1).tolist()
        tops = logprobs["top_logprobs"][1 : len(prompt)]
        assert [max(top.values()) for top in tops] == pytest.approx(best, abs=1e-4)
        assert all(value in top.values() for value, top in zip(others, tops, strict=True))
        assert choice["finish_reason"] == "length"
    for before, again in zip(answer["choices"], post(client, **fields)["choices"], strict=True):  # all is cached now
        values = before["logprobs"]["token_logprobs"]
        assert again["logprobs"]["token_logprobs"][1:] == pytest.approx(values[1:], abs=1e-4)


def test_echoed_texts_have_offsets(client: httpx.Client, tokenizer: Tokenizer) -> None:
    text = "The quick brown \N{SNOWMAN} fox"
    for prompt in (text, tokenizer.encode(text)):
        choice = post(client, prompt=prompt, max_tokens=4, logprobs=0, echo=True)["choices"][0]
        logprobs = choice["logprobs"]
        assert choice["text"].startswith(text)
        assert logprobs["top_logprobs"][0] is None
        assert all(len(top) == 1 for top in logprobs["top_logprobs"][1:]), "each token's own entry"
        offsets = logprobs["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[len(tokenizer.encode(text))] == len(text)
        for token, at in zip(logprobs["tokens"], offsets, strict=True):
            assert token.startswith("bytes:") or choice["text"][at:].startswith(token)
    plain = post(client, prompt=text, max_tokens=4)["choices"][0]["text"]
    assert choice["text"] == text + plain


def test_echo_has_the_special_tokens_of_token_ids(client: httpx.Client, tokenizer: Tokenizer) -> None:
    prompt = [*tokenizer.encode("quick"), 0, *tokenizer.encode("fox")]
    choice = post(client, prompt=prompt, max_tokens=1, logprobs=0, echo=True)["choices"][0]
    text = tokenizer.decode(prompt)
    assert text != "quickfox"
    assert choice["text"].startswith(text)
    offsets = choice["logprobs"]["text_offset"]
    assert [offsets[0], offsets[len(prompt)]] == [0, len(text)]
    assert post(client, prompt=text, max_tokens=1, echo=True)["choices"][0]["text"].startswith(text), "as with a text"


@pytest.mark.parametrize("max_tokens", [0, 3])
def test_stream_echoes_prompt_logprobs_first(client: httpx.Client, max_tokens: int) -> None:
    fields: dict[str, Any] = {"prompt": prompt_of(9, 1), "max_tokens": max_tokens, "logprobs": 2, "echo": True, "n": 2}
    whole = post(client, **fields)["choices"]
    lines = client.post("/v1/completions", json={"temperature": 0, "ignore_eos": True, "stream": True, **fields}).text
    events = [line.removeprefix("data: ") for line in lines.splitlines() if line]
    assert events.pop() == "[DONE]"
    chunks = [choice for event in events for choice in json.loads(event)["choices"]]
    for choice in whole:
        mine = [chunk for chunk in chunks if chunk["index"] == choice["index"]]
        assert "".join(chunk["text"] for chunk in mine) == choice["text"]
        parts = [chunk["logprobs"] for chunk in mine if chunk["logprobs"]]
        streamed = {name: [value for part in parts for value in part[name]] for name in choice["logprobs"]}
        first, *others = choice["logprobs"]["token_logprobs"]
        assert first is None
        assert streamed["token_logprobs"][1:] == pytest.approx(others, abs=1e-4)
        assert [streamed[name] for name in ("tokens", "text_offset")] == [
            choice["logprobs"][name] for name in ("tokens", "text_offset")
        ]
        assert streamed["top_logprobs"][0] is None
        assert all(len(top) in (2, 3) for top in streamed["top_logprobs"][1:])


def test_prompt_logprobs_of_completions(client: httpx.Client, expected: Any, tokenizer: Tokenizer) -> None:
    """An object per token, by id: the token's own, and the best ones, with their ranks."""
    prompts = [prompt_of(2, 3), prompt_of(2 * STEP, 4)]
    choices = post(client, prompt=prompts, max_tokens=2, prompt_logprobs=3, n=2)["choices"]
    assert len(choices) == 4
    for index, choice in enumerate(choices):
        prompt = prompts[index // 2]
        first, *others = choice["prompt_logprobs"]
        assert first is None
        for token_id, entries, logprobs in zip(prompt[1:], others, expected(prompt), strict=True):
            best = logprobs.topk(3).indices.tolist()
            assert set(entries) == {str(id) for id in (token_id, *best)}
            assert [entries[str(id)]["rank"] for id in best] == [1, 2, 3]
            assert entries[str(token_id)]["rank"] == 1 + int((logprobs > logprobs[token_id]).sum())
            for id, entry in entries.items():
                assert entry["logprob"] == pytest.approx(logprobs[int(id)].item(), abs=1e-4)
                assert entry["decoded_token"] == tokenizer.token_bytes(int(id)).decode(errors="replace")


def test_prompt_logprobs_of_chats(client: httpx.Client) -> None:
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi!"}], "return_token_ids": True}
    answer = post(client, "/v1/chat/completions", **fields, max_tokens=2, prompt_logprobs=0)
    token_ids = answer["prompt_token_ids"]
    assert answer["prompt_logprobs"][0] is None
    assert [list(entry) for entry in answer["prompt_logprobs"][1:]] == [[str(id)] for id in token_ids[1:]]
    nothing = post(client, "/v1/chat/completions", **fields, max_tokens=0, prompt_logprobs=0)
    assert nothing["choices"][0]["message"]["content"] == ""
    assert [entry and list(entry) for entry in nothing["prompt_logprobs"]] == [
        None,
        *([str(id)] for id in token_ids[1:]),
    ]


def test_scored_prompt_is_computed_on_the_decode_node(small_fleet: Fleet, client: httpx.Client) -> None:
    """All of them, whatever is cached, and others find them there."""
    prompt = prompt_of(6 * STEP, 5)

    def counted(name: str) -> float:
        return small_fleet.decode[0].status().counters[name]

    before = counted("pdserve_handoffs_total"), counted("pdserve_admitted_prompt_tokens_total")
    for _ in range(2):
        assert post(client, prompt=prompt, max_tokens=1, prompt_logprobs=0)["usage"]["prompt_tokens_details"] == {
            "cached_tokens": 0
        }
    after = counted("pdserve_handoffs_total"), counted("pdserve_admitted_prompt_tokens_total")
    assert after == (before[0], before[1] + 2 * len(prompt))
    assert post(client, prompt=prompt, max_tokens=1)["usage"]["prompt_tokens_details"]["cached_tokens"] > 0
