"""Trains the embedded model for a given time: data from worker processes, progress lines, a checkpoint every 30 s."""

from __future__ import annotations

import argparse
import json
import math
import os
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from training.batches import SLOT, Batch, BatchSource, Generator, sections_at
from training.checkpoint import copy_settings, random_weights, read_weights, write_weights
from training.conversations import TALK
from training.model import TrainedModel
from training.optimizer import Optimizer

_WARM_UP = 150  # steps
_CONSTANT = 0.35  # share of the time
_LAST = 0.01  # factor of the rates at the end
_RESERVED = 15.0  # seconds at the end for the last evaluation and checkpoint
_HELD_OUT_SEED = 990_000
_EMBEDDED_MODEL = Path(__file__).resolve().parents[1] / "models" / "tiny"


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="scripts/train-embedded-model", description=__doc__)
    flags.add_argument("--out", type=Path, required=True, help="directory of the trained model")
    flags.add_argument("--minutes", type=float, default=7.0, help="time in all, with start and compilation")
    flags.add_argument("--init", type=Path, help="go on from the weights in this directory (default: random weights)")
    flags.add_argument("--model", type=Path, default=_EMBEDDED_MODEL, help="directory of config and tokenizer")
    flags.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    flags.add_argument("--slots", type=int, default=48, help="a batch has this many times --longest tokens")
    flags.add_argument("--longest", type=int, default=SLOT, help="tokens of the longest rows")
    flags.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1), help="generating processes")
    flags.add_argument("--report-every", type=float, default=30.0, help="seconds between checkpoints")
    flags.add_argument("--seed", type=int, default=20)
    flags.add_argument("--start-at", type=float, default=0.0, help="start at this share of the curriculum, 0 to 1")
    flags.add_argument("--rate", type=float, default=1.0, help="factor of the learning rates; below 1 with --init")
    flags.add_argument("--talk", type=float, default=TALK, help="weight of conversations without a document")
    flags.add_argument("--no-compile", action="store_true", help="do not use torch.compile")
    return flags


