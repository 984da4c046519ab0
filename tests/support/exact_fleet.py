"""A fleet that serves a random checkpoint, and whose answers are compared with transformers' in float32."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from any_models import make_any_checkpoint
from checkpoints import make_checkpoint, make_eagle3, reference_greedy, reference_model
from fleet import RUNNER_ENVIRONMENTS, Fleet, NodeProcess, add_tokenizer

from pdserve.config.runner_oracle import VARIABLE

BLOCK = 4  # tokens
STEP = 48  # tokens
OUTPUT = 24  # tokens of an answer
FLAGS: tuple[str, ...] = ("--block-size", str(BLOCK), "--max-batch-tokens", str(STEP), "--max-num-seqs", "8")
FLAGS += ("--max-model-len", "400", "--threads", "1", "--kv-checksum", "on")
ALWAYS = ("--speculate-when", "always")
KINDS = {  # flags by kind of node
    "1": (),
    "tp2": ("--tp", "2"),
    "pp2": ("--pp", "2"),
    "mtp": ("--speculate", "mtp", *ALWAYS),
    "lookup": ("--speculate", "lookup", *ALWAYS),
    "first": ("--decode-ahead", "0"),  # on P: its first token is its last
}
HEADS = ("eagle3", "other-eagle3")


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
    """A fleet of some prefill and decode nodes, each of one KIND or several. All prompts are handed off."""

    def __init__(
        self, model: Model, path: Path, prefill: Sequence[str] = ("1",), decode: Sequence[str] = ("1",), *,
        flags: Sequence[str] = (), decode_flags: Sequence[str] = (), runner: str = "V1", device: str = "cpu",
    ) -> None:  # fmt: skip
        directory = model.make(path)
        environ = RUNNER_ENVIRONMENTS[runner]
        if device != "cpu":
            environ = {VARIABLE: environ[VARIABLE]}
            flags = (*flags, "--device", device)
        self.reference = reference_model(directory)
        self.fleet = Fleet()
        for kinds in prefill:
            self.fleet.start_prefill(directory, (*FLAGS, *flags, *_flags_of(kinds, directory)), environ)
        for kinds in decode:
            more = (*flags, *decode_flags, *_flags_of(kinds, directory), "--handoff-min-tokens", "0")
            self.fleet.start_decode(directory, (*FLAGS, *more), environ)
        self.fleet.start_router(directory)

    def __enter__(self) -> Served:
        self.fleet.wait_ready()
        return self

    def __exit__(self, *exc: object) -> None:
        self.fleet.close()

    def reference_of(self, prompt: list[int], output: int, guess: Sequence[int] = ()) -> list[int]:
        return reference_greedy(self.reference, prompt, output, guess)

    def check(self, prompts: Sequence[list[int]], output: int = OUTPUT) -> None:
        """Send prompts at once."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            answers = list(pool.map(lambda prompt: self.fleet.complete(prompt, output), prompts))
        for prompt, tokens in zip(prompts, answers, strict=True):
            assert tokens == self.reference_of(prompt, output, tokens), f"a prompt of {len(prompt)} tokens"

    def wait_idle(self) -> None:
        for node in self.fleet.nodes:
            status = node.wait_idle()
            assert status.free_blocks == status.total_blocks


def check_unequal_pages(model: Model, path: Path, prefill: str, decode: str) -> None:
    """Hand a prompt off from a node with pages of 2 tokens to one with pages of 8."""
    directory = model.make(path)
    prompt = random_prompt(1, 101)
    of_2, of_8 = (("--block-size", "8", "--kernel-block-size", page) for page in "28")
    with Fleet() as fleet:
        fleet.start_prefill(directory, (*FLAGS, *of_2, *_flags_of(prefill, directory)))
        fleet.start_decode(directory, (*FLAGS, *of_8, *_flags_of(decode, directory), "--handoff-min-tokens", "0"))
        fleet.start_router(directory)
        fleet.wait_ready()
        tokens = fleet.complete(prompt, OUTPUT)
        assert tokens == reference_greedy(reference_model(directory), prompt, OUTPUT, tokens)
        assert (fleet.decode[0].counter("handoffs"), fleet.decode[0].counter("handoff_failures")) == (1, 0)


def check_preemption(served: Served) -> None:
    """Send more than the decode node's blocks hold."""
    served.check([random_prompt(index, 60 + 7 * index) for index in range(8)], output=60)
    assert served.fleet.decode[0].counter("preemptions") > 0
    served.wait_idle()


def _flags_of(kinds: str, directory: Path) -> list[str]:
    """Return the flags of a node that serves ``directory``. Kinds with a name of HEADS draft with a head made there."""
    words: list[str] = []
    for kind in kinds.split():
        if kind in HEADS and not (directory / kind).exists():
            make_eagle3(directory / kind, directory, seed=HEADS.index(kind))
        words += ["--speculate", f"eagle3:{directory / kind}", *ALWAYS] if kind in HEADS else KINDS[kind]
    return words


def check_turns_of_an_agent(served: Served, turns: int) -> None:
    """Turns with tool results, branches and retries over one prefix, on two nodes of each role; a decode node dies."""
    rng = random.Random(3)
    conversation = random_prompt(1, 40)
    for turn in range(turns):
        prompt = [*conversation, *random_prompt(turn, rng.randrange(1, 9))]
        served.check([prompt] * (1 + turn % 2), output=6)  # and a retry at once
        if turn % 3 == 2:  # a branch from an earlier point
            served.check([[*prompt[: rng.randrange(20, len(prompt))], turn]], output=6)
        conversation = [*prompt, *served.reference_of(prompt, 6)]
        if turn == 8:
            served.fleet.decode[0].kill()
    assert sum(node.counter("prefix_cached_tokens") for node in served.fleet.prefill) > 0


def check_moved_answer(served: Served) -> None:
    """One of two decode nodes dies while it computes an answer."""
    prompt = random_prompt(5, 90)

    def busy() -> NodeProcess | None:
        return next((node for node in nodes if node.counter("sampled_tokens") > before[node.name] + 20), None)

    nodes = [node for node in served.fleet.decode if node.child.running]
    before = {node.name: node.counter("sampled_tokens") for node in nodes}
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(lambda: served.fleet.complete(prompt, 200))
        served.fleet.wait_until(lambda: busy() is not None, 30.0)
        node = busy()
        assert node is not None
        node.kill()
        assert answer.result() == served.reference_of(prompt, 200, answer.result())
