"""A node of several ranks without frontend: the real scheduler here, each rank's runner in its own process.

    with StagedNode(num_ranks) as node:
        tokens = generate(node.started(config), config, requests)

Run as a script it is one rank: configurations and plans come on stdin, outputs go to stdout, as framed msgpack.
"""

from __future__ import annotations

import os
import queue
import socket
import struct
import subprocess
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import IO, Any

import msgspec
import torch
from triton_interpreter import make_interpreter_faster

import runner
from engine.executor.rank import Rank
from engine.executor.step_pipeline import StepPipeline
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.scheduler_config import SchedulerConfig
from pdserve.config.node_config import NodeConfig
from pdserve.errors import CheckpointError
from pdserve.ipc.messages import Mode, Submit
from pdserve.pausing import Pausing, completed
from pdserve.protocols import ModelRunner, PendingStep
from pdserve.records import ModelRunnerOutput, Sample, StepOutput, StepPlan
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import WeightChange

_ROOT = Path(__file__).parents[2]
_HEADER = struct.Struct("<I")


class Request(msgspec.Struct, frozen=True):
    """A request that is cancelled after ``cancelled_after`` tokens of its first choice."""

    prompt: tuple[int, ...]
    sampling: SamplingParams
    cancelled_after: int = 1 << 30


Outputs = dict[tuple[int, int], list[Sample]]  # by request and choice


class _Order(msgspec.Struct, frozen=True, tag=True):
    """Build the runner of this rank."""

    config: NodeConfig
    rendezvous: str  # host:port; "" for rank 0, which opens it and reports the address
    changes: tuple[WeightChange, ...] = ()


def generate(rank: Any, config: NodeConfig, requests: Sequence[Request], at_once: int = 1 << 30) -> Outputs:
    """Return the samples of all choices; ``rank`` is an engine.executor.rank.Rank or a StagedNode.

    The first ``at_once`` requests are submitted at the start, one more with each step.
    """
    scheduler = Scheduler(
        msgspec.structs.replace(
            SchedulerConfig.of_node(config, config.kv_layout, config.state_layout, idle_step=0.0),
            max_drafts=0,
            itl_target=0.0,
            ttft_target=0.0,
        )
    )
    pipeline = StepPipeline(rank)
    waiting = list(enumerate(requests))
    outputs: Outputs = defaultdict(list)
    steps = 0
    while waiting or not (scheduler.idle and pipeline.empty):
        while waiting and waiting[0][0] < at_once + steps:
            rid, request = waiting.pop(0)
            scheduler.submit(Submit(rid, pack_tokens(request.prompt), request.sampling, Mode.LOCAL))
        plan = scheduler.plan()
        for result in pipeline.launch(plan):
            scheduler.apply(*result)
        taken = pipeline.take(plan)
        if taken is not None:
            scheduler.apply(*taken)
        batch = scheduler.take_events()
        for rid, choice, token_id, _, logprobs in batch.outputs.rows() if batch is not None else ():
            outputs[rid, choice].append(Sample(token_id, logprobs))
            if choice == 0 and len(outputs[rid, 0]) == requests[rid].cancelled_after:
                scheduler.cancel(rid)
        steps += 1
    assert scheduler.status().free == scheduler.status().total
    return dict(outputs)


def generate_alone(config: NodeConfig, requests: Sequence[Request], changes: Sequence[WeightChange] = ()) -> Outputs:
    """Run the requests on one rank in this process, after some changes of weights, without cancelling any."""
    from connector.backends.null import NullConnector
    from connector.setup import ConnectorSetup

    model_runner = runner.build(config, lambda stage, fraction: None)
    _apply(changes, model_runner)
    rank = Rank(model_runner, NullConnector(ConnectorSetup()))
    outputs = generate(rank, config, [Request(request.prompt, request.sampling) for request in requests])
    rank.close()
    return outputs


