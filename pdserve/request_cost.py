"""What it costs to serve a request here or there. Pure. Routers choose nodes by it; on D it has the last word.

A cost is in seconds that people wait: who asks, for the first token and for the next few, and whoever is held up by it.

    handoff   D decodes  +  P's backlog, the prompt on P  +  handing it over
    local     D decodes  +  D's backlog, the prompt on D  +  the same prompt again for each sequence that decodes on D
"""

from __future__ import annotations

import msgspec

from pdserve.throughput import LinearCost, Throughput

HANDOFF = 3e-3  # seconds from P's first token to KV that may be used, beside the read of the last part
DECODED = 32  # tokens of an answer that count: how long it will be is not known

_NO_ROOM = 1.0  # seconds that a request is assumed to wait for blocks where there are too few

#: Of a node of which nothing is known: an 8B model on an H200.
TYPICAL = Throughput(prompt=LinearCost(4.8e-3, 24e-6), decode=LinearCost(4.8e-3, 20e-6), read=LinearCost(1e-3, 0.7e-6))


class RequestLoad(msgspec.Struct, frozen=True):
    """What a node has to do, with what it has been sent and has not told of yet."""

    requests: int = 0  # that it serves, or that wait
    waiting: int = 0  # of these, for room
    backlog: int = 0  # prompt tokens to be computed, without what is cached
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16


def worth_handoff(uncached_tokens: int, prompt_logprobs: int, min_tokens: int = 0) -> bool:
    """Return whether a prompt goes to a prefill node, given the tokens whose KV is not on D.

    A handoff costs a round trip, a read and a confirmation at any length, and a short prompt hardly delays the decodes
    in its step. ``min_tokens`` 0 hands off all that D lacks KV of. ``prompt_logprobs`` (-1: none) are computed on D.
    """
    return prompt_logprobs < 0 and uncached_tokens >= max(min_tokens, 1)


def of_decoding(load: RequestLoad, throughput: Throughput, prompt_tokens: int) -> float:
    """One more sequence on D: the first tokens of its answer, slower where the cache is full, and waiting for room."""
    step = throughput.decode.at(load.requests + 1)
    used = 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    return DECODED * step * (1.0 + used) + _for_room(load, prompt_tokens)


def of_prompt(load: RequestLoad, throughput: Throughput, uncached_tokens: int) -> float:
    """From when a node gets a prompt to its first token."""
    under_way = throughput.prompt.base if load.backlog else 0.0
    return under_way + throughput.prompt.at(load.backlog + uncached_tokens)


def of_remote_prompt(load: RequestLoad, throughput: Throughput, prompt_tokens: int, uncached_tokens: int) -> float:
    """The same on P, which needs room for all of it."""
    return of_prompt(load, throughput, uncached_tokens) + _for_room(load, prompt_tokens)


def of_handing_over(throughput: Throughput, uncached_tokens: int) -> float:
    """Reading on D what it lacks, as if none of it were read while P computes."""
    return HANDOFF + throughput.read.at(uncached_tokens)


def of_local_prompt(load: RequestLoad, throughput: Throughput, uncached_tokens: int) -> float:
    """Prefill on D, which holds up all that decode there, and whoever comes next."""
    held_up = load.requests + 1
    return of_prompt(load, throughput, uncached_tokens) + held_up * throughput.prompt.slope * uncached_tokens


def _for_room(load: RequestLoad, num_tokens: int) -> float:
    needed = -(-num_tokens // load.block_size)
    return _NO_ROOM * (1 + load.waiting) if needed > load.free_blocks else 0.0
