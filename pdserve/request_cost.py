"""Predict the cost of a request on the nodes of a fleet. Pure. Routers choose nodes by it; docs/fleet.md explains it.

The objective, summed over requests, is TTFT / T_ttft + mean time per output token / T_itl. All costs are in seconds of
TTFT. A second of delay between two tokens of a stream of L tokens adds 1 / L to its mean, so it costs
T_ttft / (T_itl · L) = ``DELAY_WEIGHT`` seconds of TTFT. The costs are the same for nodes of all roles:

    prompt    its own wait  +  the streams that it delays  +  the later prompts that it delays
    decode    its own steps  +  what it adds to the steps of the streams beside it  +  the prompts that it delays
    handoff   from P's first token to the KV on D  +  the prompts that wait there for a step without them
    pull      from the request to the KV of a cached prefix, in place of the time to compute it; or both at once, where
              that takes clearly less time than either
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from pdserve.kv.groups import Windows, blocks_for
from pdserve.step_pacing import longest_paced, needed_step, useful_step

TTFT_OBJECTIVE = 0.5  # seconds: T_ttft
ITL_OBJECTIVE = 0.02  # seconds: T_itl
OUTPUT_TOKENS = 200  # assumed length of an answer: L
PROMPT_TOKENS = 2000  # assumed length of a prompt
DELAY_WEIGHT = TTFT_OBJECTIVE / (ITL_OBJECTIVE * OUTPUT_TOKENS)

HALF_LIFE = 10.0  # seconds until a measurement that is not repeated counts half
HANDOFF_SECONDS = 6e-3  # seconds from P's first token to confirmed KV; measured on H100s: 5 to 8 ms
CLEAR_WIN = 0.75  # a pull takes at most this share of the time that it saves, as predictions of both are inexact
_SPLIT_WIN = 2 / 3  # a split takes at most this share of the time to load all, as it takes steps, too
_STEP_TOKENS = 8192  # assumed size of a step of prompts
_MOST_STEPS = 1e9  # most predicted steps of a prompt, so that the number fits an integer: years
_SHORTEST_PULL = 0.25  # seconds until a pull may be late: one step of the source may take so long
_NO_ROOM_SECONDS = 1.0  # assumed wait for KV blocks, if too few are free
_MOST_SHARE = 0.9  # most time spent on prompts, as a fraction: more would make predicted costs infinite

#: A step with prompts takes at most so many decode steps of one sequence. A prompt then takes 9 / 8 of its time alone.
AUTO_ITL_STEPS = 9.0
#: Seconds of a step, up to which the default ITL target gives way to much work of prompts. With steps of 2,048 tokens,
#: Llama 8B on an H200 computes prompts in 0.89 of the time that steps of 1,152 take; gaps stay below 60 ms.
ITL_LIMIT = 0.052
_LEAST_ITL_STEPS = 2.0  # least ITL target, in decode steps of all sequences: prompts get half of the time


MOST_SECONDS = 1e6  # the range of measured seconds, costs and targets is 0 … eleven days


def in_range(seconds: float) -> float:
    """Return measured seconds cut to 0 … ``MOST_SECONDS``; NaN is 0."""
    return max(0.0, min(seconds, MOST_SECONDS))


class LinearCost(msgspec.Struct, frozen=True, array_like=True):
    """Seconds as ``base + slope × count``, both 0 … ``MOST_SECONDS``. All zeros: nothing has been measured."""

    base: float = 0.0
    slope: float = 0.0

    def __bool__(self) -> bool:
        return self.base > 0.0 or self.slope > 0.0

    def at(self, count: float) -> float:
        return self.base + self.slope * count

    def aged(self, seconds: float) -> LinearCost:
        """Return the cost after ``seconds`` without a measurement: it decays, so that a slow path is tried again."""
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
    """Load of a node: its last report, and the requests sent to it since."""

    requests: int = 0  # running or waiting
    waiting: int = 0  # requests that wait for KV blocks
    backlog: int = 0  # uncached prompt tokens to compute
    free_blocks: int = 0
    total_blocks: int = 0
    block_size: int = 16
    windows: Windows = (None,)  # sliding window of each KV cache group
    decoding: int = 0  # sequences that decode now
    for_peers: int = 0  # ``requests`` that other nodes decode
    prompt_share: float = 0.0  # fraction of recent time spent on prompts: 0 … 1
    itl_target: float = 0.0  # seconds of a step with decodes and prompts, 0 … MOST_SECONDS; 0: no limit
    itl_limit: float = 0.0  # seconds of such a step beside much work of prompts, 0 … MOST_SECONDS
    ttft_target: float = 0.0  # seconds until first tokens for which steps take longer, 0 … MOST_SECONDS; 0: none

    @property
    def to_decode(self) -> int:
        """Requests that decode on this node, now or later."""
        return max(0, self.requests - self.for_peers)


class OutOfRange(NamedTuple):
    """A number of a node from which no cost follows."""

    name: str
    value: float
    most: float

    def __str__(self) -> str:
        return f"{self.name} is {self.value:g}, the range is 0 … {self.most:g}"


_NAMES = (
    "prompt.base",
    "prompt.slope",
    "decode.base",
    "decode.slope",
    "read.base",
    "read.slope",
    "itl_target",
    "itl_limit",
    "ttft_target",
)


def out_of_range(load: RequestLoad, costs: StepCosts) -> OutOfRange | None:
    """Return a number of a node that is out of its range. None: all costs here are finite, and none is negative."""
    if not 0.0 <= load.prompt_share <= 1.0:
        return OutOfRange("prompt_share", load.prompt_share, 1.0)
    prompt = costs.prompt
    decode = costs.decode
    read = costs.read
    cost_terms = prompt.base, prompt.slope, decode.base, decode.slope, read.base, read.slope
    seconds = *cost_terms, load.itl_target, load.itl_limit, load.ttft_target
    for index, value in enumerate(seconds):
        if not 0.0 <= value <= MOST_SECONDS:
            return OutOfRange(_NAMES[index], value, MOST_SECONDS)
    return None


def auto_itl_target(one: float, all_: float) -> float:
    """Return the default ITL target, given the seconds of a step that decodes one sequence, or all of them."""
    return max(AUTO_ITL_STEPS * one, _LEAST_ITL_STEPS * all_)


def worth_handoff(uncached_tokens: int, prompt_logprobs: int, min_tokens: int = 0) -> bool:
    """Return whether a prompt goes to a prefill node, given the tokens whose KV is not on D.

    A handoff costs a round trip, a read and a confirmation at any length, and a short prompt hardly delays the decodes
    in its step. ``min_tokens`` 0 hands off every prompt with uncached tokens. ``prompt_logprobs`` (-1: none) stay on D.
    """
    return prompt_logprobs < 0 and uncached_tokens >= max(min_tokens, 1)


class PromptTimes(NamedTuple):
    """The cost of a prompt on a node, and its wait, in seconds."""

    first_token: float  # until the prompt's first token, with the wait that it adds to later prompts
    delays: float  # delay of the node's streams, times DELAY_WEIGHT

    @property
    def cost(self) -> float:
        return self.first_token + self.delays


def prompt_times(load: RequestLoad, costs: StepCosts, uncached_tokens: int) -> PromptTimes:
    """Predict a prompt on a node: its own wait, and the delay of streams there.

    Beside decodes, each step reads the weights anyway and computes some prompt tokens meanwhile. This hides the base
    of a decode step, less the base of a step of prompts. Prompts that arrive while the queue drains take
    ``prompt_share`` of that time; their wait for this prompt counts as many seconds.
    """
    decodes = load.decoding
    slope = costs.prompt.slope
    own = slope * uncached_tokens
    queued = slope * load.backlog
    if decodes:
        step = costs.decode.at(decodes)
        hidden = max(0.0, costs.decode.base - costs.prompt.base)
        longest = _paced_step(load, step, max(0.0, step - hidden), queued, own)
    else:
        step = costs.prompt.base
        longest = math.inf
        hidden = 0.0
    chunk = longest - step + hidden  # seconds of prompts in a step

    def added(prompts: float) -> float:
        return max(0.0, prompts - max(1.0, prompts / chunk) * hidden)

    executing = min(queued, chunk)
    rest_of_step = (step + added(executing)) / 2.0 if decodes or queued else 0.0
    behind = min(load.prompt_share, _MOST_SHARE) * (queued + own)
    before = queued - executing + behind
    steps = max(1, math.ceil(min((before + own) / chunk, _MOST_STEPS)))
    delay = added(before + own) - added(before)
    return PromptTimes(rest_of_step + steps * step + added(before + own), DELAY_WEIGHT * decodes * delay)


def prompt_cost(load: RequestLoad, costs: StepCosts, uncached_tokens: int) -> float:
    """Cost of a prompt on a node."""
    return prompt_times(load, costs, uncached_tokens).cost


def remote_prompt_times(load: RequestLoad, costs: StepCosts, prompt_tokens: int, uncached_tokens: int) -> PromptTimes:
    """``prompt_times`` for a peer, which needs KV blocks for the whole prompt."""
    first_token, delays = prompt_times(load, costs, uncached_tokens)
    return PromptTimes(first_token + _block_wait(load, prompt_tokens), delays)


def handoff_cost(load: RequestLoad, costs: StepCosts, uncached_tokens: int) -> float:
    """Cost of a handoff to D after P's first token, as if D read nothing while P computes.

    The step in which the stream joins has few prompts, as the scheduler keeps it short. Prompts that wait on D, and
    prompts that arrive until then, wait for that step, too.
    """
    waiting = load.backlog / PROMPT_TOKENS / (1.0 - min(load.prompt_share, _MOST_SHARE))
    join = costs.decode.at(load.decoding) if load.decoding else 0.0
    return HANDOFF_SECONDS + costs.read.at(uncached_tokens) + waiting * join


def pull_seconds(costs: StepCosts, num_tokens: int) -> float:
    """Seconds to read the KV of cached tokens from a peer, which leases them at once."""
    return HANDOFF_SECONDS + costs.read.at(num_tokens)


def answer_wait(load: RequestLoad, costs: StepCosts) -> float:
    """Seconds until a node has leased cached blocks to a peer: half of the step that executes, on average."""
    return step_seconds(load, costs) / 2.0


def step_seconds(load: RequestLoad, costs: StepCosts) -> float:
    """Seconds of the step that a node executes. Without streams on the node, prompts have no ITL target."""
    prompts = costs.prompt.slope * min(load.backlog, _STEP_TOKENS)
    if not load.decoding:
        return prompts
    decode = costs.decode.at(load.decoding)
    return min(decode + prompts, longest_step(load.itl_target, decode))


class LoadPlan(NamedTuple):
    """How a node gets the KV of cached tokens: it computes the first ones, and pulls the rest or reads it from disk."""

    computed: int  # tokens, in full blocks; 0: all are loaded
    loaded: int  # tokens
    seconds: float  # until all have KV


NO_PULL = LoadPlan(0, 0, 0.0)


class Pace(NamedTuple):
    """Predicted progress of one more prompt on a node."""

    queued: float = 0.0  # seconds until the prompt can begin
    slower: float = 1.0  # then its time, relative to the time alone


AT_ONCE = Pace()


def prompt_pace(load: RequestLoad, costs: StepCosts, queued_tokens: int, decodes: int) -> Pace:
    """Return the pace of a prompt behind ``queued_tokens`` tokens of other prompts, beside ``decodes`` streams."""
    return Pace(costs.prompt.slope * queued_tokens, _slower_prompts(load, costs, decodes))


def plan_split(load: LinearCost, num_tokens: int, *, compute: float, pace: Pace, block: int) -> LoadPlan | None:
    """Return the split of a load of cached tokens; None unless it takes clearly less time than to load or compute all.

    ``load``: seconds by tokens. ``compute``: seconds per token, alone. ``block``: tokens. Both parts of a split end
    together: after half of the time, if the node loads as fast as it computes.
    """
    whole = load.at(num_tokens)
    slope = pace.slower * compute
    first = (whole - pace.queued) / (slope + load.slope)
    first = int(min(first, num_tokens - 1)) // block * block
    rest = num_tokens - first
    seconds = max(pace.queued + slope * first, load.at(rest))
    clear = seconds < min(_SPLIT_WIN * whole, CLEAR_WIN * (pace.queued + compute * num_tokens))
    return LoadPlan(first, rest, seconds) if first > 0 and clear else None


def plan_pull(
    costs: StepCosts,
    num_tokens: int,
    *,
    wait: float = 0.0,
    pace: Pace = AT_ONCE,
    split_block: int = 0,
) -> LoadPlan | None:
    """Return the cheapest way to get the KV of tokens that a peer has, by the node's costs; None: compute them.

    Unmeasured costs are tried. ``wait``: seconds until the source answers. ``split_block``: tokens of a block if the
    node can compute some blocks meanwhile, else 0.
    """
    compute = costs.prompt.slope * num_tokens
    pull = wait + pull_seconds(costs, num_tokens)
    if not compute:
        return LoadPlan(0, num_tokens, pull)
    if split_block and costs.read:
        load = LinearCost(wait + pull_seconds(costs, 0), costs.read.slope)
        split = plan_split(load, num_tokens, compute=costs.prompt.slope, pace=pace, block=split_block)
        if split is not None:
            return split
    return LoadPlan(0, num_tokens, pull) if pull < CLEAR_WIN * (pace.queued + compute) else None


def pull_deadline(costs: StepCosts, num_tokens: int, queued: float = 0.0) -> float:
    """Return the seconds after which a pull is given up: no fewer than the node needs to compute the tokens.

    The node can begin to compute them after ``queued`` seconds. Without measured costs, it waits without end.
    """
    return max(_SHORTEST_PULL, queued + costs.prompt.slope * num_tokens) if costs.prompt else math.inf


def decode_cost(load: RequestLoad, costs: StepCosts, prompt_tokens: int, prompt_share: float) -> float:
    """Cost of one more stream on a node that spends ``prompt_share`` of its time on prompts."""
    decodes = load.to_decode

    def cost(count: int) -> float:
        return decodes_cost(load, costs, count, OUTPUT_TOKENS, prompt_share)

    return cost(decodes + 1) - cost(decodes) + _block_wait(load, prompt_tokens)


def decodes_cost(load: RequestLoad, costs: StepCosts, decodes: int, num_tokens: int, prompt_share: float) -> float:
    """Cost of ``num_tokens`` more of each of ``decodes`` streams: their time, and the delay of prompts meanwhile."""
    if not decodes:
        return 0.0
    share = min(prompt_share, _MOST_SHARE)
    seconds = num_tokens * time_per_token(costs.decode, decodes, share)
    prompts = seconds * share / (1.0 - share)  # seconds of prompts meanwhile; each delays 1 / (1 - share) prompts
    return DELAY_WEIGHT * decodes * seconds + prompts * (_slower_prompts(load, costs, decodes) - 1.0)


def time_per_token(decode: LinearCost, decodes: float, prompt_share: float) -> float:
    """Return the seconds between tokens of streams on a node that spends ``prompt_share`` of its time on prompts."""
    return decode.at(decodes) / (1.0 - min(prompt_share, _MOST_SHARE))


def stream_life(decode: LinearCost, decodes: float) -> float:
    """Return the seconds of a stream on a node with ``decodes`` streams and no prompts."""
    return OUTPUT_TOKENS * decode.at(max(1.0, decodes))


def settled_shares(prompt_work: float, streams: int, nodes: int, costs: StepCosts, itl_target: float) -> list[float]:
    """Return the share of prompts on each of ``nodes`` once requests have settled: the first nodes have most of them.

    ``prompt_work`` is the sum of the shares now. Either every node has the same share, or the first ones compute
    prompts only, as far as they suffice: whichever costs a request less, by its wait and its time per token. Beside
    streams, prompts get at most the time that the ITL target leaves. If they need more, every node has this share.
    """
    prompt = _mean_prompt(prompt_work, streams, nodes, costs)

    def shares(leaning: int) -> tuple[float, float]:
        """Return the share of each of the first nodes, and of each other one."""
        others = nodes - leaning
        own = min(prompt_work / leaning, _MOST_SHARE) if leaning else 0.0
        step = costs.decode.at(streams / others)
        return own, min((prompt_work - leaning * own) / others, 1.0 - step / longest_step(itl_target, step))

    def cost(leaning: int) -> float:
        seconds = time_per_token(costs.decode, streams / (nodes - leaning), shares(leaning)[1])
        return TTFT_OBJECTIVE / ITL_OBJECTIVE * seconds + _prompt_wait(prompt_work, leaning or nodes, prompt)

    best = min((0, *range(int(min(prompt_work, nodes)), nodes)), key=cost)
    own, rest = shares(best)
    return [own] * best + [rest] * (nodes - best)


def _mean_prompt(prompt_work: float, streams: int, nodes: int, costs: StepCosts) -> float:
    """Return the mean seconds of a prompt. One prompt comes per ended stream: ``streams`` in a stream's life."""
    most = PROMPT_TOKENS * costs.prompt.slope
    return min(most, prompt_work * stream_life(costs.decode, streams / nodes) / streams) if streams else most


