"""Records that cross the seams: scheduler → runner, connector → scheduler, node → node. All frozen, all plain values.

Nothing here knows torch, NIXL or gRPC. A record that has been handed over is never changed by either side.
"""

from __future__ import annotations

from array import array
from enum import StrEnum

import msgspec

from pdserve.kv import KVLayout, KVShare
from pdserve.transports import Connected

TOKEN_BYTES = 4  # token ids in bulk are one buffer of little-endian uint32


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


MAX_PROMPT_LOGPROBS = 20


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How to pick tokens. Fully resolved: what the client left open was filled in by the router.

    ``temperature`` 0 is greedy. ``top_k`` 0 and ``top_p`` 1 are off. ``seed`` keys the noise together with the choice
    index, the position and the token id, so a request samples the same tokens whatever else is in the batch.
    ``logprobs`` is the number of alternatives to report per token; -1 is none at all, 0 the sampled token only.
    ``grammar`` is what the whole output has to follow, as llguidance serializes it; empty is none. Where a choice is in
    it follows from the output tokens so far, so whoever goes on with a choice needs nothing else.
    ``prompt_logprobs`` is to the prompt's tokens what ``logprobs`` is to the output's, MAX_PROMPT_LOGPROBS at most.
    """

    max_tokens: int
    n: int = 1
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int = -1
    grammar: str = ""
    prompt_logprobs: int = -1

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def has_penalty(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0

    @property
    def truncates(self) -> bool:
        """Whether some tokens are cut off before one is drawn."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities (natural log, of the model's raw distribution) at one output position."""

    logprob: float
    top_ids: tuple[int, ...] = ()
    top_logprobs: tuple[float, ...] = ()


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """One sampled token of one choice."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class PromptLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of some of a prompt's tokens, each given those before it; so the first token has none.

    ``table`` has 2 + 2 × ``num_top`` words of 32 bits per token, little-endian: the token's log-probability (float),
    its rank (1 is the best), the ids of the best tokens, and their log-probabilities (float).
    """

    first: int  # index of the first of them in the prompt
    num_top: int
    table: bytes

    @property
    def end(self) -> int:
        """Index behind the last of them."""
        return self.first + len(self.table) // self.row_bytes(self.num_top)

    @staticmethod
    def row_bytes(num_top: int) -> int:
        return 4 * (2 + 2 * num_top)


# ---------------------------------------------------------------- scheduler → connector


class KVRegion(msgspec.Struct, frozen=True):
    """The memory of one rank's KV cache. ``device`` is "cpu" or "cuda"; ``address`` is valid in the owner's process."""

    address: int
    num_bytes: int
    device: str
    device_id: int


class RankKV(msgspec.Struct, frozen=True):
    """What a peer must know of one rank to read from it."""

    agent: str  # NIXL agent name, holds the epoch
    metadata: bytes  # NIXL agent metadata
    region: KVRegion
    layout: KVLayout
    share: KVShare | None = None  # None: all of the model

    @property
    def part(self) -> KVShare:
        """What this rank holds of the model."""
        return self.share or KVShare.whole(self.layout)


class Peer(msgspec.Struct, frozen=True):
    """A node to read from: its id, the epoch of this life of it, and its ranks."""

    node_id: str
    epoch: str
    ranks: tuple[RankKV, ...]


class KVRead(msgspec.Struct, frozen=True):
    """Read ``remote_blocks[i]`` of a peer into ``local_blocks[i]``, for all i."""

    read_id: int  # unique in this engine's life
    epoch: str
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]


class ReadResult(msgspec.Struct, frozen=True):
    """A read that has ended: no byte of it can land any more. ``error`` is empty when all bytes arrived.

    ``seconds`` is the time since the last read from this peer ended, as far as reads were under way: those of all reads
    add up to the time that reading took, however many of them overlapped.
    """

    read_id: int
    error: str = ""
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0


class KVConnectorPlan(msgspec.Struct, frozen=True):
    """Orders for the connector of every rank, carried out before the forward pass."""

    connect: tuple[Peer, ...] = ()
    disconnect: tuple[str, ...] = ()  # epochs
    reads: tuple[KVRead, ...] = ()


NO_ORDERS = KVConnectorPlan()


