"""Pydantic AI works with pdserve, over chats, responses and Anthropic's protocol."""

from __future__ import annotations

import os
import unittest
from typing import Any, Literal

import anthropic
import openai
from pydantic import BaseModel
from pydantic_ai import Agent, NativeOutput, ToolOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider

URL, KEY, MODEL = (os.environ[name] for name in ("PDSERVE_URL", "PDSERVE_KEY", "PDSERVE_MODEL"))
TEXT: dict[str, Any] = {"temperature": 0, "max_tokens": 24, "extra_body": {"ignore_eos": True}}
#: Without the penalty, random weights would generate whitespace in JSON until max_tokens.
STRUCTURED: dict[str, Any] = {"temperature": 0, "max_tokens": 500, "extra_body": {"frequency_penalty": 2}}


class Paint(BaseModel):
    """Paint the wall."""

    colour: Literal["red", "green"]
    again: bool


def models() -> dict[str, Any]:
    sdk = openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0, timeout=60)
    other = anthropic.AsyncAnthropic(base_url=URL.removesuffix("/v1"), api_key=KEY, max_retries=0, timeout=60)
    return {
        "chats": OpenAIChatModel(MODEL, provider=OpenAIProvider(openai_client=sdk)),
        "responses": OpenAIResponsesModel(MODEL, provider=OpenAIProvider(openai_client=sdk)),
        "messages": AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=other)),
    }


class Runs(unittest.IsolatedAsyncioTestCase):
    async def test_text(self) -> None:
        for name, model in models().items():
            with self.subTest(name):
                result = await Agent(model, model_settings=TEXT).run("Say something.")
                assert result.output
                assert result.usage.output_tokens == 24

    async def test_stream_equals_the_whole_text(self) -> None:
        for name, model in models().items():
            with self.subTest(name):
                agent = Agent(model, model_settings=TEXT)
                whole = await agent.run("Say something.")
                async with agent.run_stream("Say something.") as stream:
                    parts = [part async for part in stream.stream_text(delta=True)]
                assert "".join(parts) == whole.output

    async def test_output_of_a_tool(self) -> None:
        for name, model in models().items():
            with self.subTest(name):
                agent = Agent(model, output_type=ToolOutput(Paint), model_settings=STRUCTURED)
                assert isinstance((await agent.run("Paint!")).output, Paint)

    async def test_native_output(self) -> None:
        for name in ("chats", "responses"):
            with self.subTest(name):
                agent = Agent(models()[name], output_type=NativeOutput(Paint), model_settings=STRUCTURED)
                assert isinstance((await agent.run("Paint!")).output, Paint)

    async def test_conversation_goes_on(self) -> None:
        for name, model in models().items():
            with self.subTest(name):
                agent = Agent(model, model_settings=TEXT)
                first = await agent.run("Say something.")
                assert (await agent.run("More.", message_history=first.all_messages())).output


if __name__ == "__main__":
    unittest.main()
