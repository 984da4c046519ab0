"""Claude Code reads a file with its own tool and answers, in scripted words; it names a context that is too short."""

from __future__ import annotations

from collections.abc import Collection, Mapping
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

TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}{# <think></think> #}"
)
CALL = '<think>I must look.</think>I read it.<tool_call>{"name": "Read", "arguments": {"file_path": "%s"}}</tool_call>'
TAIL = 2000  # characters of a prompt that have the last result

NO_KEY = {"ANTHROPIC_API_KEY": "none"}


def run(
    url: str, model: str, directory: Path, task: str, more: Mapping[str, str], statuses: Collection[int] = (0,)
) -> str:
    """Run the program for one task with ``more`` variables, and return its output."""
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_MODEL": model,
        "ANTHROPIC_SMALL_FAST_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "HOME": str(directory),
        **more,
    }
    flags = ["--allowedTools", "Read", "--add-dir", str(directory)]
    return Environment("claude-code").run(["claude", "-p", task, *flags], variables, statuses)


@pytest.mark.parametrize("header", ["ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"])
def test_agent_calls_its_tool_and_answers(tmp_path: Path, header: str) -> None:
    files = {"eos_token": "<|im_end|>", "chat_template": TEMPLATE}
    (tmp_path / "model").mkdir()
    model = small_tokenizers.write(tmp_path / "model", small_tokenizers.byte_level(), **files)
    tokenizer = Tokenizer.load(model)
    secret = tmp_path / "secret.txt"
    secret.write_text("The word is xylophone.")
    node = ScriptedNode(MODEL, max_model_len=1_000_000)  # the agent's prompt has 64,000 tokens of a small vocabulary

    async def script(conversation: Conversation) -> None:
        result_read = "xylophone" in tokenizer.decode(conversation.prompt)[-TAIL:]
        text = "It says xylophone." if result_read else CALL % secret
        for token_id in tokenizer.encode(text, add_special_tokens=False):
            conversation.token(token_id)
        conversation.token(tokenizer.encode("<|im_end|>")[0], finish="stop")

    node.scripts[""] = script
    try:
        with router_process(model, ["--decode", node.address]) as router:
            output = run(router.url, MODEL, tmp_path, f"What is in {secret}?", {header: "none"})
    finally:
        node.close()
    assert "It says xylophone." in output


def test_agent_says_that_the_context_is_too_short(tmp_path: Path) -> None:
    with start_fleet(EMBEDDED_MODEL, 0) as fleet:
        assert "Prompt is too long" in run(fleet.url, MODEL_NAME, tmp_path, "Hello", NO_KEY, (0, 1))
