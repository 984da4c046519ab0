"""What a node's front process (gRPC) and its engine process (step loop) say to each other.

In frames (engine/ipc/frames.py) on a Unix socket pair. Either side takes the end of the stream as the other's death.
``rid`` is a number the front draws per request, never reused. The engine's heartbeat comes over a pair of its own.

How a request goes on D, with handoff:

    front                                   engine
      Submit(HANDOFF)             ──►
                                  ◄──       reserved(rid, cached_tokens)      blocks are held
      StartRead(blocks)           ──►                                         a part of the prompt, as P announces it
                                  ◄──       reads(rid, error="")              its bytes are here, nobody used them
      … until every block of the prompt has been read
      KVConfirmed(outputs)        ──►                                         P said the lease stood
                                  ◄──       outputs(rid, …)                   behind those that P has sampled
   At any time before KVConfirmed:
      PrefillLocally(outputs)     ──►                                         drop what was read, compute it here
   At any time:
      Cancel                      ──►                                         blocks come back (or are quarantined)

On P: Submit(LEASE) ──►   ◄── leased(rid, blocks) after each part of the prompt; with the last, in the same batch, also
outputs(first tokens); then, while nobody else needs the device, outputs(rid, …) of more.   FreeLease(rid) ──►
In integrity mode each leased follows a step later, with its digests.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from enum import StrEnum

import msgspec

from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.kv import KVLayout
from pdserve.records import FinishReason, Peer, PromptLogprobs, RankKV, SamplingParams, TokenLogprobs
from pdserve.throughput import Throughput
from pdserve.transports import Connected

#: The tokens that P has sampled for each choice, which begin its output; of no use to a request that was resumed.
Outputs = tuple[tuple[int, ...], ...]


class Mode(StrEnum):
    """What is to become of a request's KV."""

    LOCAL = "local"  # prefill and decode here
    HANDOFF = "handoff"  # D: reserve blocks, wait for StartRead or PrefillLocally
    LEASE = "lease"  # P: prefill, sample first tokens, maybe more; blocks are kept, as soon as full, until FreeLease


# ---------------------------------------------------------------- front → engine


class RankPlacement(msgspec.Struct, frozen=True):
    """Devices of the ranks on this host, and where ranks on other hosts connect."""

    devices: tuple[DeviceInfo, ...]  # of the first ranks
    listen: str = ""  # host:port; empty without ranks on other hosts


class Configure(msgspec.Struct, frozen=True, tag=True):
    """First message of all. ``agent`` is the connector's name, unique per epoch; empty for a node without connector."""

    config: NodeConfig
    agent: str
    placement: RankPlacement


class Submit(msgspec.Struct, frozen=True, tag=True):
    rid: int
    token_ids: bytes  # little-endian uint32
    sampling: SamplingParams
    mode: Mode
    cache_salt: str = ""
    priority: int = 0  # lower values are admitted first
    skip_tokens: int = 0  # LEASE: the peer has these already; only later blocks are leased
    decode_ahead: int = 0  # LEASE: most tokens to sample after the first, while no other request needs the device
    resume: dict[int, bytes] = {}  # LOCAL, HANDOFF: the choices that go on, with their output so far; {}: a new request


class StartRead(msgspec.Struct, frozen=True, tag=True):
    """``remote_blocks`` are P's next ones in prompt order, the first after the ``cached_tokens`` that were reserved.

    Each is answered by one ReadEnded; several may be under way.
    """

    rid: int
    epoch: str
    remote_blocks: tuple[int, ...]
    num_tokens: int  # of the prompt, up to the end of these blocks
    digests: tuple[int, ...] = ()  # of these blocks, as P has announced them; in integrity mode, else none


class KVConfirmed(msgspec.Struct, frozen=True, tag=True):
    """The whole prompt has been read, and P says that it is what the lease promised."""

    rid: int
    outputs: Outputs


class PrefillLocally(msgspec.Struct, frozen=True, tag=True):
    """``outputs`` are empty where P has not sampled any."""

    rid: int
    outputs: Outputs = ()


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """Unknown and finished rids are ignored. The request has no further outputs; what was leased of it stays leased."""

    rid: int


class FreeLease(msgspec.Struct, frozen=True, tag=True):
    """The blocks leased for a request are no longer promised to anybody, and what is still computed is not wanted."""

    rid: int


class Connect(msgspec.Struct, frozen=True, tag=True):
    peer: Peer


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    epoch: str


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


ToEngine = (
    Configure | Submit | StartRead | KVConfirmed | PrefillLocally | Cancel | FreeLease | Connect | Disconnect | Shutdown
)


# ---------------------------------------------------------------- engine → front


class Progress(msgspec.Struct, frozen=True, tag=True):
    """While starting; ``fraction`` is 0 … 1 of this stage, or -1 where unknown."""

    stage: str
    fraction: float = -1.0


class Ready(msgspec.Struct, frozen=True, tag=True):
    kv_layout: KVLayout  # as allocated: where the runner measured memory, the configuration's was an estimate
    ranks: tuple[RankKV, ...]  # empty without connector


