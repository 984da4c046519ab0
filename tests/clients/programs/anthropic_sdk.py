"""Anthropic's Python SDK works with pdserve."""

from __future__ import annotations

import os
import unittest
from typing import Any, Literal

import anthropic
from pydantic import BaseModel

MODEL = os.environ["PDSERVE_MODEL"]
CONNECTION: dict[str, Any] = {
    "base_url": os.environ["PDSERVE_URL"].removesuffix("/v1"),
    "max_retries": 0,
    "timeout": 60,
}
client = anthropic.Anthropic(api_key=os.environ["PDSERVE_KEY"], **CONNECTION)

MESSAGES: list[Any] = [{"role": "user", "content": "Say something."}]
#: With random weights, EOS would end an answer at a random token. This SDK has no temperature.
GREEDY = {"temperature": 0, "ignore_eos": True}
MESSAGE: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 24, "extra_body": GREEDY}
#: Without the penalty, random weights would generate whitespace in JSON until max_tokens.
STRUCTURED: dict[str, Any] = {**MESSAGE, "max_tokens": 500, "extra_body": {"temperature": 0, "frequency_penalty": 2}}


class Paint(BaseModel):
    """Paint the wall."""

    colour: Literal["red", "green"]
    again: bool


PAINT: Any = {"name": "paint", "description": "Paint the wall.", "input_schema": Paint.model_json_schema()}
WITH_TOOLS: dict[str, Any] = {**STRUCTURED, "tools": [PAINT]}
ONE_CALL = {"type": "any", "disable_parallel_tool_use": True}


class Messages(unittest.TestCase):
    def test_message_has_all_tokens(self) -> None:
        message = client.messages.create(**MESSAGE)
        (block,) = message.content
        assert block.type == "text"
        assert block.text
        assert message.stop_reason == "max_tokens"
        assert message.usage.output_tokens == 24
        assert message._request_id

    def test_stream_equals_the_whole_message(self) -> None:
        whole = client.messages.create(**MESSAGE)
        with client.messages.stream(**MESSAGE) as stream:
            text = "".join(stream.text_stream)
            message = stream.get_final_message()
        assert text == message.content[0].text == whole.content[0].text
        assert message.stop_reason == whole.stop_reason
        assert message.usage.output_tokens == whole.usage.output_tokens

    def test_raw_events_are_typed(self) -> None:
        kinds = [type(event).__name__ for event in client.messages.create(**MESSAGE, stream=True)]
        assert kinds[0] == "RawMessageStartEvent"
        assert kinds[-2:] == ["RawMessageDeltaEvent", "RawMessageStopEvent"]

    def test_tokens_are_counted(self) -> None:
        system: list[Any] = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
        count = client.messages.count_tokens(model=MODEL, messages=MESSAGES, system=system, tools=[PAINT])
        usage = client.messages.create(**MESSAGE, system=system, tools=[PAINT]).usage
        assert count.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)

    def test_stop_sequence_ends_the_message(self) -> None:
        text = client.messages.create(**MESSAGE).content[0].text
        message = client.messages.create(**MESSAGE, stop_sequences=[text[4:8]])
        assert message.stop_reason == "stop_sequence"
        assert message.stop_sequence == text[4:8]

    def test_output_format_parses_to_a_pydantic_model(self) -> None:
        message = client.messages.parse(**STRUCTURED, output_format=Paint)
        assert isinstance(message.parsed_output, Paint)


class Tools(unittest.TestCase):
    def test_any_tool_is_called_and_its_result_is_accepted(self) -> None:
        message = client.messages.create(**WITH_TOOLS, tool_choice=ONE_CALL)
        assert message.stop_reason == "tool_use"
        (call,) = message.content
        assert call.type == "tool_use"
        assert Paint.model_validate(call.input)
        result: Any = {"type": "tool_result", "tool_use_id": call.id, "content": "done"}
        turns: Any = [*MESSAGES, message.to_param(), {"role": "user", "content": [result]}]
        answer = client.messages.create(model=MODEL, messages=turns, tools=[PAINT], max_tokens=8)
        assert answer.stop_reason

    def test_named_tool_is_called_in_a_stream(self) -> None:
        with client.messages.stream(**WITH_TOOLS, tool_choice={"type": "tool", "name": "paint"}) as stream:
            kinds = {event.type for event in stream}
            (call,) = stream.get_final_message().content
        assert "input_json" in kinds
        assert call.type == "tool_use"
        assert Paint.model_validate(call.input)


class Models(unittest.TestCase):
    def test_served_model_is_listed_and_retrieved(self) -> None:
        assert [model.id for model in client.models.list()] == [MODEL]
        assert client.models.retrieve(MODEL).id == MODEL


class Errors(unittest.TestCase):
    def test_invalid_parameter_is_a_bad_request(self) -> None:
        with self.assertRaises(anthropic.BadRequestError) as caught:
            client.messages.create(**{**MESSAGE, "extra_body": {"temperature": -1}})
        assert caught.exception.type == "invalid_request_error"
        assert caught.exception.request_id

    def test_image_is_refused_by_name(self) -> None:
        image: Any = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}
        with self.assertRaisesRegex(anthropic.BadRequestError, "is an image"):
            client.messages.create(**{**MESSAGE, "messages": [{"role": "user", "content": [image]}]})

    def test_unknown_model_is_not_found(self) -> None:
        with self.assertRaises(anthropic.NotFoundError) as caught:
            client.messages.create(**{**MESSAGE, "model": "claude"})
        assert caught.exception.type == "not_found_error"

    def test_wrong_key_is_an_authentication_error(self) -> None:
        with self.assertRaises(anthropic.AuthenticationError) as caught:
            anthropic.Anthropic(api_key="sk-wrong", **CONNECTION).messages.create(**MESSAGE)
        assert caught.exception.type == "authentication_error"

    def test_key_may_be_a_bearer_token(self) -> None:
        bearer = anthropic.Anthropic(auth_token=os.environ["PDSERVE_KEY"], **CONNECTION)
        assert bearer.messages.create(**MESSAGE).content

    def test_exceeded_rate_limit_names_a_retry_time(self) -> None:
        limited = anthropic.Anthropic(api_key=os.environ["PDSERVE_LIMITED_KEY"], **CONNECTION)
        with self.assertRaises(anthropic.RateLimitError) as caught:
            for _ in range(2):  # the key allows one request per minute
                limited.messages.create(**MESSAGE)
        assert caught.exception.type == "rate_limit_error"
        assert 1 <= int(caught.exception.response.headers["retry-after"]) <= 60


class Async(unittest.IsolatedAsyncioTestCase):
    async def test_stream_of_an_async_client_is_complete(self) -> None:
        client = anthropic.AsyncAnthropic(api_key=os.environ["PDSERVE_KEY"], **CONNECTION)
        async with client, client.messages.stream(**MESSAGE) as stream:
            message = await stream.get_final_message()
        assert message.usage.output_tokens == 24


if __name__ == "__main__":
    unittest.main()
