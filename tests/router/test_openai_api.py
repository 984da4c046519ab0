"""The official SDK against a real router, prefill node and decode node."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from fleet import MODEL_NAME, Fleet
from machine import patience

from router.text.tokenizer import Tokenizer

PROMPT = "The quick brown fox"
MESSAGES: list[Any] = [{"role": "user", "content": "Say something."}]
FOREVER = {"ignore_eos": True}


@pytest.fixture(scope="module")
def tokenizer(small_model: Path) -> Tokenizer:
    return Tokenizer.load(small_model)


@pytest.fixture(scope="module")
def sdk(small_fleet: Fleet) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{small_fleet.url}/v1", api_key="none", max_retries=0, timeout=patience(60)) as sdk:
        yield sdk


def complete(sdk: openai.OpenAI, prompt: Any = PROMPT, extra: dict[str, Any] | None = None, **fields: Any) -> Any:
    """A greedy completion that no EOS ends."""
    fields = {"max_tokens": 24, "temperature": 0, "model": MODEL_NAME, **fields}
    return sdk.completions.create(prompt=prompt, extra_body={**FOREVER, **(extra or {})}, **fields)


def test_completion(sdk: openai.OpenAI, tokenizer: Tokenizer) -> None:
    answer = complete(sdk, extra={"return_token_ids": True})
    choice = answer.choices[0]
    assert answer.object == "text_completion"
    assert choice.finish_reason == "length"
    assert choice.prompt_token_ids == tokenizer.encode(PROMPT)
    assert len(choice.token_ids) == answer.usage.completion_tokens == 24
    assert choice.text == tokenizer.decode(choice.token_ids, skip_special_tokens=True)
    assert answer.usage.prompt_tokens == len(choice.prompt_token_ids)


def test_stream_equals_full_response(sdk: openai.OpenAI) -> None:
    whole = complete(sdk, extra={"return_token_ids": True})
    options = {"include_usage": True}
    chunks = list(complete(sdk, extra={"return_token_ids": True}, stream=True, stream_options=options))
    *pieces, last = chunks
    assert "".join(chunk.choices[0].text for chunk in pieces) == whole.choices[0].text
    assert [id for chunk in pieces for id in chunk.choices[0].token_ids] == whole.choices[0].token_ids
    assert pieces[-1].choices[0].finish_reason == "length"
    assert last.choices == []
    assert last.usage.completion_tokens == 24


def test_chat_and_its_stream(sdk: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
    whole = sdk.chat.completions.create(extra_body=FOREVER, **fields)
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].message.content
    stream = sdk.chat.completions.create(stream=True, extra_body=FOREVER, **fields)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == whole.choices[0].message.content


def test_chat_defaults_to_the_model_length(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(model=MODEL_NAME, messages=MESSAGES, extra_body=FOREVER)
    assert answer.usage is not None
    assert answer.usage.total_tokens == 384
    assert answer.choices[0].finish_reason == "length"


def test_every_kind_of_prompt_is_accepted(sdk: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    text = complete(sdk).choices[0].text
    assert complete(sdk, ids).choices[0].text == text
    other = complete(sdk, "Another one").choices[0].text
    for prompts in ([PROMPT, "Another one"], [ids, tokenizer.encode("Another one")]):
        answer = complete(sdk, prompts)
        assert [(choice.index, choice.text) for choice in answer.choices] == [(0, text), (1, other)]


def test_several_prompts_and_choices_in_one_stream(sdk: openai.OpenAI) -> None:
    prompts = [PROMPT, "Another one"]
    whole = complete(sdk, prompts, n=2, seed=3, temperature=1)
    texts = [""] * 4
    for chunk in complete(sdk, prompts, n=2, seed=3, temperature=1, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_choices_differ_and_seeds_repeat(sdk: openai.OpenAI) -> None:
    texts = [choice.text for choice in complete(sdk, n=3, temperature=1, seed=7).choices]
    assert len(set(texts)) == 3
    assert [choice.text for choice in complete(sdk, n=3, temperature=1, seed=7).choices] == texts
    assert complete(sdk, temperature=1, seed=7).choices[0].text == texts[0]
    assert complete(sdk, temperature=1).choices[0].text != complete(sdk, temperature=1).choices[0].text


def test_stop_strings(sdk: openai.OpenAI) -> None:
    text = complete(sdk).choices[0].text
    stop = text[10:13]
    answer = complete(sdk, stop=[stop, "never there"])
    assert answer.choices[0].text == text[: text.index(stop)]
    assert answer.choices[0].finish_reason == "stop"
    streamed = complete(sdk, stop=stop, stream=True)
    assert "".join(chunk.choices[0].text for chunk in streamed) == text[: text.index(stop)]


def test_min_tokens_holds_for_stop_strings(sdk: openai.OpenAI) -> None:
    """An early stop string stays in the text; the next one that is complete later ends it."""
    extra = {"return_token_ids": True}
    text = complete(sdk).choices[0].text
    stops = sorted({letter for letter in text if letter.isascii()})  # nearly every token completes one
    (short,) = complete(sdk, stop=stops[:16], extra=extra).choices
    (longer,) = complete(sdk, stop=stops[:16], extra={**extra, "min_tokens": 9}).choices
    assert len(short.token_ids) < 9 <= len(longer.token_ids)
    assert text.startswith(longer.text)
    assert len(longer.text) > len(short.text)


def test_stop_token_ids(sdk: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = complete(sdk, extra={"return_token_ids": True}).choices[0].token_ids
    first = ids.index(ids[5])
    answer = complete(sdk, extra={"return_token_ids": True, "stop_token_ids": [ids[5]]})
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].token_ids == ids[: first + 1]
    assert answer.choices[0].text == tokenizer.decode(ids[:first], skip_special_tokens=True)


def test_top_logprobs_of_a_prompt_begin_with_its_own_tokens(sdk: openai.OpenAI) -> None:
    """vLLM's tests take the first key for the token, also where another one was more likely."""
    logprobs = complete(sdk, logprobs=2, extra={"echo": True, "return_tokens_as_token_ids": True}).choices[0].logprobs
    assert [next(iter(top)) for top in logprobs.top_logprobs[1:]] == logprobs.tokens[1:]
    assert any(max(top.values()) > next(iter(top.values())) for top in logprobs.top_logprobs[1:])