class Trainer:
    def __init__(self, options: argparse.Namespace, began: float) -> None:
        """``began`` is the time.monotonic() from which ``--minutes`` count."""
        self._options = options
        self._began = began
        self._device = torch.device(options.device)
        self._end = began + options.minutes * 60 - min(_RESERVED, options.minutes * 6)
        config = json.loads((options.model / "config.json").read_text())
        tokenizer = options.model / "tokenizer.json"
        self._shape = (options.slots, options.longest)
        self._source = BatchSource(tokenizer, options.seed, self._shape, options.workers, options.talk)
        self._held_out = Generator(tokenizer, _HELD_OUT_SEED, evaluating=True).batch(self._sections(1.0))
        weights = read_weights(options.init) if options.init else random_weights(config)
        if not options.init:
            _scale(weights)
        self._model = TrainedModel(config, weights, self._device)
        self._optimizer = Optimizer(self._model.parameters)
        self._good = self._model.weights()
        self._rate: float = options.rate
        self._log: list[str] = []

    def run(self) -> None:
        """Train until the time is over. The weights in ``--out`` are never older than two reports."""
        copy_settings(self._options.model, self._options.out)
        if not self._options.no_compile:
            self._model.compile()
        self._first_step()
        started = reported = time.monotonic()
        losses: list[Tensor] = []
        progress = 0.0
        step = 0
        while progress < 1.0:
            progress = min(1.0, (time.monotonic() - started) / max(1.0, self._end - started))
            batch = self._source.next(self._curriculum(progress))
            losses.append(self._step(batch, self._rate * _factor(progress, step)))
            step += 1
            if time.monotonic() - reported > self._options.report_every or progress >= 1.0:
                loss = float(torch.stack(losses).mean())
                now = time.monotonic()
                speed = len(losses) * len(batch.tokens) / (now - reported)
                self._report(f"step {step} {progress:4.0%} loss {loss:.4f} {speed / 1e6:.3f} M tokens/s", loss)
                losses = []
                reported = time.monotonic()
        self._source.close()

    def _curriculum(self, progress: float) -> float:
        start: float = self._options.start_at
        return start + (1 - start) * progress

    def _sections(self, progress: float) -> list[tuple[int, int]]:
        return sections_at(progress, *self._shape)

    def _first_step(self) -> None:
        """Compile; without a working compiler, go on without it."""
        batch = self._source.next(0.0)
        try:
            self._step(batch, 0.0)
        except Exception as exc:
            if self._options.no_compile:
                raise
            self._note(f"torch.compile does not work here ({type(exc).__name__}: {str(exc)[:300]}); going on without")
            self._model.uncompile()
            self._step(batch, 0.0)
        if self._device.type == "cuda":
            torch.cuda.synchronize()
        self._note(f"the first step took until {time.monotonic() - self._began:.0f} s")

    def _step(self, batch: Batch, factor: float) -> Tensor:
        tokens, where, targets = self._on_device(batch)
        hidden = self._model.hidden(tokens, batch.sections)
        loss = self._model.loss(hidden.index_select(0, where), targets)
        loss.backward()
        self._optimizer.step(factor)
        return loss.detach()

    def _on_device(self, batch: Batch) -> tuple[Tensor, Tensor, Tensor]:
        arrays = (batch.tokens, batch.where, batch.targets)
        tensors = [torch.from_numpy(array.astype(np.int64)) for array in arrays]
        if self._device.type == "cuda":
            tensors = [tensor.pin_memory().to(self._device, non_blocking=True) for tensor in tensors]
        tokens, where, targets = tensors
        return tokens, where, targets

    def _report(self, text: str, loss: float) -> None:
        """Print a progress line and write a checkpoint, or go back to the last one if the loss is no number."""
        repeated = f"repeated {self._source.repeated / max(1, self._source.taken):.0%}"
        if not math.isfinite(loss):
            self._rate /= 2
            self._model.load(self._good)
            self._optimizer.forget()
            self._note(f"{text} {repeated}: back to the last checkpoint, with half the learning rate")
            return
        self._good = self._model.weights()
        write_weights(self._options.out, self._good)
        self._note(f"{text} {repeated} | {self._accuracy()}")

    @torch.no_grad()
    def _accuracy(self) -> str:
        """Return the share of held-out answers that greedy decoding gives word for word, by task: all, longest rows."""
        batch = self._held_out
        with torch.enable_grad():  # as in a step, so that nothing is compiled again
            tokens, where, targets = self._on_device(batch)
            hidden = self._model.hidden(tokens, batch.sections).detach()
        wrong = (self._model.predicted(hidden.index_select(0, where)) != targets) & (targets >= 0)
        failed = set(batch.spans[wrong.cpu().numpy()].tolist())
        asked = Counter[tuple[str, bool]]()
        right = Counter[tuple[str, bool]]()
        for index, (task, length) in enumerate(batch.tasks):
            for long in {False, length == self._options.longest}:
                asked[task, long] += 1
                right[task, long] += index not in failed
        shares = {key: f"{right[key] / count:.0%}" for key, count in asked.items()}
        tasks = sorted({task for task, _ in asked})
        return " ".join(f"{task} {shares[task, False]}/{shares.get((task, True), '-')}" for task in tasks)

    def _note(self, text: str) -> None:
        line = f"{time.monotonic() - self._began:6.1f} s {text}"
        print(line, flush=True)
        self._log.append(line)
        self._options.out.mkdir(parents=True, exist_ok=True)
        (self._options.out / "training.log").write_text("\n".join(self._log) + "\n", encoding="utf-8")


def _factor(progress: float, step: int) -> float:
    """Return the learning rate's factor: warm-up, constant, then a cosine down."""
    decayed = max(0.0, (progress - _CONSTANT) / (1 - _CONSTANT))
    return min(1.0, (step + 1) / _WARM_UP) * (_LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * decayed)))


def _scale(weights: dict[str, Any]) -> None:
    """Make random weights fit for training: a small embedding, and layers that add little at first."""
    weights["model.embed_tokens.weight"] *= 0.5
    for name, tensor in weights.items():
        if name.endswith(("o_proj.weight", "down_proj.weight")):
            tensor *= 0.2


def main(arguments: Sequence[str] | None = None) -> None:
    began = time.monotonic()
    options = parser().parse_args(arguments)
    torch.manual_seed(options.seed)
    Trainer(options, began).run()
