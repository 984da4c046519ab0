"""Data sets of ``pdserve bench``: prompts of a file, and answers that are as long as the recorded ones.

A file is ShareGPT's JSON, a list of ``{"conversations": [{"from": "human", "value": …}, {"from": "gpt", "value": …},
…]}``, or has a JSON object per line: ``{"prompt": …, "output_tokens": …}``, the latter optional.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from pdserve.errors import ConfigError

_ANSWER_TOKENS = 256  # output tokens of an example without a recorded answer
_CHARACTERS = 4  # per token of English text; the model's tokenizer is the server's
_HUMAN = ("human", "user")


class Example(NamedTuple):
    """A prompt, and the tokens of its answer."""

    text: str
    num_tokens: int


class _Turn(msgspec.Struct):
    speaker: str = msgspec.field(name="from", default="")
    value: str = ""


class _Conversation(msgspec.Struct):
    conversations: list[_Turn] = []


class _Line(msgspec.Struct):
    prompt: str
    output_tokens: int | None = None


def read_dataset(path: Path) -> list[Example]:
    """Return the examples of a file: of a conversation, the first question and its answer. Raises ConfigError."""
    try:
        data = path.read_bytes()
        is_list = data.lstrip()[:1] == b"["
        examples = _of_conversations(data) if is_list else _of_lines(data)
    except OSError as exc:
        raise ConfigError(f"--dataset-path {path} cannot be read: {exc.strerror}") from exc
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        text = 'use ShareGPT\'s JSON, or lines like {"prompt": "…", "output_tokens": 64}'
        raise ConfigError(f"--dataset-path {path} is not a data set ({exc}); {text}") from exc
    if not examples:
        raise ConfigError(f"--dataset-path {path} has no question with an answer; name another file")
    return examples


def _of_conversations(data: bytes) -> list[Example]:
    examples = []
    for conversation in msgspec.json.decode(data, type=list[_Conversation]):
        match conversation.conversations:
            case [question, answer, *_] if question.speaker in _HUMAN and question.value and answer.value:
                examples.append(Example(question.value, max(1, len(answer.value) // _CHARACTERS)))
    return examples


def _of_lines(data: bytes) -> list[Example]:
    lines = (msgspec.json.decode(line, type=_Line) for line in data.splitlines() if line.strip())
    return [Example(line.prompt, max(1, line.output_tokens or _ANSWER_TOKENS)) for line in lines if line.prompt]
