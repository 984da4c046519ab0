"""Nodes that report, answer or describe wrong numbers, beside an honest one: the router serves, and ends never."""

from __future__ import annotations

import json
import math
import random
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from lies import Lie, lies
from machine import patience
from router_process import MODEL, RouterProcess, router_process, wait_for
from scripted_node import Conversation, ScriptedNode

from pdserve.pb import pdserve_pb2 as pb

LIARS = 16  # at a time
REQUESTS = 6
ANSWER = [104, 105, 33]  # tokens of every answer
OF_REPORTS = lies(pb.NodeReport.DESCRIPTOR)
OF_OUTPUTS = lies(pb.OutputBatch.DESCRIPTOR)
OF_STATUS = lies(pb.NodeStatus.DESCRIPTOR)

PROMPT = ("load", "throughput", "prompt")
DECODE = ("load", "throughput", "decode")
#: Each made a router answer no request, or refuse all of them, although honest nodes were ready.
OUTSIDE = [
    *(Lie((*PROMPT, "base"), value) for value in (math.nan, math.inf, -1.0, 1e308)),
    *(Lie((*DECODE, "slope"), value) for value in (math.nan, math.inf, -1.0, 1e308)),
    *(Lie(("load", name), math.nan) for name in ("prompt_share", "itl_target_ms", "ttft_target_ms")),
    *(Lie(("description", "max_model_len"), value) for value in (0, 2**32 - 1)),
    Lie(("description", "vocab_size"), 0),
]
INSIDE = [
    *(Lie(("description", "max_model_len"), value) for value in (1, 2**31 - 1)),
    Lie(("description", "vocab_size"), 1),
]


class LyingNode(ScriptedNode):
    """Tells one lie in each message of its kind; otherwise it is as good as any."""

    def __init__(self, node_id: str, role: str) -> None:
        self.lie: Lie | None = None
        self.told = 0  # times
        super().__init__(MODEL, node_id=node_id)
        self.description.role = role
        self.description.kv_layout.CopyFrom(
            pb.KVLayout(num_blocks=64, block_size=16, kernel_block_size=16, num_layers=2, num_kv_heads=2, head_dim=8)
        )
        self.load.CopyFrom(pb.NodeLoad(free_blocks=64, total_blocks=64))
        self.scripts[""] = self._answer

    async def Watch(self, request: pb.WatchRequest, context: Any) -> AsyncIterator[pb.NodeReport]:
        async for report in super().Watch(request, context):
            yield self._altered(report)

    async def Status(self, request: pb.StatusRequest, context: Any) -> pb.NodeStatus:
        status = self._altered(pb.NodeStatus(counters={"pdserve_sampled_tokens_total": 1.0}))
        assert isinstance(status, pb.NodeStatus)
        return status

    async def _answer(self, conversation: Conversation) -> None:
        for number, token in enumerate(ANSWER, 1):
            output = pb.Output(request=conversation.message.request, token_id=token, has_token=True)
            output.finish_reason = "stop" if number == len(ANSWER) else ""
            conversation.send(self._altered(pb.OutputBatch(outputs=[output])))

    def _altered(self, message: Any) -> Any:
        if self.lie is None or self.lie.path[0] not in message.DESCRIPTOR.fields_by_name:
            return message
        altered = type(message)()
        altered.CopyFrom(message)
        self.lie.add_to(altered)
        self.told += 1
        return altered


def start(stack: ExitStack, node_id: str, role: str) -> LyingNode:
    node = LyingNode(node_id, role)
    stack.callback(node.close)
    return node


def flag(role: str) -> str:
    return "--node" if role == "both" else f"--{role}"