def test_completion_logprobs(sdk: openai.OpenAI) -> None:
    logprobs = complete(sdk, logprobs=3).choices[0].logprobs
    assert len(logprobs.tokens) == len(logprobs.token_logprobs) == len(logprobs.text_offset) == 24
    assert logprobs.text_offset == sorted(logprobs.text_offset)
    for logprob, top in zip(logprobs.token_logprobs, logprobs.top_logprobs, strict=True):
        assert logprob <= 0
        assert max(top.values()) == pytest.approx(logprob)  # greedy takes the best
        assert 1 <= len(top) <= 4


def test_chat_logprobs_and_their_stream(sdk: openai.OpenAI) -> None:
    fields: dict[str, Any] = {"model": MODEL_NAME, "messages": MESSAGES, "temperature": 0, "max_tokens": 12}
    fields |= {"logprobs": True, "top_logprobs": 2, "extra_body": FOREVER}
    answer = sdk.chat.completions.create(**fields)
    content = answer.choices[0].logprobs.content
    assert len(content) == 12
    assert all(len(entry.top_logprobs) == 2 for entry in content)
    assert all(entry.top_logprobs[0].logprob == pytest.approx(entry.logprob) for entry in content)
    streamed = [
        entry
        for chunk in sdk.chat.completions.create(stream=True, **fields)
        if chunk.choices[0].logprobs
        for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in content]


def test_echo(sdk: openai.OpenAI, tokenizer: Tokenizer) -> None:
    text = complete(sdk).choices[0].text
    assert complete(sdk, echo=True).choices[0].text == PROMPT + text
    assert complete(sdk, tokenizer.encode(PROMPT), echo=True).choices[0].text == PROMPT + text
    assert "".join(chunk.choices[0].text for chunk in complete(sdk, echo=True, stream=True)) == PROMPT + text


