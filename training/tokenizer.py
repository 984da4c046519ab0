"""The embedded model's tokenizer: byte-level BPE, and a chat template like Qwen3's, with Hermes tool calls."""

from __future__ import annotations

import importlib
import inspect
import itertools
import random
from collections.abc import Iterator
from types import ModuleType

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from training.conversations import TOOLS_AFTER, TOOLS_BEFORE, Writer
from training.words import Words

VOCABULARY_SIZE = 4096
END_OF_TEXT = "<|endoftext|>"
TURN_START = "<|im_start|>"
TURN_END = "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, TURN_START, TURN_END)
TAGS = tuple(f"<{slash}{name}>" for name in ("tool_call", "tools", "tool_response") for slash in ("", "/"))

CHAT_TEMPLATE = """\
{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}
        {{- messages[0].content + '\\n\\n' }}
    {%- endif %}
    {{- TOOLS_BEFORE }}
    {%- for tool in tools %}
        {{- '\\n' }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- TOOLS_AFTER }}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- elif not (tools and loop.first and message.role == 'system') %}
        {{- '<|im_start|>' + message.role + '\\n' + (message.content or '') }}
        {%- for call in message.tool_calls or [] %}
            {%- if message.content or not loop.first %}
                {{- '\\n' }}
            {%- endif %}
            {%- set function = call.function or call %}
            {{- '<tool_call>\\n{"name": "' + function.name + '", "arguments": ' }}
            {{- function.arguments if function.arguments is string else function.arguments | tojson }}
            {{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
""".replace("TOOLS_BEFORE", repr(TOOLS_BEFORE)).replace("TOOLS_AFTER", repr(TOOLS_AFTER))

DOCSTRING_MODULES = "argparse asyncio collections datetime decimal email functools http inspect json logging math os \
pathlib random re shutil socket sqlite3 statistics string subprocess tempfile textwrap threading typing unittest urllib"

# Text is split before byte pairs are merged: contractions, words, single digits, punctuation, whitespace.
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CONVERSATIONS = 1500


def settings(max_length: int) -> dict[str, object]:
    """Return the content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TURN_END,
        "pad_token": END_OF_TEXT,
        "bos_token": None,
        "unk_token": None,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def train_tokenizer(seed: int) -> Tokenizer:
    """Train on conversations, Python's language reference and docstrings of its standard library."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(pattern=Regex(SPLIT), behavior="isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=[
            *(AddedToken(token, special=True) for token in SPECIAL_TOKENS),
            *(AddedToken(token, special=False, normalized=False) for token in TAGS),
        ],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(itertools.chain(_english(), _conversations(seed)), trainer)
    return tokenizer


def _conversations(seed: int) -> Iterator[str]:
    """Conversations without words of a vocabulary, which does not exist yet."""
    texts: list[str] = []

    def note(text: str) -> list[int]:
        texts.append(text)
        return [0] * (len(text) // 3)

    writer = Writer(Words(random.Random(seed)), note)
    for _ in range(_CONVERSATIONS):
        writer.row(640)
    yield from texts


def _english() -> Iterator[str]:
    topics: dict[str, str] = importlib.import_module("pydoc_data.topics").topics
    for name in sorted(topics):
        yield topics[name]
    for name in DOCSTRING_MODULES.split():
        yield from _docstrings(importlib.import_module(name))


def _docstrings(module: ModuleType) -> Iterator[str]:
    yield inspect.getdoc(module) or ""
    for _, member in sorted(vars(module).items()):
        if inspect.isclass(member) or inspect.isfunction(member):
            yield inspect.getdoc(member) or ""
