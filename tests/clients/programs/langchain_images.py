"""LangChain's ChatOpenAI sends images to pdserve, in OpenAI's form and in LangChain's own."""

from __future__ import annotations

import os
import unittest
from typing import Any

import openai
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_openai import ChatOpenAI
from pictures import data_url, png


def model(**fields: Any) -> ChatOpenAI:
    """Return a chat model that generates exactly ``max_tokens``; random weights could end anywhere."""
    return ChatOpenAI(
        base_url=os.environ["PDSERVE_URL"],
        api_key=os.environ["PDSERVE_KEY"],
        model=os.environ["PDSERVE_MODEL"],
        max_retries=0,
        timeout=60,
        temperature=0,
        **{"max_tokens": 16, "extra_body": {"ignore_eos": True}, **fields},
    )


def image(rows: int, columns: int, seed: int) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": data_url(rows, columns, seed)}}


def block(rows: int, columns: int, seed: int) -> dict[str, Any]:
    """Return an image in LangChain's form, which it translates for each provider."""
    return {"type": "image", "base64": png(rows, columns, seed), "mime_type": "image/png"}


def question(*parts: Any) -> HumanMessage:
    return HumanMessage([*parts, {"type": "text", "text": "What is it?"}])


def num_prompt_tokens(message: BaseMessage) -> int:
    assert isinstance(message, AIMessage)
    assert message.usage_metadata is not None
    return message.usage_metadata["input_tokens"]


class Session(unittest.TestCase):
    def test_turns_see_all_images(self) -> None:
        chat = model()
        messages: list[BaseMessage] = [question(image(3, 4, 1), block(2, 2, 2))]
        first = chat.invoke(messages)
        assert num_prompt_tokens(first) == num_prompt_tokens(chat.invoke([question()])) + with_ends(3 * 4, 2 * 2)
        messages += [first, question(block(5, 2, 3))]
        second = chat.invoke(messages)
        assert num_prompt_tokens(second) > num_prompt_tokens(first) + 5 * 2
        assert "".join(str(chunk.content) for chunk in chat.stream(messages)) == second.content

    def test_both_forms_are_the_same_image(self) -> None:
        answers = [model().invoke([question(make(4, 4, 4))]) for make in (image, block)]
        assert answers[0].content == answers[1].content

    def test_result_of_a_tool_may_be_an_image(self) -> None:
        call = {"name": "look", "args": {}, "id": "call_1"}
        asked: list[BaseMessage] = [question(), AIMessage("", tool_calls=[call])]
        text = model().invoke([*asked, ToolMessage([{"type": "text", "text": "a"}], tool_call_id="call_1")])
        seen = model().invoke([*asked, ToolMessage([image(2, 3, 5)], tool_call_id="call_1")])
        assert num_prompt_tokens(seen) >= num_prompt_tokens(text) + 2 * 3

    def test_responses_api_sees_the_same(self) -> None:
        messages = [question(block(3, 3, 6))]
        assert model(use_responses_api=True).invoke(messages).text == model().invoke(messages).content

    def test_answers_depend_on_the_pixels(self) -> None:
        texts = [answer.content for answer in model().batch([[question(image(4, 4, seed))] for seed in (7, 8, 7)])]
        assert texts[0] == texts[2] != texts[1]


def with_ends(*images: int) -> int:
    """Return the tokens of images, with one before and one behind each."""
    return sum(images) + 2 * len(images)


class Errors(unittest.TestCase):
    def test_what_is_no_image_is_a_bad_request(self) -> None:
        broken = {"type": "image_url", "image_url": {"url": data_url(1, 1, 9)[:80]}}
        with self.assertRaisesRegex(openai.BadRequestError, r"messages\[0\].content\[0\]"):
            model().invoke([question(broken)])


if __name__ == "__main__":
    unittest.main()