# ---------------------------------------------------------------- scheduler → runner


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence the runner has not seen yet (or had to forget when it was preempted).

    ``token_ids`` holds the prompt (the first ``prompt_len``) and what was generated so far. The KV of the first
    ``num_computed`` tokens is in ``block_ids`` already. ``choice`` is the index among the n choices of its request.
    Where the sampling parameters ask for prompt_logprobs, those of the first ``num_scored`` tokens need not be told.
    """

    seq: int  # unique in this engine's life
    token_ids: bytes  # uint32
    prompt_len: int
    num_computed: int
    block_ids: tuple[int, ...]
    sampling: SamplingParams
    choice: int = 0
    num_scored: int = 1

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    def tokens(self, start: int, end: int) -> array[int]:
        """Return the token ids of positions ``start`` to ``end - 1``."""
        return array("I", self.token_ids[start * TOKEN_BYTES : end * TOKEN_BYTES])


class ScheduledSequence(msgspec.Struct, frozen=True):
    """What to compute of one sequence in this step: the next ``num_tokens`` tokens after those computed before.

    ``num_samples`` is 0 for a prompt chunk that is not the last, 1 normally, and n when a prompt shared by n choices
    ends: then choices ``0 … n-1`` are drawn from the same logits and the sequence itself goes on as choice 0.
    """

    seq: int
    num_tokens: int
    num_samples: int


class NewBlocks(msgspec.Struct, frozen=True):
    """Blocks of a sequence the runner has seen, after those it was told of before."""

    seq: int
    block_ids: tuple[int, ...]


class DigestOrder(msgspec.Struct, frozen=True):
    """Blocks whose content is to be told as a number each. All ``num_tokens`` tokens count; only the last block may
    hold fewer than ``block_size`` of them, and what else is in it does not count.
    """

    block_ids: tuple[int, ...]
    num_tokens: int


class TokenMask(msgspec.Struct, frozen=True, array_like=True):
    """Which tokens a grammar allows next: bit t % 32 of the little-endian uint32 at t // 32 stands for token t.

    For all draws of a sequence in one step. It takes account of ``min_tokens``, and always allows some token.
    """

    seq: int
    words: bytes  # 4 × ceil(vocab_size / 32)


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass. ``finished`` sequences are forgotten before ``new`` ones are added.

    ``scheduled`` is equal to the last step's while the same sequences decode.
    """

    step: int
    finished: tuple[int, ...] = ()
    new: tuple[NewSequence, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    new_blocks: tuple[NewBlocks, ...] = ()
    connector: KVConnectorPlan = NO_ORDERS
    digests: tuple[DigestOrder, ...] = ()  # of the blocks as they are after this step
    masks: tuple[TokenMask, ...] = ()  # of each sequence with a grammar that this step draws for

    @property
    def has_orders(self) -> bool:
        """Whether there is anything to do for a runner or a connector."""
        return bool(self.scheduled or self.finished or self.digests) or self.connector != NO_ORDERS

    @property
    def num_tokens(self) -> int:
        return sum(s.num_tokens for s in self.scheduled)


class StepOutput(msgspec.Struct, frozen=True):
    """What a step produced: of each scheduled sequence its ``num_samples`` samples, in the plan's order.

    ``digests`` has one signed 64-bit number per block of each of the plan's orders. ``prompt_logprobs`` are of the
    prompt tokens that became known with what was computed, each with its sequence.
    """

    step: int
    samples: tuple[Sample, ...] = ()
    digests: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: tuple[tuple[int, PromptLogprobs], ...] = ()


class KVConnectorOutput(msgspec.Struct, frozen=True):
    """Events of one rank's connector since the last poll.

    A failed read has one error and no list of invalid blocks: D drops the whole read and computes the prompt itself.
    ``connected`` and ``failed_peers`` answer connect orders. ``failed_peers`` also names a connection that broke later,
    so that the node connects again.
    """

    finished_recving: tuple[ReadResult, ...] = ()
    connected: tuple[Connected, ...] = ()
    failed_peers: tuple[tuple[str, str], ...] = ()  # (epoch, reason)

    def __bool__(self) -> bool:
        return bool(self.finished_recving or self.connected or self.failed_peers)


EMPTY_CONNECTOR_OUTPUT = KVConnectorOutput()


class ModelRunnerOutput(msgspec.Struct, frozen=True):
    """What a rank returns from every step, with or without a forward pass."""

    step: StepOutput
    connector: KVConnectorOutput = EMPTY_CONNECTOR_OUTPUT


NO_STEP = 0  # the steps of an engine are numbered from 1 on
EMPTY_OUTPUT = ModelRunnerOutput(StepOutput(NO_STEP))  # of a rank that has nothing to tell
