"""LiteLLM works with pdserve as its provider hosted_vllm."""

from __future__ import annotations

import asyncio
import json
import os
import unittest
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import downloads it

import litellm
from litellm.exceptions import AuthenticationError, BadRequestError, NotFoundError, RateLimitError

MESSAGES = [{"role": "user", "content": "Say something."}]
CONNECTION: dict[str, Any] = {
    "model": f"hosted_vllm/{os.environ['PDSERVE_MODEL']}",
    "api_base": os.environ["PDSERVE_URL"],
    "api_key": os.environ["PDSERVE_KEY"],
    "num_retries": 0,
    "timeout": 60,
}
#: With random weights, EOS would end an answer at a random token.
CHAT: dict[str, Any] = {
    **CONNECTION,
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True},
}
#: Without the penalty, random weights would generate whitespace in JSON until max_tokens.
STRUCTURED: dict[str, Any] = {
    **CONNECTION,
    "messages": MESSAGES,
    "temperature": 0,
    "max_tokens": 500,
    "frequency_penalty": 2,
}

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "green"]}, "again": {"type": "boolean"}},
    "required": ["colour", "again"],
    "additionalProperties": False,
}
PAINT: dict[str, Any] = {"type": "function", "function": {"name": "paint", "parameters": SCHEMA}}


class Chat(unittest.TestCase):
    def test_stream_equals_completion(self) -> None:
        answer = litellm.completion(**CHAT)
        assert answer.choices[0].message.content
        assert answer.usage.completion_tokens == 24
        chunks = list(litellm.completion(**CHAT, stream=True, stream_options={"include_usage": True}))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == answer.choices[0].message.content
        assert chunks[-1].usage.completion_tokens == 24

    def test_async_completion_has_text(self) -> None:
        answer = asyncio.run(litellm.acompletion(**CHAT))
        assert answer.choices[0].message.content

    def test_text_completion_has_all_tokens(self) -> None:
        fields = {name: value for name, value in CHAT.items() if name != "messages"}
        answer = litellm.text_completion(prompt="Once", **fields)
        assert answer.choices[0].text
        assert answer.usage.completion_tokens == 24

    def test_answer_follows_the_json_schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "paint", "schema": SCHEMA, "strict": True}}
        answer = litellm.completion(**STRUCTURED, response_format=form)
        assert json.loads(answer.choices[0].message.content)["colour"] in ("red", "green")


class Tools(unittest.TestCase):
    def test_required_tool_is_called_and_its_result_is_accepted(self) -> None:
        fields = {**STRUCTURED, "tools": [PAINT]}
        message = litellm.completion(**fields, tool_choice="required", parallel_tool_calls=False).choices[0].message
        (call,) = message.tool_calls
        assert json.loads(call.function.arguments)["colour"] in ("red", "green")
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        answer = litellm.completion(
            **{**fields, "messages": [*MESSAGES, message.model_dump(), result], "max_tokens": 8}
        )
        assert answer.choices[0].finish_reason

    def test_streamed_tool_call_is_complete(self) -> None:
        named = {"type": "function", "function": {"name": "paint"}}
        chunks = list(litellm.completion(**STRUCTURED, tools=[PAINT], tool_choice=named, stream=True))
        (call,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
        assert json.loads(call.function.arguments)["colour"] in ("red", "green")


class Errors(unittest.TestCase):
    def test_errors_have_the_matching_classes(self) -> None:
        with self.assertRaises(NotFoundError):
            litellm.completion(**{**CHAT, "model": "hosted_vllm/gpt-5"})
        with self.assertRaises(BadRequestError):
            litellm.completion(**{**CHAT, "temperature": -1})
        with self.assertRaises(AuthenticationError):
            litellm.completion(**{**CHAT, "api_key": "sk-wrong"})
        with self.assertRaises(RateLimitError):
            for _ in range(2):  # the key allows one request per minute
                litellm.completion(**{**CHAT, "api_key": os.environ["PDSERVE_LIMITED_KEY"]})


if __name__ == "__main__":
    unittest.main()
