"""Cost model of a request: where its prompt is computed, and where it decodes. Pure. Routers choose nodes by it.

A cost is in seconds before first tokens: of this request, and of others that it delays. Seconds between later tokens
count for ``_DELAY_WEIGHT`` of that. The same functions hold for prefill nodes, decode nodes, and nodes that are both:

    prompt    the node's backlog and the prompt, longer beside decodes  +  the delay of each sequence that decodes there
    decode    the sequence's steps, longer by the node's share of prompts  +  the delay of its sequences and prompts
    handoff   a round trip and a read, if these are two nodes
"""

from __future__ import annotations

import msgspec

HALF_LIFE = 10.0  # seconds after which a measurement that is not repeated counts half
HANDOFF_SECONDS = 3e-3  # from P's first token to confirmed KV, without the read of the last part
_OUTPUT_TOKENS = 100  # assumed length of an answer
_NO_ROOM_SECONDS = 1.0  # assumed wait for KV blocks, if too few are free
_DELAY_WEIGHT = 0.12  # of a second between later tokens, against one before a first token
_QUEUE_WEIGHT = 100.0  # delayed prompts per second of backlog, those that are still to come included
_MOST_PROMPT_SHARE = 0.8  # of time: a share near 1 would make costs infinite
_LEAST_LEFT = 0.1  # of time, left to prompts by sequences that decode

AUTO_ITL_STEPS = 9.2  # default ITL target, in decode steps of one sequence; engine/scheduler/itl_target.py says why
_LEAST_ITL_STEPS = 2.5  # the same in decode steps of all sequences, if that is longer


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


class StepCosts(msgspec.Struct, frozen=True, array_like=True):
    """Measured costs of a node's steps and reads, as the node reports them to routers."""

    prompt: LinearCost = LinearCost()  # a step, by the prompt tokens that it computes
    decode: LinearCost = LinearCost()  # a step that only decodes, by sequences
    read: LinearCost = LinearCost()  # a KV read, by tokens


#: Assumed for a node without measurements: an 8B model on an H200.
TYPICAL = StepCosts(prompt=LinearCost(1e-3, 24.4e-6), decode=LinearCost(4.8e-3, 20e-6), read=LinearCost(1e-3, 0.7e-6))


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
    itl_target: float = 0.0  # seconds of a step with decodes and prompts; 0: no limit

    @property
    def to_decode(self) -> int:
        """Requests that decode on this node, now or later."""
        return max(0, self.requests - self.for_peers)


def auto_itl_target(one: float, all_: float) -> float:
    """Return the default ITL target, given the time of a step that decodes one sequence, or all of them."""
    return max(AUTO_ITL_STEPS * one, _LEAST_ITL_STEPS * all_)


def worth_handoff(uncached_tokens: int, prompt_logprobs: int, min_tokens: int = 0) -> bool:
    """Return whether a prompt goes to a prefill node, given the tokens whose KV is not on D.

    A handoff costs a round trip, a read and a confirmation at any length, and a short prompt hardly delays the decodes
    in its step. ``min_tokens`` 0 hands off all that D lacks KV of. ``prompt_logprobs`` (-1: none) are computed on D.
    """
    return prompt_logprobs < 0 and uncached_tokens >= max(min_tokens, 1)


def prompt_cost(load: RequestLoad, costs: StepCosts, uncached_tokens: int) -> float:
    """Cost of a prompt on a node: from its arrival to its first token, and the delay of sequences that decode there."""
    line, decodes = costs.prompt, load.decoding
    if not decodes:
        return (line.base if load.backlog else 0.0) + line.at(load.backlog + uncached_tokens)
    own, queued = line.slope * uncached_tokens, line.slope * load.backlog
    steps_in_flight = 2.0 * costs.decode.at(decodes)
    return steps_in_flight + (queued + own) / _left(load, costs, decodes) + _DELAY_WEIGHT * decodes * own


def local_prompt_cost(load: RequestLoad, costs: StepCosts, uncached_tokens: int) -> float:
    """``prompt_cost`` on a node that only decodes: the next request that is handed to it waits for the prompt."""
    return prompt_cost(load, costs, uncached_tokens) + costs.prompt.slope * uncached_tokens


def remote_prompt_cost(load: RequestLoad, costs: StepCosts, prompt_tokens: int, uncached_tokens: int) -> float:
    """``prompt_cost`` for a peer, which needs KV blocks for the whole prompt."""
    return prompt_cost(load, costs, uncached_tokens) + _block_wait(load, prompt_tokens)


def handoff_cost(costs: StepCosts, uncached_tokens: int) -> float:
    """Cost of a handoff after P's first token, as if D read nothing while P computes."""
    return HANDOFF_SECONDS + costs.read.at(uncached_tokens)


def decode_cost(load: RequestLoad, costs: StepCosts, prompt_tokens: int) -> float:
    """Cost of one more sequence that decodes on a node: what it adds to ``decodes_cost``, and a wait for KV blocks."""
    decodes, line = load.to_decode, costs.decode
    rest = 1.0 - min(load.prompt_share, _MOST_PROMPT_SHARE)
    added = _DELAY_WEIGHT * _OUTPUT_TOKENS * (line.base + line.slope * (2 * decodes + 1)) / (rest * rest)
    if load.backlog and not decodes:  # further sequences hardly add to the delay
        added += _queue_delay(load, costs, 1)
    used = 1.0 - load.free_blocks / load.total_blocks if load.total_blocks else 0.0
    return added * (1.0 + used) + _block_wait(load, prompt_tokens)


def decodes_cost(load: RequestLoad, costs: StepCosts, decodes: int, num_tokens: int) -> float:
    """Cost of ``num_tokens`` more of each of ``decodes`` sequences: their steps, and the delay of queued prompts.

    The share of prompts counts twice: prompts delay each step, and each step delays prompts.
    """
    rest = 1.0 - min(load.prompt_share, _MOST_PROMPT_SHARE)
    steps = num_tokens * costs.decode.at(decodes) / (rest * rest)
    return _DELAY_WEIGHT * decodes * steps + _queue_delay(load, costs, decodes)


def _queue_delay(load: RequestLoad, costs: StepCosts, decodes: int) -> float:
    """Delay of the prompts that wait on a node, by the sequences that decode there."""
    if not decodes:
        return 0.0
    queued = costs.prompt.slope * load.backlog
    return _QUEUE_WEIGHT * queued * queued * (1.0 / _left(load, costs, decodes) - 1.0)


def _left(load: RequestLoad, costs: StepCosts, decodes: int) -> float:
    """Return the share of a node's time that sequences which decode leave to prompts.

    A step with prompts takes the ITL target, and every second step only decodes.
    """
    if not load.itl_target:
        return 1.0
    step = costs.decode.at(decodes)
    return max((load.itl_target - step) / (load.itl_target + step), _LEAST_LEFT)


def _block_wait(load: RequestLoad, num_tokens: int) -> float:
    needed = -(-num_tokens // load.block_size)
    return _NO_ROOM_SECONDS * (1 + load.waiting) if needed > load.free_blocks else 0.0
