"""Compares a runner with transformers on one checkpoint, in float32: log-probabilities, or greedy tokens.

verdict = compare(directory, prompts, runner="V1")      # EQUAL, or why the checkpoint is refused

A difference raises AssertionError. transformers may fail on a checkpoint; then ``LibraryError`` says how.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from checkpoints import library_class, node_config, reference_greedy
from stepper import Running, Stepper
from torch import Tensor

import runner
from pdserve.errors import PdserveError
from pdserve.sampling_params import SamplingParams

EQUAL = "equal"

_ATOL = 2e-4  # absolute tolerance of log-probabilities
_RTOL = 1e-4  # relative tolerance


class LibraryError(Exception):
    """transformers cannot load a checkpoint, or cannot compute with it."""


class Library:
    """The transformers model of a checkpoint, as the library loads it."""

    def __init__(self, directory: Path) -> None:
        """Raises LibraryError, also if a parameter is missing: the library would draw it at random."""
        self.model: Any
        try:
            model_class = library_class(directory)
            self.model, info = model_class.from_pretrained(directory, dtype=torch.float32, output_loading_info=True)
        except Exception as exc:  # the library's checks raise many types
            raise LibraryError(f"{type(exc).__name__}: {exc}") from exc
        if wrong := info["missing_keys"] or info["mismatched_keys"]:
            raise LibraryError(f"parameters that the checkpoint lacks: {sorted(wrong)[:3]}")
        self.model.generation_config.eos_token_id = None  # ``generate`` would forbid EOS until min_new_tokens
        self.model.eval()

    @torch.inference_mode()
    def logprobs(self, tokens: Sequence[int]) -> Tensor:
        """Return log-probabilities [tokens, vocabulary] by one forward pass over all tokens."""
        try:
            logits: Tensor = self.model(torch.tensor([list(tokens)]), use_cache=False).logits
        except Exception as exc:
            raise LibraryError(f"{type(exc).__name__}: {exc}") from exc
        return logits[0].float().log_softmax(-1)

    def greedy(self, prompt: Sequence[int], num_tokens: int) -> list[int]:
        try:
            return reference_greedy(self.model, list(prompt), num_tokens)
        except Exception as exc:
            raise LibraryError(f"{type(exc).__name__}: {exc}") from exc


def compare(
    directory: Path,
    prompts: Sequence[Sequence[int]],
    *,
    num_tokens: int = 4,
    chunk: int = 1 << 30,
    stagger: int = 0,
    library: Library | None = None,
    **options: Any,
) -> str:
    """Return EQUAL, or the reason why the checkpoint is refused. Raises LibraryError and AssertionError.

    ``chunk`` and ``stagger`` say how the Stepper cuts the prompts into steps, ``options`` go to node_config.
    """
    try:
        config = node_config(directory, **options)
        model_runner = runner.build(config, lambda stage, fraction: None)
    except PdserveError as exc:
        return str(exc)
    library = library or Library(directory)
    sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, logprobs=config.model.vocab_size)
    results = Stepper(model_runner).generate(prompts, num_tokens, sampling, chunk=chunk, stagger=stagger)
    model_runner.close()
    for result in results:
        if config.model.rope.rope_type == "dynamic":  # one pass over all tokens is another function
            library.logprobs([0])  # resets the frequencies, which the library keeps from a longer sequence
            expected = library.greedy(result.tokens[: result.prompt_len], num_tokens)
            assert result.output == expected, f"{result.output} and not {expected} after {result.prompt_len} tokens"
        else:
            logprobs = library.logprobs(result.tokens)[result.prompt_len - 1 : -1]
            torch.testing.assert_close(logprobs_of(result), logprobs, atol=_ATOL, rtol=_RTOL)
    return EQUAL


def logprobs_of(sequence: Running) -> Tensor:
    """Return the log-probabilities [outputs, vocabulary] of a sequence that requested all."""
    rows = []
    for sample in sequence.samples:
        assert sample.logprobs is not None
        row = torch.empty(len(sample.logprobs.top_ids))
        row[list(sample.logprobs.top_ids)] = torch.tensor(sample.logprobs.top_logprobs)
        rows.append(row)
    return torch.stack(rows)


def edited(source: Path, target: Path, fields: dict[str, Any], without: Sequence[str] = ()) -> Path:
    """Copy a checkpoint with other fields in its config.json, and without some."""
    target.mkdir(parents=True)
    for path in source.iterdir():
        if path.name == "config.json":
            config = {name: value for name, value in json.loads(path.read_text()).items() if name not in without}
            (target / path.name).write_text(json.dumps(config | fields))
        else:
            shutil.copy(path, target / path.name)
    return target


def random_prompts(numbers: random.Random, vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    return [[numbers.randrange(vocab_size) for _ in range(length)] for length in lengths]