def _prompt_wait(prompt_work: float, nodes: int, prompt: float) -> float:
    """Return the mean wait of a prompt for one of ``nodes`` that share the work, in seconds; ``prompt``: its own.

    M/D/m by the approximation of H. Sakasegawa (Annals of the Institute of Statistical Mathematics 29, 1977). Other
    nodes take over prompts that would wait for longer than half of a prompt.
    """
    all_busy = math.pow(min(prompt_work / nodes, 1.0), math.sqrt(2.0 * (nodes + 1)) - 1.0)
    return all_busy * prompt / 2.0 / max(nodes - prompt_work, 1.0)


def _slower_prompts(load: RequestLoad, costs: StepCosts, decodes: int) -> float:
    """Return the time of prompts beside streams, relative to their time alone: 1 … 2.

    A step with prompts takes the ITL target; its decodes take at most half of it.
    """
    step = costs.decode.at(decodes)
    longest = longest_step(load.itl_target, step)
    return longest / (longest - step) if decodes and step and longest < math.inf else 1.0


def longest_step(itl_target: float, decode: float) -> float:
    """Return the seconds of a step with prompts and decodes, which take ``decode`` seconds alone."""
    return max(itl_target, _LEAST_ITL_STEPS * decode) if itl_target else math.inf


def _paced_step(load: RequestLoad, decode: float, lost: float, queued: float, own: float) -> float:
    """Return the seconds of the steps that compute a prompt of ``own`` seconds behind ``queued`` ones, beside streams.

    They exceed the ITL target, up to its limit, for much work, and beyond it where the prompt would otherwise miss the
    TTFT target. ``lost``: what the ``decode`` seconds of a step cost its prompts.
    """
    shortest = longest_step(load.itl_target, decode)
    if not load.ttft_target or shortest == math.inf:
        return shortest
    longest = longest_paced(useful_step((queued, own), 0.0, lost), shortest, load.itl_limit)
    needed = needed_step(queued + own, load.ttft_target, lost)
    return max(shortest, min(longest, max(needed, load.itl_limit)))


def _block_wait(load: RequestLoad, num_tokens: int) -> float:
    needed = blocks_for(load.windows, num_tokens, load.block_size)
    return _NO_ROOM_SECONDS * (1 + load.waiting) if needed > load.free_blocks else 0.0
