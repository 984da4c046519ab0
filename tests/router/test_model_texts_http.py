"""Clients of each protocol get what a model meant, whole and streamed, with a token or many tokens per step."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
import small_tokenizers
from answer_parts import PARTS
from model_texts import FORMATS, ModelText, parsers_of, reasoning_of, texts_of, tool_choice_of, tools
from router_in_process import InProcessRouter, router_in_process
from router_process import MODEL
from scripted_node import Conversation, ScriptedNode

from pdserve.pb import pdserve_pb2 as pb
from router.text.chat.parsers import REASONING_PARSERS
from router.text.tokenizer import Tokenizer

HI = [{"role": "user", "content": "Hi"}]
GPT_OSS = Path(__file__).parent / "templates" / "gpt_oss.jinja"


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    template = small_tokenizers.CHATML + "{% if opened %}{{ opened }}\n{% endif %}"
    return small_tokenizers.write(
        tmp_path_factory.mktemp("texts"),
        small_tokenizers.byte_level(),
        eos_token="<|im_end|>",
        chat_template=template,
    )


def flags_of(form: str) -> list[str]:
    if form == "openai":
        return ["--chat-template", str(GPT_OSS)]
    parser = form if form not in ("required", "named") else "hermes"
    return ["--tool-call-parser", parser, "--reasoning-parser", reasoning_of(form)]


def fields_of(path: str, form: str) -> dict[str, Any]:
    """Return the fields of a request with tools."""
    functions = [tool["function"] for tool in tools()]
    choice = tool_choice_of(form)
    if path == "/v1/messages":
        kinds: dict[str, Any] = {"auto": {"type": "auto"}, "required": {"type": "any"}}
        return {
            "messages": HI,
            "max_tokens": 500,
            "tools": [{"name": function["name"], "input_schema": function["parameters"]} for function in functions],
            "tool_choice": kinds[choice] if isinstance(choice, str) else {"type": "tool", "name": "write"},
        }
    if path == "/v1/responses":
        flat = [{"type": "function", **function, "strict": False} for function in functions]
        return {
            "input": HI,
            "tools": flat,
            "tool_choice": choice if isinstance(choice, str) else {"type": "function", "name": "write"},
        }
    return {"messages": HI, "tools": tools(), "tool_choice": choice}


STOP_FIELDS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"stop": ["STOP"]},
    "/v1/messages": {"stop_sequences": ["STOP"]},
    "/v1/responses": {"stop": ["STOP"]},
}


CALLED = {
    "/v1/chat/completions": '"finish_reason":"tool_calls"',
    "/v1/messages": '"stop_reason":"tool_use"',
}


def say(node: ScriptedNode, salt: str, token_ids: list[int], finish: str, *, per_step: int) -> None:
    """Make the node answer requests of this salt with ``per_step`` tokens in a message."""

    async def script(conversation: Conversation) -> None:
        for begin in range(0, len(token_ids), per_step):
            outputs = [
                pb.Output(request=conversation.message.request, token_id=token_id, has_token=True)
                for token_id in token_ids[begin : begin + per_step]
            ]
            if begin + per_step >= len(token_ids):
                outputs[-1].finish_reason = finish
            conversation.send(pb.OutputBatch(outputs=outputs))

    node.scripts[salt] = script


@pytest.mark.parametrize("every", [6, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("form", FORMATS)
def test_client_gets_what_the_model_meant(form: str, every: int, model_dir: Path, scripted_node: ScriptedNode) -> None:
    """``every``: the fast set takes one of ``every`` ways for each text."""
    tokenizer = Tokenizer.load(model_dir)
    (end,) = tokenizer.encode("<|im_end|>", add_special_tokens=False)

    async def check(router: InProcessRouter, text: ModelText, path: str, stream: bool) -> None:
        salt = f"{form} {text.habit} {path} {stream}"
        token_ids = [*tokenizer.encode(text.text, add_special_tokens=False), end]
        say(scripted_node, salt, token_ids, text.finish, per_step=7 if stream else 1)
        fields = {**fields_of(path, form), "model": MODEL, "stream": stream, "cache_salt": salt}
        if text.opened:
            fields["chat_template_kwargs"] = {"opened": REASONING_PARSERS[reasoning_of(form)].start}
        status, data = await router.post(path, json.dumps(fields).encode())
        assert status == 200, (text.habit, data)
        assert PARTS[path](data, stream) == text.expected, (text.habit, path, stream)
        called = CALLED.get(path, "") if text.calls and text.finish == "stop" else ""
        assert called in data.decode(), (text.habit, "an agent stops")

    async def run() -> None:
        flags = ["--decode", scripted_node.address, *flags_of(form)]
        async with router_in_process(model_dir, MODEL, flags) as router:
            for number, text in enumerate(texts_of(form)):
                ways = [(path, stream) for path in PARTS for stream in (False, True)]
                await asyncio.gather(*(check(router, text, *way) for way in ways[number % every :: every]))

    assert parsers_of(form).tools is not None
    asyncio.run(run())


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "hidden"),
    [*((path, False) for path in PARTS), ("/v1/chat/completions", True), ("/v1/messages", True)],
)
def test_stop_strings_match_behind_the_reasoning(
    path: str, stream: bool, hidden: bool, model_dir: Path, scripted_node: ScriptedNode
) -> None:
    """``hidden``: the reasoning is not returned."""
    tokenizer = Tokenizer.load(model_dir)
    salt = f"stop {path} {stream} {hidden}"
    text = "<think>\nNo STOP here.\n</think>\n\nHello. STOP Not this."
    say(scripted_node, salt, tokenizer.encode(text, add_special_tokens=False), "stop", per_step=1)
    fields = {**fields_of(path, "hermes"), **STOP_FIELDS[path], "model": MODEL, "stream": stream, "cache_salt": salt}
    if hidden:
        omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
        fields |= omitted if path == "/v1/messages" else {"include_reasoning": False}

    async def run() -> bytes:
        flags = ["--decode", scripted_node.address, *flags_of("hermes")]
        async with router_in_process(model_dir, MODEL, flags) as router:
            status, data = await router.post(path, json.dumps(fields).encode())
        assert status == 200, data
        return data

    assert PARTS[path](asyncio.run(run()), stream) == ("" if hidden else "No STOP here.", "Hello. ", [])
