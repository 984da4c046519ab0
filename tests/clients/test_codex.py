"""Codex CLI runs a command with its own tool and answers, in scripted words; and talks to the embedded model."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import small_tokenizers
from environment import Environment
from fleet import MODEL_NAME, start_fleet
from router_process import MODEL, router_process
from scripted_node import Conversation, ScriptedNode

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from router.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

# Strict, like templates of many models: one system message, in front.
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'system' and not loop.first %}{{ raise_exception('late system') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think></think> #}"
)
CALL = '<think>I look.</think><tool_call>{"name": "exec_command", "arguments": {"cmd": "cat %s"}}</tool_call>'
CONFIG = """model = "{model}"
model_provider = "local"
[model_providers.local]
name = "local"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""
TAIL = 2000  # characters of a prompt that have the last result
PROMPT = 13_000  # tokens of the agent's first prompt, in the embedded model's vocabulary


def run(url: str, model: str, directory: Path, task: str, statuses: tuple[int, ...] = (0,)) -> str:
    """Run the program for one task, and return its output."""
    codex = Environment("codex")
    (directory / "codex").mkdir()
    (directory / "codex/config.toml").write_text(CONFIG.format(model=model, url=url))
    variables = {"CODEX_HOME": str(directory / "codex"), "HOME": str(directory)}
    flags = ["--skip-git-repo-check", "--sandbox", "danger-full-access", "--cd", str(directory)]
    return codex.run(["codex", "exec", *flags, task], variables, statuses)


def test_agent_calls_its_tool_and_answers(tmp_path: Path) -> None:
    files = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (tmp_path / "model").mkdir()
    model = small_tokenizers.write(tmp_path / "model", small_tokenizers.byte_level(), **files)
    tokenizer = Tokenizer.load(model)
    secret = tmp_path / "secret.txt"
    secret.write_text("The word is xylophone.")
    node = ScriptedNode(MODEL, max_model_len=1_000_000)

    async def script(conversation: Conversation) -> None:
        result_read = "xylophone" in tokenizer.decode(conversation.prompt)[-TAIL:]
        text = "It says xylophone." if result_read else CALL % secret
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            conversation.token(token_id)
        conversation.token(tokenizer.encode("<|im_end|>")[0], finish="stop")

    node.scripts[""] = script
    try:
        with router_process(model, ["--decode", node.address]) as router:
            output = run(router.url, MODEL, tmp_path, f"What is in {secret}?")
    finally:
        node.close()
    assert output.rstrip().endswith("It says xylophone.")


def test_agent_talks_to_the_embedded_model_on_p_and_d(tmp_path: Path) -> None:
    """The prompt is longer than the model's context. With a longer one in its config.json the model says noise."""
    model = tmp_path / "model"
    shutil.copytree(EMBEDDED_MODEL, model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 4 * PROMPT}))
    with start_fleet(model, 1) as fleet:
        output = run(fleet.url, MODEL_NAME, tmp_path, "Hello")
    said, used = output.partition("\ncodex\n")[2].split("\ntokens used\n")
    assert said.strip()
    assert int(used.split()[0].replace(",", "")) > PROMPT


def test_agent_says_that_the_context_is_too_short(tmp_path: Path) -> None:
    with start_fleet(EMBEDDED_MODEL, 0) as fleet:
        assert "ran out of room in the model's context window" in run(fleet.url, MODEL_NAME, tmp_path, "Hello", (0, 1))