class Fleet:
    """An honest node and liars of a role behind a router."""

    def __init__(self, stack: ExitStack, tokenizer_dir: Path, role: str, liars: int, timeout: int = 10) -> None:
        self.honest = start(stack, "honest", "both" if role == "both" else "decode")
        self.liars = [start(stack, f"liar-{number}", role) for number in range(liars)]
        self.honest.description.connected_peers.extend(liar.description.node_id for liar in self.liars)
        flags = [flag(self.honest.description.role), self.honest.address, "--request-timeout", f"{patience(timeout):g}"]
        for liar in self.liars:
            flags += [flag(role), liar.address]
        self.router: RouterProcess = stack.enter_context(router_process(tokenizer_dir, flags))
        self.client = stack.enter_context(
            httpx.Client(base_url=self.router.url, timeout=patience(20.0), trust_env=False)
        )

    def tell(self, told: Sequence[Lie]) -> None:
        """Have each liar tell one of the lies, and wait until the router has heard it."""
        for liar, lie in zip(self.liars, told, strict=False):
            liar.lie = lie
            liar.told = 0
        wait_for(lambda: bool(self.live()) and all(liar.told for liar in self.liars[: len(told)]), 20.0)

    def live(self) -> dict[str, str]:
        """Return the state of each node by address. The dashboard has the router ask for their status."""
        nodes = json.loads(self.client.get("/dashboard/state").content)["now"]["nodes"]
        return {node["address"]: node["state"] for node in nodes}

    def ask(self, **fields: Any) -> httpx.Response:
        body = {"model": MODEL, "prompt": "x", "return_token_ids": True, **fields}
        return self.client.post("/v1/completions", json=body)

    def check_answer(self, answer: httpx.Response) -> None:
        assert answer.status_code == 200, answer.text
        assert answer.json()["choices"][0]["token_ids"] == ANSWER

    def check_served(self) -> None:
        """Each request is answered with the right tokens, whatever it asks for."""
        for number in range(REQUESTS):
            fields: list[dict[str, Any]] = [{}, {"max_tokens": 5}, {"prompt": [100, 101], "max_tokens": 900}]
            answer = self.ask(**fields[number % len(fields)])
            self.check_answer(answer)
        assert self.client.get("/health").status_code == 200
        assert self.live()[self.honest.address] == "ready"
        assert self.router.process.poll() is None


@pytest.fixture(scope="module")
def decodes(tokenizer_dir: Path) -> Iterator[Fleet]:
    with ExitStack() as stack:
        yield Fleet(stack, tokenizer_dir, "decode", LIARS)


def test_a_report_with_a_wrong_number_makes_no_router_refuse_requests(decodes: Fleet) -> None:
    decodes.tell([*OUTSIDE, *INSIDE])
    decodes.check_served()
    faulty = {liar.address for liar in decodes.liars[: len(OUTSIDE)]}
    wait_for(lambda: {address for address, state in decodes.live().items() if state == "faulty"} == faulty)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["decode", "both", "prefill"])
def test_no_wrong_number_of_a_report_makes_a_router_refuse_requests(role: str, tokenizer_dir: Path) -> None:
    with ExitStack() as stack:
        fleet = Fleet(stack, tokenizer_dir, role, LIARS)
        told = [*OF_REPORTS, *OF_STATUS]
        random.Random(role).shuffle(told)
        for first in range(0, len(told), LIARS):
            fleet.tell(told[first : first + LIARS])
            fleet.check_served()


@pytest.mark.slow
def test_no_wrong_number_of_an_output_harms_requests_of_other_nodes(tokenizer_dir: Path) -> None:
    """A request that the liar has answered may fail, or have its numbers."""
    with ExitStack() as stack:
        fleet = Fleet(stack, tokenizer_dir, "decode", 1, timeout=2)
        (liar,) = fleet.liars
        for lie in OF_OUTPUTS:
            liar.lie = lie
            liar.told = 0
            wait_for(lambda: fleet.live()[liar.address] == "ready")
            while not liar.told:
                answer = fleet.ask(logprobs=1)
                if not liar.told:
                    fleet.check_answer(answer)
            liar.lie = None
            fleet.check_served()
