"""instructor works with pdserve: models from tools and JSON schemas, streamed, async, and over the other protocols."""

from __future__ import annotations

import asyncio
import os
import unittest
from collections.abc import Iterable
from typing import Any, Literal

import anthropic
import instructor
import openai
from instructor.core import InstructorRetryException
from pydantic import BaseModel, field_validator

MODEL = os.environ["PDSERVE_MODEL"]
URL = os.environ["PDSERVE_URL"]
KEY = os.environ["PDSERVE_KEY"]
CONNECTION: dict[str, Any] = {"base_url": URL, "api_key": KEY, "max_retries": 0, "timeout": 60}
MESSAGES: list[Any] = [{"role": "user", "content": "Paint!"}]
#: Without the penalty, random weights would generate whitespace in JSON until max_tokens.
FIELDS: dict[str, Any] = {"messages": MESSAGES, "max_retries": 1, "temperature": 0}
CHAT: dict[str, Any] = {**FIELDS, "model": MODEL, "max_tokens": 500, "frequency_penalty": 2}


class Paint(BaseModel):
    """Paint the wall."""

    colour: Literal["red", "green"]
    again: bool


class Never(BaseModel):
    again: bool

    @field_validator("again")
    @classmethod
    def refuse(cls, value: bool) -> bool:
        raise ValueError("try again")


class Person(BaseModel):
    name: str
    age: int


def client(mode: instructor.Mode) -> Any:
    return instructor.from_openai(openai.OpenAI(**CONNECTION), mode=mode)


class Chats(unittest.TestCase):
    def test_each_mode_gives_a_model(self) -> None:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            with self.subTest(mode):
                paint = client(mode).chat.completions.create(response_model=Paint, **CHAT)
                assert isinstance(paint, Paint)

    def test_completion_comes_with_the_model(self) -> None:
        paint, completion = client(instructor.Mode.TOOLS).chat.completions.create_with_completion(
            response_model=Paint, **CHAT
        )
        assert isinstance(paint, Paint)
        assert completion.usage.completion_tokens > 0

    def test_partial_models_are_streamed(self) -> None:
        for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
            with self.subTest(mode):
                parts = list(client(mode).chat.completions.create_partial(response_model=Paint, **CHAT))
                assert parts[-1].colour in ("red", "green")

    def test_facts_of_a_text(self) -> None:
        """The embedded model knows these names, and finds facts for a JSON schema, not for a forced call."""
        for name, age in (("Anna", 31), ("Maria", 17), ("Peter", 62)):
            question = {"messages": [{"role": "user", "content": f"{name} is {age} years old."}]}
            fields = {**CHAT, **question, "frequency_penalty": 0}
            person = client(instructor.Mode.JSON_SCHEMA).chat.completions.create(response_model=Person, **fields)
            assert (person.name, person.age) == (name, age)

    def test_iterable_is_streamed(self) -> None:
        paints = client(instructor.Mode.TOOLS).chat.completions.create(
            response_model=Iterable[Paint], stream=True, **{**CHAT, "max_tokens": 200}
        )
        assert all(isinstance(paint, Paint) for paint in paints)

    def test_failed_validation_is_sent_back_and_tried_again(self) -> None:
        with self.assertRaises(InstructorRetryException) as caught:
            client(instructor.Mode.TOOLS).chat.completions.create(response_model=Never, **{**CHAT, "max_retries": 2})
        assert caught.exception.n_attempts >= 2
        assert "try again" in str(caught.exception)
        assert "Error code" not in str(caught.exception)

    def test_async(self) -> None:
        connected: Any = instructor.from_openai(openai.AsyncOpenAI(**CONNECTION))
        assert isinstance(asyncio.run(connected.chat.completions.create(response_model=Paint, **CHAT)), Paint)


class OtherProtocols(unittest.TestCase):
    def test_responses(self) -> None:
        fields = {**FIELDS, "model": MODEL, "max_output_tokens": 500, "extra_body": {"frequency_penalty": 2}}
        paint = client(instructor.Mode.RESPONSES_TOOLS).responses.create(
            input="Paint!", response_model=Paint, **{k: v for k, v in fields.items() if k != "messages"}
        )
        assert isinstance(paint, Paint)

    def test_messages(self) -> None:
        connected: Any = instructor.from_anthropic(
            anthropic.Anthropic(**{**CONNECTION, "base_url": URL.removesuffix("/v1")})
        )
        fields = {"messages": MESSAGES, "max_retries": 1, "model": MODEL, "max_tokens": 500}
        extra = {"temperature": 0, "frequency_penalty": 2}
        assert isinstance(connected.messages.create(response_model=Paint, extra_body=extra, **fields), Paint)


if __name__ == "__main__":
    unittest.main()
