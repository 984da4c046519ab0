"""Codex CLI runs a command with its own tool and answers; the model's words are scripted."""

from __future__ import annotations

from pathlib import Path

import pytest
import small_tokenizers
from environment import Environment
from router_process import MODEL, router_process
from scripted_node import Conversation, ScriptedNode

from router.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.clients, pytest.mark.timeout(400)]

# Strict, as those of many models: one system message, in front.
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


def test_agent_calls_its_tool_and_answers(tmp_path: Path) -> None:
    codex = Environment("codex")
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
            (tmp_path / "codex").mkdir()
            (tmp_path / "codex/config.toml").write_text(CONFIG.format(model=MODEL, url=router.url))
            variables = {"CODEX_HOME": str(tmp_path / "codex"), "HOME": str(tmp_path)}
            flags = ["--skip-git-repo-check", "--sandbox", "danger-full-access", "--cd", str(tmp_path)]
            output = codex.run(["codex", "exec", *flags, f"What is in {secret}?"], variables)
    finally:
        node.close()
    assert output.rstrip().endswith("It says xylophone.")
