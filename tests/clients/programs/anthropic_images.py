"""Anthropic's Python SDK sends images to pdserve, in messages and in results of tools."""

from __future__ import annotations

import os
import unittest
from typing import Any

import anthropic
from pictures import png

MODEL = os.environ["PDSERVE_MODEL"]
client = anthropic.Anthropic(
    api_key=os.environ["PDSERVE_KEY"],
    base_url=os.environ["PDSERVE_URL"].removesuffix("/v1"),
    max_retries=0,
    timeout=60,
)
#: With random weights, EOS would end an answer at a random token. This SDK has no temperature.
GREEDY = {"temperature": 0, "ignore_eos": True}
FIELDS: dict[str, Any] = {"model": MODEL, "max_tokens": 16, "extra_body": GREEDY}
LOOK: Any = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}


def image(rows: int, columns: int, seed: int) -> Any:
    source = {"type": "base64", "media_type": "image/png", "data": png(rows, columns, seed)}
    return {"type": "image", "source": source}


def question(*blocks: Any) -> Any:
    return {"role": "user", "content": [*blocks, {"type": "text", "text": "What is it?"}]}


def num_prompt_tokens(message: Any) -> int:
    return int(message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0))


class Session(unittest.TestCase):
    def test_turns_see_the_images_of_messages_and_of_a_tool(self) -> None:
        messages: list[Any] = [question(image(3, 4, 1), image(2, 2, 2))]
        tools: dict[str, Any] = {"tools": [LOOK]}
        first = client.messages.create(**FIELDS, **tools, messages=messages)
        (block,) = first.content
        assert block.type == "text"
        assert first.usage.output_tokens == 16
        without = client.messages.count_tokens(model=MODEL, **tools, messages=[question()])
        assert num_prompt_tokens(first) >= without.input_tokens + 3 * 4 + 2 * 2

        call = {"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}
        messages += [{"role": "assistant", "content": [block.model_dump(include={"type", "text"}), call]}]
        result: Any = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "Here:"}]}
        messages += [{"role": "user", "content": [result]}]
        before = client.messages.count_tokens(model=MODEL, **tools, messages=messages).input_tokens
        result["content"] += [image(5, 2, 3)]
        counted = client.messages.count_tokens(model=MODEL, **tools, messages=messages).input_tokens
        assert counted >= before + 5 * 2
        answer = client.messages.create(**FIELDS, **tools, messages=messages)
        assert num_prompt_tokens(answer) == counted
        with client.messages.stream(**FIELDS, **tools, messages=messages) as stream:
            assert "".join(stream.text_stream) == answer.content[0].text

    def test_answers_depend_on_the_pixels(self) -> None:
        answers = [client.messages.create(**FIELDS, messages=[question(image(4, 4, seed))]) for seed in (4, 5, 4)]
        texts = [answer.content[0].text for answer in answers]
        assert texts[0] == texts[2] != texts[1]


class Errors(unittest.TestCase):
    def test_what_is_no_image_is_a_bad_request(self) -> None:
        broken = image(1, 1, 6)
        broken["source"]["data"] = broken["source"]["data"][:60]
        with self.assertRaisesRegex(anthropic.BadRequestError, r"messages\[0\].content\[0\]"):
            client.messages.create(**FIELDS, messages=[question(broken)])

    def test_url_is_refused_by_name(self) -> None:
        source = {"type": "url", "url": "https://example.com/a.png"}
        with self.assertRaisesRegex(anthropic.BadRequestError, "has an http URL"):
            client.messages.create(**FIELDS, messages=[question({"type": "image", "source": source})])


if __name__ == "__main__":
    unittest.main()
