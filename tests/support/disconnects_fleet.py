"""Requests whose clients disconnect at every stage in a fleet of one P and one D.

The nodes are simulated. P computes 64 tokens of a prompt per step of 20 ms, so a test can catch every stage.
"""

from __future__ import annotations

import json
import random
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import httpx
from fleet import MODEL_NAME, Fleet, start_fleet
from machine import patience

from pdserve.pb import pdserve_pb2 as pb
from pdserve.pb import pdserve_pb2_grpc as pb_grpc

SIMULATED = ("--engine", "simulated")
PREFILL = (*SIMULATED, "--max-num-seqs", "1", "--max-batch-tokens", "64", "--sim-costs", "step=0.02,prompt-token=0")
DECODE = (*SIMULATED, "--max-num-seqs", "4")
SHORT = 20  # tokens of a prompt that D prefills
LONG = 5000  # tokens of a prompt that is handed off


@dataclass(frozen=True)
class View:
    """The state of a fleet."""

    prefill: pb.NodeStatus
    decode: pb.NodeStatus
    router_waiting: int  # requests that wait for admission


Condition = Callable[[View], bool]


def idle(status: pb.NodeStatus) -> bool:
    return status.free_blocks == status.total_blocks and not status.waiting + status.reading + status.running


def all_idle(view: View) -> bool:
    return idle(view.prefill) and idle(view.decode) and not view.router_waiting


@dataclass(frozen=True)
class Stage:
    """A request after ``others``. ``reached`` holds at the stage, ``gone`` soon after its client has disconnected."""

    reached: Condition
    body: dict[str, Any] = field(default_factory=dict)
    prompts: tuple[int, ...] = (SHORT,)  # lengths
    others: tuple[Stage, ...] = ()
    gone: Condition = all_idle


_DECODING = Stage(lambda view: view.decode.running > 0)
_COMPUTING = Stage(lambda view: view.prefill.running > 0, prompts=(LONG,))
_FULL = Stage(lambda view: view.decode.running == 4, {"n": 4})

STAGES = {
    "decoding": _DECODING,
    "decoding, not streamed": Stage(_DECODING.reached, {"stream": False}),
    "decoding, n = 3": Stage(lambda view: view.decode.running == 3, {"n": 3}),
    "decoding, two prompts": Stage(lambda view: view.decode.running == 2, prompts=(SHORT, SHORT)),
    "computed on P": _COMPUTING,
    "computed on P, not streamed": Stage(_COMPUTING.reached, {"stream": False}, (LONG,)),
    "computed on P and read": Stage(lambda view: view.prefill.leased_blocks > 0, prompts=(LONG,)),
    "waiting on P": Stage(
        lambda view: view.prefill.waiting > 0,
        prompts=(LONG,),
        others=(_COMPUTING,),
        gone=lambda view: view.decode.reading + view.decode.running == 1,
    ),
    "waiting on D": Stage(
        lambda view: view.decode.waiting > 0, others=(_FULL,), gone=lambda view: not view.decode.waiting
    ),
    "waiting in the router": Stage(
        lambda view: view.router_waiting > 0, others=(_DECODING, _DECODING), gone=lambda view: not view.router_waiting
    ),
}


class DisconnectFleet:
    """The fleet and its clients."""

    def __init__(self, fleet: Fleet, client: httpx.Client, nodes: Sequence[grpc.Channel]) -> None:
        """``nodes`` are channels to P and D."""
        self._fleet = fleet
        self._client = client
        self._nodes = [pb_grpc.NodeStub(channel) for channel in nodes]
        self._chance = random.Random(0)

    def view(self) -> View:
        metrics = self._client.get("/metrics").text.splitlines()
        router_waiting = next(line for line in metrics if line.startswith("pdserve_requests_waiting"))
        prefill, decode = (node.Status(pb.StatusRequest(), timeout=patience(5.0)) for node in self._nodes)
        return View(prefill, decode, int(float(router_waiting.rpartition(" ")[2])))

    def wait_until(self, condition: Condition, seconds: float = 20.0) -> None:
        self._fleet.wait_until(lambda: condition(self.view()), seconds)

    @contextmanager
    def held_at(self, stage: Stage) -> Iterator[Callable[[], None]]:
        """Hold a request at a stage; call the yielded function to disconnect its client."""
        clients: list[socket.socket] = []
        try:
            for target in (*stage.others, stage):
                clients.append(self._send(target))
                self.wait_until(target.reached)
            yield clients[-1].close
        finally:
            for client in clients:
                client.close()
            self.wait_until(all_idle)

    def _send(self, stage: Stage) -> socket.socket:
        prompts = [self._chance.choices(range(3, 4096), k=length) for length in stage.prompts]
        body = {"model": MODEL_NAME, "prompt": prompts, "max_tokens": 2000, "ignore_eos": True, "stream": True}
        data = json.dumps({**body, **stage.body}).encode()
        host, _, port = self._fleet.url.removeprefix("http://").rpartition(":")
        client = socket.create_connection((host, int(port)))
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {host}\r\ncontent-length: {len(data)}\r\n\r\n"
        client.sendall(head.encode() + data)
        return client


@contextmanager
def start_disconnect_fleet(model: Path) -> Iterator[DisconnectFleet]:
    """Start a fleet that admits two requests at once."""
    with (
        start_fleet(model, 1, 1, True, PREFILL, DECODE, ("--max-inflight", "2")) as fleet,
        httpx.Client(base_url=fleet.url, trust_env=False) as client,
        grpc.insecure_channel(fleet.prefill[0].address) as prefill,
        grpc.insecure_channel(fleet.decode[0].address) as decode,
    ):
        yield DisconnectFleet(fleet, client, (prefill, decode))
