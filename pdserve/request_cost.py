"""Cost model of a request: prefill at a prefill node, or on its decode node. Pure. Routers choose nodes by it.

A cost is in seconds of waiting: of the request, for its first tokens, and of other requests that it delays.

    handoff   decode on D  +  P's backlog and the prompt on P  +  the handoff
    local     decode on D  +  D's backlog and the prompt on D  +  the delay of each sequence that decodes on D
"""

from __future__ import annotations

import msgspec

HALF_LIFE = 10.0  # seconds after which a measurement that is not repeated counts half
HANDOFF_SECONDS = 3e-3  # from P's first token to confirmed KV, without the read of the last part
_OUTPUT_TOKENS = 32  # assumed length of an answer
_NO_ROOM_SECONDS = 1.0  # assumed wait for KV blocks, if too few are free


class LinearCost(msgspec.Struct, frozen=True, array_like=True):
    """Seconds as ``base + slope × count``. All zeros: nothing has been measured."""

    base: float = 0.0
    slope: float = 0.0

    def __bool__(self) -> bool:
        return self.base > 0.0 or self.slope > 0.0

    def at(self, count: float) -> float:
        return self.base + self.slope * count

    def aged(self, seconds: float) -> LinearCost:
        """The cost after so many seconds without a measurement: it decays, so that a slow path is tried again."""
        share = 0.5 ** min(seconds / HALF_LIFE, 10.0)
        return LinearCost(self.base * share, self.slope * share)


class Throughput(msgspec.Struct, frozen=True, array_like=True):
    """Measured costs of a node's steps and reads, as the node reports them to routers."""

    prompt: LinearCost = LinearCost()  # a step, by the prompt tokens that it computes
    decode: LinearCost = LinearCost()  # a step that only decodes, by sequences
    read: LinearCost = LinearCost()  # a KV read, by tokens


#: Assumed for a node without measurements: an 8B model on an H200.
TYPICAL = Throughput(prompt=LinearCost(4.8e-3, 24e-6), decode=LinearCost(4.8e-3, 20e-6), read=LinearCost(1e-3, 0.7e-6))


class RequestLoad(msgspec.Struct, frozen=True):
    """Load of a node: its last report, and requests that were sent to it since."""

    requests: int = 0  # running or waiting
    waiting: int = 0  # for KV blocks
    backlog: int = 0  # uncached prompt tokens to compute
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    decoding: int = 0  # sequences that decode now
    for_peers: int = 0  # of ``requests``, prompts that other nodes decode
    prompt_share: float = 0.0  # of recent time, spent on prompts

    @property
    def to_decode(self) -> int:
        """Requests that decode on this node, now or later."""
        return self.requests - self.for_peers


def worth_handoff(uncached_tokens: int, prompt_logprobs: int, min_tokens: int = 0) -> bool:
    """Return whether a prompt goes to a prefill node, given the tokens whose KV is not on D.

    A handoff costs a round trip, a read and a confirmation at any length, and a short prompt hardly delays the decodes
    in its step. ``min_tokens`` 0 hands off all that D lacks KV of. ``prompt_logprobs`` (-1: none) are computed on D.
    """
    return prompt_logprobs < 0 and uncached_tokens >= max(min_tokens, 1)


def decode_cost(load: RequestLoad, throughput: Throughput, prompt_tokens: int) -> float:
    """Cost of one more sequence on D: its first output tokens, weighted by cache usage, and a wait for KV blocks."""
    step = throughput.decode.at(load.requests + 1)
    used = 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    return _OUTPUT_TOKENS * step * (1.0 + used) + _block_wait(load, prompt_tokens)


def prompt_cost(load: RequestLoad, throughput: Throughput, uncached_tokens: int) -> float:
    """Cost from a prompt's arrival at a node to its first token."""
    step_in_flight = throughput.prompt.base if load.backlog else 0.0
    return step_in_flight + throughput.prompt.at(load.backlog + uncached_tokens)


def remote_prompt_cost(load: RequestLoad, throughput: Throughput, prompt_tokens: int, uncached_tokens: int) -> float:
    """``prompt_cost`` on P, which needs KV blocks for the whole prompt."""
    return prompt_cost(load, throughput, uncached_tokens) + _block_wait(load, prompt_tokens)


def handoff_cost(throughput: Throughput, uncached_tokens: int) -> float:
    """Cost of a handoff after P's first token, as if D read nothing while P computes."""
    return HANDOFF_SECONDS + throughput.read.at(uncached_tokens)


def local_prompt_cost(load: RequestLoad, throughput: Throughput, uncached_tokens: int) -> float:
    """``prompt_cost`` on D, plus the delay of all sequences on D and of the next request."""
    delayed = load.requests + 1
    return prompt_cost(load, throughput, uncached_tokens) + delayed * throughput.prompt.slope * uncached_tokens


def _block_wait(load: RequestLoad, num_tokens: int) -> float:
    needed = -(-num_tokens // load.block_size)
    return _NO_ROOM_SECONDS * (1 + load.waiting) if needed > load.free_blocks else 0.0