class StartFailed(msgspec.Struct, frozen=True, tag=True):
    """``kind`` is the name of a class in pdserve.errors, ``message`` one line for a person."""

    kind: str
    message: str


class OutputTokens(msgspec.Struct, frozen=True, array_like=True):
    """Sampled tokens of all choices, in parallel columns with an entry per token.

    LEASE: the first tokens of all choices are in one batch; ``finish`` means that no more tokens of the choice follow.
    """

    rids: tuple[int, ...] = ()
    choices: tuple[int, ...] = ()
    token_ids: bytes = b""  # uint32
    finish: dict[int, FinishReason] = {}  # by index into the columns, for tokens that end their choice
    logprobs: dict[int, TokenLogprobs] = {}  # by index into the columns, where requested

    def rows(self) -> Iterator[tuple[int, int, int, FinishReason | None, TokenLogprobs | None]]:
        """Yield (rid, choice, token id, finish reason, log-probabilities) of each token."""
        indices = range(len(self.rids))
        details = map(self.finish.get, indices), map(self.logprobs.get, indices)
        return zip(self.rids, self.choices, array("I", self.token_ids), *details, strict=True)


class Prefilled(msgspec.Struct, frozen=True, array_like=True):
    """A prompt has been computed here; its first tokens are in the same batch. Sent once per request."""

    rid: int
    cached_tokens: int  # of the prompt, found in the prefix cache
    queued: float  # seconds that the request waited for its first step


class DecodeAheadEnded(msgspec.Struct, frozen=True, array_like=True):
    """LEASE: no more tokens of the request's only choice follow, though none of them ended it."""

    rid: int


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of more of a prompt's tokens, sent before the first output token or with it."""

    rid: int
    found: PromptLogprobs


class Reserved(msgspec.Struct, frozen=True, array_like=True):
    rid: int
    cached_tokens: int  # a multiple of block_size, less than the prompt's length


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """A request that was not, or cannot be, served. ``kind`` is the name of a class in pdserve.errors."""

    rid: int
    kind: str
    message: str


class ReadEnded(msgspec.Struct, frozen=True, array_like=True):
    """Of one part of a prompt. The request may have been given up meanwhile."""

    rid: int
    error: str  # empty: all bytes arrived
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0
    num_corrupt: int = 0  # blocks with another digest than P has announced
    epoch: str = ""  # of the peer


class Leased(msgspec.Struct, frozen=True, array_like=True):
    """More blocks of a prompt; the last ones where ``num_tokens`` is the prompt's length."""

    rid: int
    block_ids: tuple[int, ...]  # after the skipped tokens and those leased before
    num_tokens: int  # of the prompt, up to the end of these blocks
    digests: tuple[int, ...] = ()  # of these blocks, in integrity mode


class Totals(msgspec.Struct, array_like=True):
    """What an engine has counted since it started; ``X`` is exported as ``pdserve_X_total``."""

    steps: int = 0
    preemptions: int = 0
    preempted_tokens: int = 0  # whose KV a preemption dropped: it is computed again
    admitted_prompt_tokens: int = 0
    prefix_cached_tokens: int = 0  # of these
    sampled_tokens: int = 0
    step_seconds: float = 0.0  # of steps that computed something, each without those before it
    host_seconds: float = 0.0  # of the step loop, without waiting for results


class Status(msgspec.Struct, frozen=True, array_like=True):
    """``free + held + leased + quarantined = total``, always."""

    free: int
    held: int
    leased: int
    quarantined: int
    total: int
    waiting: int
    reading: int
    running: int
    totals: Totals
    backlog: int = 0  # prompt tokens that are to be computed here, without what is cached
    throughput: Throughput = Throughput()


class Batch(msgspec.Struct, frozen=True, tag=True):
    """What one turn of the step loop has to tell; sent only when there is something."""

    status: Status
    scored: tuple[Scored, ...] = ()  # applies before the outputs
    prefilled: tuple[Prefilled, ...] = ()  # likewise
    outputs: OutputTokens = OutputTokens()
    decode_ahead_ended: tuple[DecodeAheadEnded, ...] = ()  # applies after the outputs
    reserved: tuple[Reserved, ...] = ()
    refused: tuple[Refused, ...] = ()
    reads: tuple[ReadEnded, ...] = ()
    leased: tuple[Leased, ...] = ()
    connected: tuple[Connected, ...] = ()
    failed_peers: tuple[tuple[str, str], ...] = ()  # (epoch, reason)
    cached: tuple[bytes, ...] = ()  # digests of blocks that can be found again from now on
    evicted: tuple[bytes, ...] = ()  # … that cannot any more


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Liveness of a process. Times are in seconds; the gaps are the longest since Ready."""

    loop_gap: float  # part of a step loop iteration outside the runner
    thread_gap: float  # time in which no other Python thread could run
    iteration: float  # duration of the current step loop iteration; 0.0 while it waits for work
    silent_ranks: str = ""  # ranks without heartbeat, in words
    waiting_for: str = ""  # ranks that the step loop or a read waits for, in words


FromEngine = Progress | Ready | StartFailed | Batch | Heartbeat
