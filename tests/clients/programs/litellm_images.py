"""LiteLLM sends images to pdserve as its provider hosted_vllm."""

from __future__ import annotations

import asyncio
import os
import unittest
from typing import Any

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # else the import downloads it

import litellm
from litellm.exceptions import BadRequestError
from pictures import data_url

CHAT: dict[str, Any] = {
    "model": f"hosted_vllm/{os.environ['PDSERVE_MODEL']}",
    "api_base": os.environ["PDSERVE_URL"],
    "api_key": os.environ["PDSERVE_KEY"],
    "num_retries": 0,
    "timeout": 60,
    "temperature": 0,
    "max_tokens": 16,
    "extra_body": {"ignore_eos": True},  # with random weights, EOS would end an answer at a random token
}


def image(rows: int, columns: int, seed: int) -> Any:
    return {"type": "image_url", "image_url": {"url": data_url(rows, columns, seed), "detail": "auto"}}


def question(*parts: Any) -> Any:
    return {"role": "user", "content": [*parts, {"type": "text", "text": "What is it?"}]}


class Session(unittest.TestCase):
    def test_turns_see_all_images(self) -> None:
        messages: list[Any] = [question(image(3, 4, 1), image(2, 2, 2))]
        first = litellm.completion(**CHAT, messages=messages)
        assert first.usage.completion_tokens == 16
        assert first.usage.prompt_tokens_details.image_tokens == 3 * 4 + 2 * 2
        said = {"role": "assistant", "content": first.choices[0].message.content}
        messages += [said, question(image(5, 2, 3))]
        second = litellm.completion(**CHAT, messages=messages)
        assert second.usage.prompt_tokens_details.image_tokens == 3 * 4 + 2 * 2 + 5 * 2
        chunks = list(litellm.completion(**CHAT, messages=messages, stream=True))
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == second.choices[0].message.content

    def test_result_of_a_tool_may_be_an_image(self) -> None:
        call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
        messages = [
            question(),
            {"role": "assistant", "content": None, "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "call_1", "content": [image(2, 3, 4)]},
        ]
        answer = litellm.completion(**CHAT, messages=messages)
        assert answer.usage.prompt_tokens_details.image_tokens == 2 * 3

    def test_answers_depend_on_the_pixels(self) -> None:
        async def ask(seed: int) -> str:
            answer = await litellm.acompletion(**CHAT, messages=[question(image(4, 4, seed))])
            return str(answer.choices[0].message.content)

        async def ask_all() -> list[str]:
            return await asyncio.gather(*map(ask, (5, 6, 5)))

        texts = asyncio.run(ask_all())
        assert texts[0] == texts[2] != texts[1]


class Errors(unittest.TestCase):
    def test_what_is_no_image_is_a_bad_request(self) -> None:
        broken = {"type": "image_url", "image_url": {"url": data_url(1, 1, 7)[:80]}}
        with self.assertRaisesRegex(BadRequestError, r"messages\[0\].content\[0\]"):
            litellm.completion(**CHAT, messages=[question(broken)])


if __name__ == "__main__":
    unittest.main()
