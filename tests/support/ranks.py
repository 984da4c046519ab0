"""Runners of several ranks, each in its own process: ``answers_of_ranks`` starts them and returns their samples.

Run as a script it is one rank: rank and cases come from stdin, answers go to stdout, as JSON.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import msgspec
from stepper import Running, Stepper
from triton_interpreter import make_interpreter_faster

import runner
from pdserve.adapters.adapter import Adapter, AdapterSlot
from pdserve.config.node_config import NodeConfig
from pdserve.images import EncodedImage, Images
from pdserve.logprobs import TokenLogprobs
from pdserve.sampling_params import SamplingParams

_ROOT = Path(__file__).parents[2]


class Case(msgspec.Struct, frozen=True):
    """Prompts that run together, once per set of sampling parameters."""

    config: NodeConfig  # any rank's
    prompts: tuple[tuple[int, ...], ...]
    samplings: tuple[SamplingParams, ...]
    num_tokens: int
    chunk: int = 1 << 30  # tokens of a prompt in one step
    images: tuple[Images, ...] = ()  # by prompt; empty: none has any
    pixels: tuple[EncodedImage, ...] = ()
    adapters: tuple[Adapter, ...] = ()  # loaded into the slots from 0 on
    adapter_slots: tuple[int, ...] = ()  # by prompt; empty: all have the base


class Outcome(msgspec.Struct, frozen=True):
    """Result of one prompt."""

    tokens: tuple[int, ...]
    logprobs: tuple[TokenLogprobs | None, ...]


class _Order(msgspec.Struct, frozen=True):
    rank: int
    cases: tuple[tuple[str | int, Case], ...]  # (rendezvous address, case); rank 0 has file descriptors


class Answer(msgspec.Struct, frozen=True):
    """Result of one rank for a case."""

    num_blocks: int
    outcomes: tuple[Outcome, ...]  # by sampling parameters, then by prompt


def answer_of(case: Case, rank: int = 0, rendezvous: str | int = "") -> Answer:
    """Run a case as one of its ranks, in this process. On GPUs, each rank has its own."""
    device = case.config.device
    if device.kind == "cuda":
        device = msgspec.structs.replace(device, index=rank)
    config = case.config.for_rank(rank, device)
    where = rendezvous if isinstance(rendezvous, str) else socket.socket(fileno=rendezvous)
    model_runner = runner.build(config, lambda stage, fraction: None, where)
    stepper = Stepper(model_runner)
    stepper.samples = config.position.is_last
    stepper.pixels = {image.digest: image for image in case.pixels}
    for slot, adapter in enumerate(case.adapters):
        model_runner.load_adapter(adapter)
        stepper.filling.append(AdapterSlot(slot, adapter.digest))
    generated: list[Running] = []
    for sampling in case.samplings:
        generated += stepper.generate(
            case.prompts,
            case.num_tokens,
            sampling,
            case.chunk,
            stagger=1,
            images=case.images,
            adapter_slots=case.adapter_slots,
        )
    num_blocks = model_runner.kv_layout.num_blocks
    getattr(model_runner, "_parallel").all_reduce_min(0)  # noqa: B009  # the last stage may still send tokens
    model_runner.close()
    outcomes = [Outcome(tuple(one.output), tuple(sample.logprobs for sample in one.samples)) for one in generated]
    return Answer(num_blocks, tuple(outcomes))


def answers_of_ranks(cases: Sequence[Case], num_ranks: int) -> list[list[Answer]]:
    """Return the answers of all ranks for each case; fail if a rank fails. On CPUs, V2's kernels are interpreted."""
    command = [sys.executable, __file__]
    environ = os.environ | {"PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
    if any(case.config.device.kind == "cpu" for case in cases):
        environ["TRITON_INTERPRET"] = "1"
    with ExitStack() as ends:
        listeners = [ends.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in cases]
        ranks = []
        for rank in range(num_ranks):
            fds = [] if rank else [listener.fileno() for listener in listeners]
            names = [f"127.0.0.1:{listener.getsockname()[1]}" for listener in listeners]
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ, pass_fds=fds
            )
            ranks.append(ends.enter_context(process))
            ends.callback(process.kill)
            assert process.stdin is not None
            process.stdin.write(msgspec.json.encode(_Order(rank, tuple(zip(fds or names, cases, strict=True)))))
            process.stdin.close()
            process.stdin = None
        answers = [process.communicate()[0] for process in ranks]
    assert [process.returncode for process in ranks] == [0] * num_ranks
    by_rank = [msgspec.json.decode(answer, type=list[Answer]) for answer in answers]
    return [list(of_case) for of_case in zip(*by_rank, strict=True)]


def _main() -> None:
    order = msgspec.json.decode(sys.stdin.buffer.read(), type=_Order)
    answers = [answer_of(case, order.rank, rendezvous) for rendezvous, case in order.cases]
    sys.stdout.buffer.write(msgspec.json.encode(answers))


if __name__ == "__main__":
    if "TRITON_INTERPRET" in os.environ:
        make_interpreter_faster()
    _main()
