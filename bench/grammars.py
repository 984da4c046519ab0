"""Time of grammar work beside the step loop: loading a vocabulary, compiling a grammar, one mask per row.

python bench/grammars.py --vocabulary 151936 --rows 64
"""

from __future__ import annotations

import argparse
import random
import statistics
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from pdserve.grammar import Grammar, GrammarVocabulary, Matcher, from_regex, start_thread
from router.text.structured.structured_outputs import json_schema_grammar

END = "<|end|>"
PERSON: dict[str, Any] = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}},
        "kind": {"enum": ["a", "b"]},
    },
    "required": ["name", "age", "tags", "kind"],
    "additionalProperties": False,
}
GRAMMARS = {"schema": json_schema_grammar(PERSON), "regex": from_regex(r"[a-z]{2,20}(-[0-9]+){1,4}")}

Result = TypeVar("Result")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--vocabulary", type=int, default=151_936, metavar="N", help="tokens (default %(default)s)")
    parser.add_argument("--rows", type=int, default=64, metavar="N", help="concurrent outputs (default %(default)s)")
    parser.add_argument("--steps", type=int, default=32, metavar="N", help="tokens per output (default %(default)s)")
    args = parser.parse_args()
    done = threading.Event()

    def work() -> None:
        try:
            run(args.vocabulary, args.rows, args.steps)
        finally:
            done.set()

    start_thread(work, "bench")
    done.wait()


def run(size: int, rows: int, steps: int) -> None:
    text = byte_level(size)
    seconds, vocabulary = timed(lambda: GrammarVocabulary(text, eos_token_ids=[size - 1]))
    print(f"vocabulary of {size} tokens: {seconds * 1e3:.0f} ms, with the GIL held")
    for name, grammar in GRAMMARS.items():
        seconds, compiled = timed(partial(Grammar, grammar, vocabulary))
        print(f"{name}: compiled in {seconds * 1e3:.1f} ms")
        report(name, [follow(compiled.matcher(), steps, size - 1, random.Random(row)) for row in range(rows)])


def follow(matcher: Matcher, steps: int, end: int, rng: random.Random) -> list[float]:
    """Follow a grammar with random allowed tokens; return the seconds of each step: consume a token, make a mask."""
    found = []
    token_id: int | None = None
    for _ in range(steps):
        start = time.perf_counter()
        if token_id is not None:
            matcher.consume([token_id])
        mask = matcher.mask()
        found.append(time.perf_counter() - start)
        allowed = [at for at, byte in enumerate(mask) if byte]
        at = rng.choice(allowed)
        token_id = at * 8 + rng.choice([bit for bit in range(8) if mask[at] >> bit & 1])
        if token_id == end:
            break
    return found


def report(name: str, rows: list[list[float]]) -> None:
    first = [row[0] for row in rows]
    rest = sorted(seconds for row in rows for seconds in row[1:])
    p50, p99 = statistics.median(rest), rest[int(len(rest) * 0.99)]
    print(
        f"{name}: a row's mask p50 {p50 * 1e6:.0f} µs, p99 {p99 * 1e6:.0f} µs, max {rest[-1] * 1e6:.0f} µs; "
        f"the first of an output {statistics.median(first) * 1e6:.0f} µs; {len(rest)} masks"
    )


def timed(work: Callable[[], Result]) -> tuple[float, Result]:
    start = time.perf_counter()
    result = work()
    return time.perf_counter() - start, result


def byte_level(size: int) -> str:
    """Return a tokenizer.json with all bytes and random merges of up to 12 characters; downloads nothing."""
    rng = random.Random(0)
    pieces = sorted(pre_tokenizers.ByteLevel.alphabet())
    letters = [piece for piece in pieces if piece.isascii() and piece.isalpha()] + ["Ġ"]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    merges = []
    while len(pieces) < size - 1:
        left, right = rng.choice(pieces), rng.choice(letters) if rng.random() < 0.7 else rng.choice(pieces)
        if len(left + right) <= 12 and left + right not in vocabulary:
            vocabulary[left + right] = len(pieces)
            pieces.append(left + right)
            merges.append((left, right))
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([END])
    return str(tokenizer.to_str())


if __name__ == "__main__":
    main()
