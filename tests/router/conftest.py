from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import small_tokenizers
from checkpoints import make_checkpoint
from fleet import Fleet, start_fleet
from machine import patience
from router_process import MODEL, RouterProcess, router_process
from scripted_node import Conversation, ScriptedNode
from tokenizers import AddedToken

from router.text.tokenizer import Tokenizer


@pytest.fixture(scope="package")
def tokenizer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A byte-level tokenizer with a chat template."""
    config = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "chat_template": small_tokenizers.CHATML}
    return small_tokenizers.write(tmp_path_factory.mktemp("small"), small_tokenizers.byte_level(), **config)


@pytest.fixture(scope="package")
def small_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model of two layers, with a byte-level tokenizer and a chat template."""
    directory = tmp_path_factory.mktemp("api")
    backend = small_tokenizers.byte_level()
    eos = backend.token_to_id("<|im_end|>")
    make_checkpoint(
        directory, "qwen3", vocab_size=512, max_position_embeddings=384, num_hidden_layers=2, eos_token_id=eos
    )
    return small_tokenizers.write(
        directory, backend, eos_token="<|im_end|>", bos_token="<|begin|>", chat_template=small_tokenizers.CHATML
    )


@pytest.fixture(scope="package")
def small_fleet(small_model: Path) -> Iterator[Fleet]:
    """A router and nodes that compute prompts of more than 32 tokens in several steps."""
    flags = ("--max-batch-tokens", "32", "--max-num-seqs", "8", "--dtype", "float32")
    with start_fleet(small_model, prefill_flags=flags, decode_flags=flags) as fleet:
        yield fleet


@pytest.fixture(scope="package")
def scripted_node() -> Iterator[ScriptedNode]:
    node = ScriptedNode(MODEL)
    yield node
    node.close()


@pytest.fixture(scope="package")
def router(tokenizer_dir: Path, scripted_node: ScriptedNode) -> Iterator[RouterProcess]:
    """A router in front of the scripted node. No other node could continue its requests."""
    flags = ["--decode", scripted_node.address, "--request-timeout", "20", "--migrations", "0"]
    with router_process(tokenizer_dir, flags) as process:
        yield process


@pytest.fixture(scope="package")
def client(router: RouterProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=router.url, timeout=patience(20), trust_env=False) as client:
        yield client


# Like Qwen3's: tools in the system's words, calls and reasoning between tags, no reasoning where it is switched off.
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "Call as <tool_call>…</tool_call>.<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}:{{ c.function.arguments.a }}</tool_call>"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)


@pytest.fixture(scope="package")
def reading_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend = small_tokenizers.byte_level()
    backend.add_special_tokens([AddedToken("[TOOL_CALLS]", special=True)])
    return small_tokenizers.write(
        tmp_path_factory.mktemp("tools"), backend, eos_token="<|im_end|>", chat_template=TEMPLATE
    )


@pytest.fixture(scope="package")
def reading_tokenizer(reading_dir: Path) -> Tokenizer:
    return Tokenizer.load(reading_dir)


@pytest.fixture(scope="package")
def reading_router(reading_dir: Path, scripted_node: ScriptedNode) -> Iterator[RouterProcess]:
    flags = ["--decode", scripted_node.address, "--trust-request-chat-template", "--max-logprobs", "-1"]
    with router_process(reading_dir, flags) as process:
        yield process


@pytest.fixture(scope="package")
def sdk(reading_router: RouterProcess) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{reading_router.url}/v1", api_key="none", max_retries=0, timeout=patience(20)) as sdk:
        yield sdk


@pytest.fixture
def say_text(
    request: pytest.FixtureRequest, scripted_node: ScriptedNode, reading_tokenizer: Tokenizer
) -> Callable[..., Any]:
    """Makes the node say a text; returns fields of a request for the SDK that gets it."""

    def register(text: str, finish: str = "stop", **extra: Any) -> dict[str, Any]:
        async def script(conversation: Conversation) -> None:
            for token_id in reading_tokenizer.encode(text, add_special_tokens=False):
                conversation.token(token_id)
            conversation.token(reading_tokenizer.encode("<|im_end|>")[0], finish=finish)

        salt = request.node.name
        scripted_node.scripts[salt] = script
        return {"model": MODEL, "extra_body": {"cache_salt": salt, **extra}}

    return register
