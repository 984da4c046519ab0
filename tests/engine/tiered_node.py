"""Prompts for a node of toy_node.py with host memory, and perhaps a disk, whose transfers end when a test says so."""

from __future__ import annotations

import random

from slow_disk import SlowDisk
from slow_host_memory import SlowHostMemory
from toy import reference
from toy_node import Node

from pdserve.ipc.messages import Mode
from pdserve.sampling_params import SamplingParams


def memory_of(node: Node) -> SlowHostMemory:
    assert isinstance(node.host_memory, SlowHostMemory)
    return node.host_memory


def rest(node: Node) -> None:
    """Let all requests, copies and transfers end."""
    num_quiet = 0
    disk = node.disk if isinstance(node.disk, SlowDisk) else None
    for _ in range(2000):
        node.step()
        busy = memory_of(node).copies or (disk is not None and disk.orders) or node.scheduler.connector.tiers.copying
        num_quiet = 0 if busy or not node.engine.idle else num_quiet + 1
        if num_quiet == 2:
            return
        memory_of(node).finish()
        if disk is not None:
            disk.finish()
    raise AssertionError("the node does not come to rest")


def ask(node: Node, rid: int, prompt: list[int], max_tokens: int = 4) -> int:
    """Serve a prompt. Return how many of its tokens were computed."""
    before = node.scheduler.totals.prefix_cached_tokens
    node.submit(rid, prompt, SamplingParams(max_tokens=max_tokens), Mode.LOCAL)
    rest(node)
    assert node.tokens[rid, 0] == reference(prompt, 0, max_tokens)
    return len(prompt) - (node.scheduler.totals.prefix_cached_tokens - before)


def words(seed: int, length: int = 50) -> list[int]:
    return random.Random(seed).choices(range(900), k=length)
