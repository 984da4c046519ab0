"""LangChain's ChatOpenAI works with pdserve."""

from __future__ import annotations

import asyncio
import os
import unittest
from typing import Any, Literal

from langchain_core.messages import HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


def model(**fields: Any) -> ChatOpenAI:
    """Return a chat model that generates exactly ``max_tokens``; random weights could end anywhere."""
    return ChatOpenAI(
        base_url=os.environ["PDSERVE_URL"],
        api_key=os.environ["PDSERVE_KEY"],
        model=os.environ["PDSERVE_MODEL"],
        max_retries=0,
        timeout=60,
        temperature=0,
        **{"max_tokens": 24, "extra_body": {"ignore_eos": True}, **fields},
    )


#: Without the penalty, random weights would generate whitespace in JSON until max_tokens.
STRUCTURED: dict[str, Any] = {"max_tokens": 500, "frequency_penalty": 2, "extra_body": {}}


class Paint(BaseModel):
    """Paint the wall."""

    colour: Literal["red", "green"]
    again: bool


@tool
def paint(colour: Literal["red", "green"], again: bool) -> str:
    """Paint the wall."""
    return f"{colour}, {again}"


class Chat(unittest.TestCase):
    def test_stream_equals_invoke(self) -> None:
        answer = model().invoke("Say something.")
        assert answer.content
        assert answer.usage_metadata is not None
        assert answer.usage_metadata["output_tokens"] == 24
        assert answer.response_metadata["finish_reason"] == "length"
        chunks = list(model(stream_usage=True).stream("Say something."))
        assert "".join(str(chunk.content) for chunk in chunks) == answer.content
        assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) == 24

    def test_batch_and_async_give_equal_texts(self) -> None:
        texts = [answer.content for answer in model().batch(["Say something."] * 3)]
        assert texts == [texts[0]] * 3
        assert asyncio.run(model().ainvoke("Say something.")).content == texts[0]

    def test_responses_api_gives_the_chat_text(self) -> None:
        answer = model(use_responses_api=True).invoke("Say something.")
        assert answer.text == model().invoke("Say something.").content


class Tools(unittest.TestCase):
    def test_bound_tool_is_called_and_its_result_is_accepted(self) -> None:
        bound = model(**STRUCTURED).bind_tools([paint], tool_choice="any", parallel_tool_calls=False)
        question = HumanMessage("Paint!")
        message = bound.invoke([question])
        (call,) = message.tool_calls
        assert call["name"] == "paint"
        result = paint.invoke(call)
        assert isinstance(result, ToolMessage)
        assert model().bind_tools([paint]).invoke([question, message, result]).usage_metadata is not None

    def test_streamed_tool_call_is_complete(self) -> None:
        bound = model(**STRUCTURED).bind_tools([paint], tool_choice="paint")
        whole = None
        for chunk in bound.stream("Paint!"):
            whole = chunk if whole is None else whole + chunk
        assert whole is not None
        (call,) = whole.tool_calls
        assert call["args"]["colour"] in ("red", "green")


class Structured(unittest.TestCase):
    def test_every_structured_output_method_works(self) -> None:
        for method in ("json_schema", "function_calling"):
            with self.subTest(method):
                structured = model(**STRUCTURED).with_structured_output(Paint, method=method)
                assert isinstance(structured.invoke("Paint!"), Paint)


if __name__ == "__main__":
    unittest.main()