def test_bias_and_penalties_change_the_output(sdk: openai.OpenAI, tokenizer: Tokenizer) -> None:
    wanted = tokenizer.encode("a")[0]
    extra = {"return_token_ids": True}
    assert set(complete(sdk, logit_bias={str(wanted): 100}, extra=extra).choices[0].token_ids) == {wanted}
    answer = complete(sdk, logit_bias={str(wanted): 30}, frequency_penalty=2, presence_penalty=2, extra=extra)
    assert len(set(answer.choices[0].token_ids)) > 1


def test_usage_counts_cached_tokens(sdk: openai.OpenAI) -> None:
    prompt = "A prompt that is long enough for several blocks of the prefix cache. " * 4
    first = complete(sdk, prompt).usage
    second = complete(sdk, prompt).usage
    assert second.prompt_tokens == first.prompt_tokens
    assert second.prompt_tokens_details.cached_tokens > 0


def test_models(sdk: openai.OpenAI) -> None:
    assert [model.id for model in sdk.models.list()] == [MODEL_NAME]
    assert sdk.models.retrieve(MODEL_NAME).id == MODEL_NAME


def test_errors_map_to_sdk_classes(sdk: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        complete(sdk, model="gpt-5")
    with pytest.raises(openai.BadRequestError) as caught:
        complete(sdk, max_tokens=10**6)
    assert caught.value.code == "context_length_exceeded"
    with pytest.raises(openai.BadRequestError, match="outside the vocabulary"):
        complete(sdk, [511 + 1])
    with pytest.raises(openai.BadRequestError) as caught:
        complete(sdk, temperature=9, stream=True)
    assert caught.value.param == "temperature"


def test_concurrent_requests_equal_single_ones(small_fleet: Fleet, sdk: openai.OpenAI) -> None:
    prompts = [f"Prompt number {number} says" for number in range(16)]
    alone = [complete(sdk, prompt).choices[0].text for prompt in prompts]

    async def one(client: openai.AsyncOpenAI, prompt: str) -> str:
        fields: dict[str, Any] = {"model": MODEL_NAME, "max_tokens": 24, "temperature": 0, "extra_body": FOREVER}
        stream = await client.completions.create(prompt=prompt, stream=True, **fields)
        return "".join([chunk.choices[0].text async for chunk in stream])

    async def all_at_once() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{small_fleet.url}/v1", api_key="none", timeout=patience(60)) as client:
            return await asyncio.gather(*(one(client, prompt) for prompt in prompts))

    assert asyncio.run(all_at_once()) == alone


def test_disconnected_client_frees_its_blocks(small_fleet: Fleet, sdk: openai.OpenAI) -> None:
    stream = complete(sdk, max_tokens=300, stream=True)
    next(iter(stream))
    stream.close()
    small_fleet.decode[0].wait_idle()
    small_fleet.prefill[0].wait_idle()


def test_truncate_prompt_tokens_keeps_the_end(sdk: openai.OpenAI, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(PROMPT)
    short = complete(sdk, extra={"truncate_prompt_tokens": 3, "return_token_ids": True}, echo=True, max_tokens=4)
    assert short.choices[0].prompt_token_ids == ids[-3:]
    assert short.usage.prompt_tokens == 3
    assert short.choices[0].text.startswith(tokenizer.decode(ids[-3:]))
    same = complete(sdk, ids[-3:], extra={"return_token_ids": True}, max_tokens=4)
    assert same.choices[0].token_ids == short.choices[0].token_ids
    fitting = complete(sdk, list(range(3, 403)), extra={"truncate_prompt_tokens": -1}, max_tokens=4)
    assert fitting.usage.prompt_tokens == 384 - 4
    answer = sdk.chat.completions.create(
        model=MODEL_NAME, messages=MESSAGES, max_tokens=2, extra_body={"truncate_prompt_tokens": 5}
    )
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 5