class StagedNode:
    """Implements Rank with ``num_ranks`` processes, each with its own GPU if there are any."""

    def __init__(self, num_ranks: int) -> None:
        environ = os.environ | {"PYTHONPATH": f"{_ROOT}:{os.environ.get('PYTHONPATH', '')}"}
        if not torch.cuda.is_available():
            environ["TRITON_INTERPRET"] = "1"
        self._config: NodeConfig | None = None
        self._ends = ExitStack()
        self._ranks = []
        for _ in range(num_ranks):
            process = subprocess.Popen(
                [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environ
            )
            self._ranks.append(self._ends.enter_context(process))
            self._ends.callback(process.kill)

    def __enter__(self) -> StagedNode:
        return self

    def __exit__(self, *error: object) -> None:
        self._ends.close()

    def started(self, config: NodeConfig, changes: tuple[WeightChange, ...] = ()) -> StagedNode:
        """Have all ranks close their runners, build them for a configuration, and change their weights."""
        self._config = config
        rendezvous = ""
        for rank, process in enumerate(self._ranks):
            assert process.stdin is not None
            assert process.stdout is not None
            device = msgspec.structs.replace(config.device, index=rank)
            order = _Order(config.for_rank(rank, device), rendezvous, changes)
            _write(process.stdin, msgspec.msgpack.encode(order))
            if rank == 0:
                frame = _read(process.stdout)
                assert frame is not None, "rank 0 has ended"
                rendezvous = msgspec.msgpack.decode(frame, type=str)
        return self

    @property
    def max_in_flight(self) -> int:
        assert self._config is not None
        return self._config.parallel.pp + (self._config.decision.runner == "V2")

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[Callable[[], ModelRunnerOutput]]:
        """Start a step; results come in the order of launches."""
        for process in self._ranks:
            assert process.stdin is not None
            _write(process.stdin, msgspec.msgpack.encode(plan))
        return completed(self.result)

    def oldest_is_done(self) -> bool:
        return False

    def delays_results(self, plan: StepPlan) -> bool:
        return False

    def result(self) -> ModelRunnerOutput:
        """Return the output of the oldest step. Only the last stage samples, all of its shards the same."""
        assert self._config is not None
        outputs = []
        for process in self._ranks:
            assert process.stdout is not None
            frame = _read(process.stdout)
            assert frame is not None, "a rank has ended"
            outputs.append(msgspec.msgpack.decode(frame, type=StepOutput))
        others = outputs[: -self._config.parallel.tp]
        last = outputs[-self._config.parallel.tp :]
        assert not any(output.token_ids for output in others)
        assert all(output == last[0] for output in last)
        return ModelRunnerOutput(last[0])


# ---------------------------------------------------------------- a rank


def _serve(stdin: IO[bytes], stdout: IO[bytes]) -> None:
    launched: queue.Queue[PendingStep | None] = queue.Queue()

    def answer() -> None:
        while (step := launched.get()) is not None:
            _write(stdout, msgspec.msgpack.encode(step.result()))

    thread = threading.Thread(target=answer, daemon=True)  # the thread must not outlive a runner that cannot be built
    thread.start()
    current = None
    while (frame := _read(stdin)) is not None:
        message = msgspec.msgpack.decode(frame)
        if isinstance(message, dict) and message.get("type") == "_Order":
            if current is not None:
                current.close()
            order = msgspec.msgpack.decode(frame, type=_Order)
            rendezvous: str | socket.socket = order.rendezvous
            if not rendezvous:
                rendezvous = socket.create_server(("127.0.0.1", 0))
                _write(stdout, msgspec.msgpack.encode(f"127.0.0.1:{rendezvous.getsockname()[1]}"))
            current = runner.build(order.config, lambda stage, fraction: None, rendezvous)
            _apply(order.changes, current)
        else:
            assert current is not None
            launched.put(current.launch(msgspec.msgpack.decode(frame, type=StepPlan)))
    launched.put(None)
    thread.join()


def _apply(changes: Sequence[WeightChange], model_runner: ModelRunner) -> None:
    """Change weights; a change that is refused leaves them as they are."""
    for change in changes:
        with suppress(CheckpointError):
            model_runner.change_weights(change)


def _write(stream: IO[bytes], frame: bytes) -> None:
    stream.write(_HEADER.pack(len(frame)) + frame)
    stream.flush()


def _read(stream: IO[bytes]) -> bytes | None:
    header = stream.read(_HEADER.size)
    return stream.read(_HEADER.unpack(header)[0]) if header else None


if __name__ == "__main__":
    if "TRITON_INTERPRET" in os.environ:
        make_interpreter_faster()
    _serve(sys.stdin.buffer, sys.stdout.buffer)
