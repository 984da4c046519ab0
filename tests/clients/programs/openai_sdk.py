"""The official Python SDK works with pdserve."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import unittest
from typing import Any, Literal

import openai
from pydantic import BaseModel

MODEL = os.environ["PDSERVE_MODEL"]
CONNECTION: dict[str, Any] = {"base_url": os.environ["PDSERVE_URL"], "max_retries": 0, "timeout": 60}
client = openai.OpenAI(api_key=os.environ["PDSERVE_KEY"], **CONNECTION)

MESSAGES: list[Any] = [{"role": "user", "content": "Say something."}]
CHAT: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "temperature": 0, "max_tokens": 24}
IGNORE_EOS = {"ignore_eos": True}  # with random weights, EOS would end an answer at a random token
#: Without the penalty, random weights would generate whitespace in JSON until max_tokens.
STRUCTURED: dict[str, Any] = {**CHAT, "max_tokens": 500, "frequency_penalty": 2}


class Paint(BaseModel):
    """Paint the wall."""

    colour: Literal["red", "green"]
    again: bool


PAINT: Any = openai.pydantic_function_tool(Paint, name="paint")


class Completions(unittest.TestCase):
    def test_text_has_all_tokens(self) -> None:
        answer = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=24, temperature=0, extra_body=IGNORE_EOS
        )
        assert answer.choices[0].text
        assert answer.choices[0].finish_reason == "length"
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 24

    def test_stream_equals_the_whole_answer(self) -> None:
        fields: dict[str, Any] = {"model": MODEL, "prompt": "Once", "max_tokens": 24, "temperature": 0}
        whole = client.completions.create(**fields)
        chunks = client.completions.create(**fields, stream=True)
        assert "".join(chunk.choices[0].text for chunk in chunks) == whole.choices[0].text

    def test_every_token_has_a_logprob(self) -> None:
        answer = client.completions.create(
            model=MODEL, prompt="Once", max_tokens=4, logprobs=2, temperature=0, extra_body=IGNORE_EOS
        )
        logprobs = answer.choices[0].logprobs
        assert logprobs is not None
        assert logprobs.token_logprobs is not None
        assert len(logprobs.token_logprobs) == 4
        assert max(logprobs.token_logprobs) <= 0


class Chat(unittest.TestCase):
    def test_message_has_all_tokens(self) -> None:
        answer = client.chat.completions.create(**CHAT, extra_body=IGNORE_EOS)
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content
        assert answer.usage is not None
        assert answer.usage.completion_tokens == 24

    def test_stream_with_usage_equals_the_whole_answer(self) -> None:
        whole = client.chat.completions.create(**CHAT, extra_body=IGNORE_EOS)
        *pieces, last = client.chat.completions.create(
            **CHAT, extra_body=IGNORE_EOS, stream=True, stream_options={"include_usage": True}
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in pieces)
        assert text == whole.choices[0].message.content
        assert pieces[-1].choices[0].finish_reason == "length"
        assert last.usage == whole.usage

    def test_every_token_has_top_logprobs(self) -> None:
        answer = client.chat.completions.create(**CHAT, logprobs=True, top_logprobs=3, extra_body=IGNORE_EOS)
        assert answer.choices[0].logprobs is not None
        content = answer.choices[0].logprobs.content
        assert content is not None
        assert len(content) == 24
        for token in content:
            assert len(token.top_logprobs) == 3
            assert token.top_logprobs[0].logprob == token.logprob  # greedy

    def test_answer_parses_to_a_pydantic_model(self) -> None:
        answer = client.chat.completions.parse(**STRUCTURED, response_format=Paint)
        paint = answer.choices[0].message.parsed
        assert isinstance(paint, Paint)

    def test_stream_helper_parses_to_a_pydantic_model(self) -> None:
        with client.chat.completions.stream(**STRUCTURED, response_format=Paint) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_completion()
        assert {"chunk", "content.delta", "content.done"} <= kinds
        assert isinstance(answer.choices[0].message.parsed, Paint)


WITH_TOOLS: dict[str, Any] = {**STRUCTURED, "tools": [PAINT]}


class Tools(unittest.TestCase):
    def test_auto_tool_choice_is_accepted(self) -> None:
        answer = client.chat.completions.create(**WITH_TOOLS, tool_choice="auto")
        assert answer.choices[0].finish_reason in ("stop", "length", "tool_calls")

    def test_required_tool_is_called(self) -> None:
        answer = client.chat.completions.parse(**WITH_TOOLS, tool_choice="required", parallel_tool_calls=False)
        assert answer.choices[0].finish_reason == "tool_calls"
        (call,) = answer.choices[0].message.tool_calls or []
        assert call.function.name == "paint"
        assert isinstance(call.function.parsed_arguments, Paint)

    def test_named_tool_is_called_in_a_stream(self) -> None:
        named: Any = {"type": "function", "function": {"name": "paint"}}
        with client.chat.completions.stream(**WITH_TOOLS, tool_choice=named) as stream:
            kinds = {event.type for event in stream}
            answer = stream.get_final_completion()
        assert "tool_calls.function.arguments.done" in kinds
        (call,) = answer.choices[0].message.tool_calls or []
        assert isinstance(call.function.parsed_arguments, Paint)

    def test_tool_result_is_accepted(self) -> None:
        first = client.chat.completions.create(**WITH_TOOLS, tool_choice="required", parallel_tool_calls=False)
        message = first.choices[0].message
        (call,) = message.tool_calls or []
        done = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        second = client.chat.completions.create(
            model=MODEL, messages=[*MESSAGES, message.model_dump(exclude_none=True), done], tools=[PAINT], max_tokens=8
        )
        assert second.choices[0].finish_reason is not None


RESPONSE: dict[str, Any] = {"model": MODEL, "input": "Say something.", "temperature": 0, "max_output_tokens": 24}
STRUCTURED_RESPONSE: dict[str, Any] = {**RESPONSE, "max_output_tokens": 500, "extra_body": {"frequency_penalty": 2}}


class Responses(unittest.TestCase):
    def test_text_has_all_tokens(self) -> None:
        response = client.responses.create(**RESPONSE, extra_body=IGNORE_EOS)
        assert response.output_text
        assert response.status == "incomplete"
        assert response.incomplete_details is not None
        assert response.incomplete_details.reason == "max_output_tokens"
        assert response.usage is not None
        assert response.usage.output_tokens == 24

    def test_stream_equals_the_whole_response(self) -> None:
        whole = client.responses.create(**RESPONSE, extra_body=IGNORE_EOS)
        events = list(client.responses.create(**RESPONSE, extra_body=IGNORE_EOS, stream=True))
        text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
        assert text == whole.output_text
        assert events[0].type == "response.created"
        assert events[-1].type == "response.incomplete"

    def test_response_parses_to_a_pydantic_model(self) -> None:
        response = client.responses.parse(**STRUCTURED_RESPONSE, text_format=Paint)
        assert isinstance(response.output_parsed, Paint)

    def test_function_is_called_and_its_result_is_accepted(self) -> None:
        function = PAINT["function"]
        tool: Any = {"type": "function", "name": "paint", "parameters": function["parameters"], "strict": True}
        fields: dict[str, Any] = {**STRUCTURED_RESPONSE, "tools": [tool]}
        response = client.responses.create(**fields, tool_choice="required", parallel_tool_calls=False)
        (call,) = (item for item in response.output if item.type == "function_call")
        assert json.loads(call.arguments)["colour"] in ("red", "green")
        result = {"type": "function_call_output", "call_id": call.call_id, "output": "done"}
        items: Any = [*MESSAGES, call.model_dump(exclude_none=True), result]
        answer = client.responses.create(**{**fields, "input": items, "max_output_tokens": 8})
        assert answer.usage is not None

    def test_background_response_is_polled_continued_and_deleted(self) -> None:
        response = client.responses.create(**RESPONSE, background=True)
        while response.status in ("queued", "in_progress"):
            time.sleep(0.05)
            response = client.responses.retrieve(response.id)
        second = client.responses.create(**RESPONSE, previous_response_id=response.id)
        items: Any = client.responses.input_items.list(second.id, order="asc")
        assert [item.content[0].text for item in items] == [RESPONSE["input"], response.output_text, RESPONSE["input"]]
        client.responses.delete(response.id)
        with self.assertRaises(openai.NotFoundError):
            client.responses.retrieve(response.id)

    def test_stream_of_a_background_response_is_resumed(self) -> None:
        stream = client.responses.create(**RESPONSE, background=True, stream=True)
        first: Any = next(iter(stream))
        stream.close()
        rest = list(client.responses.retrieve(first.response.id, stream=True, starting_after=0))
        assert [event.sequence_number for event in rest] == list(range(1, len(rest) + 1))
        assert rest[-1].type in ("response.completed", "response.incomplete")


class Models(unittest.TestCase):
    def test_served_model_is_listed_and_retrieved(self) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


class Errors(unittest.TestCase):
    def test_invalid_parameter_is_a_bad_request(self) -> None:
        with self.assertRaises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**CHAT, "temperature": -1})
        assert caught.exception.param == "temperature"

    def test_unknown_model_is_not_found(self) -> None:
        with self.assertRaises(openai.NotFoundError) as caught:
            client.chat.completions.create(**{**CHAT, "model": "gpt-5"})
        assert caught.exception.code == "model_not_found"

    def test_wrong_key_is_an_authentication_error(self) -> None:
        with self.assertRaises(openai.AuthenticationError) as caught:
            openai.OpenAI(api_key="sk-wrong", **CONNECTION).models.list()
        assert caught.exception.code == "invalid_api_key"

    def test_exceeded_rate_limit_names_a_retry_time(self) -> None:
        limited = openai.OpenAI(api_key=os.environ["PDSERVE_LIMITED_KEY"], **CONNECTION)
        with self.assertRaises(openai.RateLimitError) as caught:
            for _ in range(2):  # the key allows one request per minute
                limited.chat.completions.create(**CHAT)
        assert caught.exception.code == "rate_limit_exceeded"
        assert 1 <= int(caught.exception.response.headers["retry-after"]) <= 60


class Async(unittest.IsolatedAsyncioTestCase):
    async def asyncSetUp(self) -> None:
        self.client = openai.AsyncOpenAI(api_key=os.environ["PDSERVE_KEY"], **CONNECTION)

    async def asyncTearDown(self) -> None:
        await self.client.close()

    async def test_concurrent_requests_give_equal_texts(self) -> None:
        calls = [self.client.chat.completions.create(**CHAT) for _ in range(8)]
        answers = await asyncio.gather(*calls)
        assert len({answer.choices[0].message.content for answer in answers}) == 1  # greedy

    async def test_cancelled_stream_ends_at_the_nodes(self) -> None:
        begun = asyncio.Event()

        async def read() -> None:
            fields = {**CHAT, "max_tokens": 8000}
            async for _ in await self.client.chat.completions.create(**fields, extra_body=IGNORE_EOS, stream=True):
                begun.set()

        task = asyncio.create_task(read())
        await begun.wait()
        assert await self.running() == 1
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        async with asyncio.timeout(10):  # without the cancellation it would take longer
            while await self.running():  # noqa: ASYNC110 - the state of another process
                await asyncio.sleep(0.05)

    async def running(self) -> float:
        """Return the number of requests at the nodes."""
        text = await self.client.get(os.environ["PDSERVE_URL"].replace("/v1", "/metrics"), cast_to=str)
        match = re.search("^pdserve_requests_in_flight (.+)$", text, re.MULTILINE)
        assert match
        return float(match[1])


if __name__ == "__main__":
    unittest.main()
