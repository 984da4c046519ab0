"""The OpenAI Agents SDK works with pdserve, over chats and over responses."""

from __future__ import annotations

import os
import unittest
from typing import Any, Literal

import openai
from agents import (
    Agent,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    StopAtTools,
    function_tool,
    set_tracing_disabled,
)
from pydantic import BaseModel

set_tracing_disabled(True)

#: Without the penalty, random weights would generate whitespace in JSON until max_tokens.
STRUCTURED: dict[str, Any] = {"temperature": 0, "max_tokens": 500, "extra_body": {"frequency_penalty": 2}}
#: An answer that ends by itself: this SDK has an error for a response that max_tokens cuts off.
SHORT: dict[str, Any] = {"structured_outputs": {"regex": "[a-z]{8,12}"}}
CHATS = OpenAIChatCompletionsModel
RESPONSES = OpenAIResponsesModel


class Paint(BaseModel):
    colour: Literal["red", "green"]
    again: bool


@function_tool
def paint(colour: Literal["red", "green"]) -> str:
    """Paint the wall."""
    return f"painted {colour}"


def agent(kind: Any, **fields: Any) -> Agent[Any]:
    client = openai.AsyncOpenAI(
        base_url=os.environ["PDSERVE_URL"], api_key=os.environ["PDSERVE_KEY"], max_retries=0, timeout=60
    )
    chosen = {"model_settings": ModelSettings(temperature=0, extra_body=SHORT), **fields}
    return Agent(name="painter", model=kind(model=os.environ["PDSERVE_MODEL"], openai_client=client), **chosen)


class Runs(unittest.IsolatedAsyncioTestCase):
    async def test_text(self) -> None:
        for kind in (CHATS, RESPONSES):
            with self.subTest(kind.__name__):
                result = await Runner.run(agent(kind), "Say something.")
                assert 8 <= len(result.final_output) <= 12
                assert result.raw_responses[0].usage.output_tokens > 0

    async def test_stream_equals_the_whole_text(self) -> None:
        for kind in (CHATS, RESPONSES):
            with self.subTest(kind.__name__):
                whole = await Runner.run(agent(kind), "Say something.")
                result = Runner.run_streamed(agent(kind), "Say something.")
                deltas = [
                    event.data.delta
                    async for event in result.stream_events()
                    if event.type == "raw_response_event" and event.data.type == "response.output_text.delta"
                ]
                assert "".join(deltas) == result.final_output == whole.final_output

    async def test_required_tool_runs_and_its_result_is_sent_back(self) -> None:
        for kind in (CHATS, RESPONSES):
            with self.subTest(kind.__name__):
                settings = ModelSettings(**STRUCTURED, tool_choice="required", parallel_tool_calls=False)
                stop = StopAtTools(stop_at_tool_names=["paint"])
                painter = agent(kind, tools=[paint], model_settings=settings, tool_use_behavior=stop)
                result = await Runner.run(painter, "Paint!")
                assert str(result.final_output).startswith("painted")
                assert (await Runner.run(agent(kind), result.to_input_list())).final_output

    async def test_streamed_tool_call(self) -> None:
        for kind in (CHATS, RESPONSES):
            with self.subTest(kind.__name__):
                settings = ModelSettings(**STRUCTURED, tool_choice="paint", parallel_tool_calls=False)
                stop = StopAtTools(stop_at_tool_names=["paint"])
                painter = agent(kind, tools=[paint], model_settings=settings, tool_use_behavior=stop)
                result = Runner.run_streamed(painter, "Paint!")
                names = [event.name async for event in result.stream_events() if event.type == "run_item_stream_event"]
                assert names[:2] == ["tool_called", "tool_output"]
                assert str(result.final_output).startswith("painted")

    async def test_output_type(self) -> None:
        for kind in (CHATS, RESPONSES):
            with self.subTest(kind.__name__):
                made = agent(kind, output_type=Paint, model_settings=ModelSettings(**STRUCTURED))
                assert isinstance((await Runner.run(made, "Paint!")).final_output, Paint)

    async def test_conversation_continues_from_the_store(self) -> None:
        first = await Runner.run(agent(RESPONSES), "Say something.")
        second = await Runner.run(agent(RESPONSES), "More.", previous_response_id=first.last_response_id)
        assert second.final_output


if __name__ == "__main__":
    unittest.main()
