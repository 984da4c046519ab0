"""A fleet that serves a random checkpoint with a vision tower, whose answers are compared with the library's.

served = Served(directory, fleet)       # a Fleet with nodes of this checkpoint
served.check(conversations(1, 8))       # tokens, log-probabilities, texts and usage
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gemma_images
import httpx
import torch
from answers import Answer
from fleet import MODEL_NAME, Fleet, NodeProcess
from image_chats import Message, RandomChats, library_prompt
from image_checkpoints import PIXTRAL_TOKENS, VISION_TOKENS, ImageReference
from machine import patience

BLOCK = 16  # tokens
FLAGS = ("--block-size", str(BLOCK), "--max-num-seqs", "8", "--max-model-len", "4096")
BATCH_TOKENS = 48  # less than many images have
OUTPUT = 16  # tokens of an answer
TOLERANCE = 1e-3  # largest difference of log-probabilities


def flags_of(directory: Path) -> tuple[str, ...]:
    """Return the flags of a node. A step of Gemma has room for a whole image beside decodes."""
    kind = json.loads((directory / "config.json").read_text())["model_type"]
    tokens = gemma_images.MOST_TOKENS + 10 if kind.startswith("gemma") else BATCH_TOKENS
    return (*FLAGS, "--max-batch-tokens", str(tokens))


class Served:
    """A fleet that serves a random checkpoint, and the library's model of it."""

    def __init__(self, directory: Path, fleet: Fleet) -> None:
        self.fleet = fleet
        self.reference = ImageReference(directory)
        fleet.start_router(directory)
        fleet.wait_ready()
        if fleet.prefill:
            fleet.wait_until(lambda: all(self._is_connected(node) for node in fleet.decode), 30.0)
        names = PIXTRAL_TOKENS.values() if self.reference.is_pixtral else VISION_TOKENS
        names = names if self.reference.gemma is None else gemma_images.TOKENS
        tokens = self.reference.tokenizer.convert_tokens_to_ids(list(names))
        self._vision_tokens = frozenset(tokens)

    def check(self, conversations: Sequence[list[Message]], output: int = OUTPUT, **fields: Any) -> None:
        """Send conversations at once, and compare the answers."""
        with ThreadPoolExecutor(len(conversations)) as pool:
            answers = list(pool.map(lambda messages: self.ask(messages, output, **fields), conversations))
        for messages, answer in zip(conversations, answers, strict=True):
            self.compare(messages, answer)

    def ask(self, messages: list[Message], output: int, **fields: Any) -> dict[str, Any]:
        body = {"model": MODEL_NAME, "messages": messages, "max_tokens": output, "temperature": 0.0, "logprobs": True}
        body |= {"ignore_eos": True, "return_token_ids": True, **fields}
        url = f"{self.fleet.url}/v1/chat/completions"
        response = httpx.post(url, json=body, timeout=patience(120.0), trust_env=False)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def compare(self, messages: list[Message], response: dict[str, Any]) -> None:
        """Compare the tokens up to one that the library would take for an image."""
        ids, images = library_prompt(self.reference, messages)
        answer = Answer()
        answer.add(response)
        assert response["prompt_token_ids"] == ids
        assert answer.prompt_tokens == len(ids)
        assert answer.image_tokens == sum(map(self.reference.num_tokens, images))
        choice = answer.choices[0]
        tokens = choice.token_ids
        end = next((at for at, token in enumerate(tokens) if token in self._vision_tokens), len(tokens) - 1)
        logits = self.reference.logits(ids + tokens[:end], images)[len(ids) - 1 :]
        expected = logits.float().log_softmax(-1)
        actual = torch.tensor(choice.logprobs[: end + 1])
        torch.testing.assert_close(actual, expected.max(-1).values, atol=TOLERANCE, rtol=0.0)
        of_tokens = expected.gather(-1, torch.tensor(tokens[: end + 1])[:, None])[:, 0]
        torch.testing.assert_close(actual, of_tokens, atol=TOLERANCE, rtol=0.0)  # another one is as likely
        assert choice.text == self.reference.tokenizer.decode(tokens, skip_special_tokens=True)

    def compare_choices(self, messages: list[Message], response: dict[str, Any]) -> None:
        """Compare the log-probabilities of sampled tokens, up to one that the library would take for an image."""
        ids, images = library_prompt(self.reference, messages)
        answer = Answer()
        answer.add(response)
        for choice in answer.choices.values():
            tokens = choice.token_ids
            end = next((at for at, token in enumerate(tokens) if token in self._vision_tokens), len(tokens) - 1)
            logits = self.reference.logits(ids + tokens[:end], images)[len(ids) - 1 :]
            sampled = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens[: end + 1])[:, None])[:, 0]
            torch.testing.assert_close(torch.tensor(choice.logprobs[: end + 1]), sampled, atol=TOLERANCE, rtol=0.0)

    def ends_in_last_block(self, messages: list[Message]) -> bool:
        """Whether the last image ends in the last block of the prompt, which is not full."""
        ids, _ = library_prompt(self.reference, messages)
        last = max(at for at, token in enumerate(ids) if token == self.reference.image_token_id)
        return last >= len(ids) // BLOCK * BLOCK

    def migrations(self, reason: str) -> float:
        lines = httpx.get(f"{self.fleet.url}/metrics", trust_env=False, timeout=patience(5.0)).text.splitlines()
        series = f'pdserve_migrations_total{{reason="{reason}"'
        return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(series))

    def _is_connected(self, node: NodeProcess) -> bool:
        return len(node.describe().connected_peers) == len(self.fleet.prefill)


def conversations(seed: int, count: int, longest: int = 200) -> list[list[Message]]:
    chats = RandomChats(random.Random(seed))
    return [chats.draw(longest) for _ in range(count)]
