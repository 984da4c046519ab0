"""A fleet that serves a random checkpoint, and whose answers are compared with transformers' in float32."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from any_models import make_any_checkpoint
from checkpoints import make_checkpoint, reference_greedy, reference_model
from fleet import RUNNER_ENVIRONMENTS, Fleet, add_tokenizer

BLOCK, STEP, OUTPUT = 4, 48, 24  # tokens: of a block, a step and an answer
FLAGS: tuple[str, ...] = ("--block-size", str(BLOCK), "--max-batch-tokens", str(STEP), "--max-num-seqs", "8")
FLAGS += ("--max-model-len", "400", "--threads", "1", "--kv-checksum", "on")
SPLITS = {"1": (), "tp2": ("--tp", "2"), "pp2": ("--pp", "2")}


def random_prompt(seed: int, length: int) -> list[int]:
    return random.Random(seed).choices(range(3, 128), k=length)


class Model(NamedTuple):
    """A random checkpoint, of a native family or of the library."""

    family: str
    fields: Mapping[str, Any]
    from_library: bool = False

    def make(self, path: Path) -> Path:
        make = make_any_checkpoint if self.from_library else make_checkpoint
        return add_tokenizer(make(path, self.family, **self.fields))


class Served:
    """A fleet of some prefill and decode nodes. All prompts are handed off."""

    def __init__(
        self, model: Model, path: Path, prefill: Sequence[str] = ("1",), decode: Sequence[str] = ("1",), *,
        flags: Sequence[str] = (), runner: str = "V1",
    ) -> None:  # fmt: skip
        directory, environ = model.make(path), RUNNER_ENVIRONMENTS[runner]
        self.reference = reference_model(directory)
        self.fleet = Fleet()
        for split in prefill:
            self.fleet.start_prefill(directory, (*FLAGS, *flags, *SPLITS[split]), environ)
        for split in decode:
            more = (*flags, *SPLITS[split], "--handoff-min-tokens", "0")
            self.fleet.start_decode(directory, (*FLAGS, *more), environ)
        self.fleet.start_router(directory)

    def __enter__(self) -> Served:
        self.fleet.wait_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.fleet.close()

    def reference_of(self, prompt: list[int], output: int) -> list[int]:
        return reference_greedy(self.reference, prompt, output)

    def check(self, prompts: Sequence[list[int]], output: int = OUTPUT) -> None:
        """Send prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            found = list(pool.map(lambda prompt: self.fleet.complete(prompt, output), prompts))
        for prompt, tokens in zip(prompts, found, strict=True):
            assert tokens == self.reference_of(prompt, output), f"a prompt of {len(prompt)} tokens"

    @contextmanager
    def running(self, prompt: list[int], output: int) -> Iterator[Future[list[int]]]:
        """Send a prompt, whose answer is computed meanwhile."""
        with ThreadPoolExecutor(1) as pool:
            yield pool.submit(lambda: self.fleet.complete(prompt, output))

    def wait_idle(self) -> None:
        for node in self.fleet.nodes:
            status = node.wait_idle()
            assert status.free_blocks == status.total_blocks
