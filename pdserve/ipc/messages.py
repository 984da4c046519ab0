"""Messages between a node's frontend process (gRPC) and its engine process (step loop).

They travel as frames (pdserve/ipc/frames.py) on a Unix socket pair; the end of the stream means that the other process
died. ``rid`` is the frontend's number of a request, never reused. Heartbeats have a socket pair of their own.

A request with handoff on D:

    frontend                                engine
      Submit(HANDOFF)             ──►
                                  ◄──       reserved(rid, cached_tokens)      blocks are held
      StartRead(blocks)           ──►                                         a part of the prompt that P announced
                                  ◄──       reads(rid, result)                its bytes are here, not used yet
                                  ◄──       checked(rid, num_corrupt=0)       with checksums: they are as P announced
      … until every block of the prompt has been read and checked
      KVConfirmed(…, outputs)     ──►                                         P confirmed the lease
                                  ◄──       outputs(rid, …)                   after the tokens that P sampled
   Before the first StartRead of a pull:
      ComputeBeside               ──►                                         compute the first tokens meanwhile
   At any time before KVConfirmed:
      HandoffEnds                 ──►                                         P computes the last chunk: short steps
      PrefillLocally(outputs)     ──►                                         drop the KV that was read, compute it here
   At any time:
      Cancel                      ──►                                         blocks are free (or quarantined)
      Pause, Resume               ──►                                         no step in between includes the request

On P: Submit(LEASE) ──►   ◄── leased(rid, blocks) after each part of the prompt; the last one is in the same batch as
outputs(first tokens). While no other request needs the device, outputs(rid, …) of further tokens follow.
FreeLease(rid) ──►

Images: PutPixels(digest, …) ──► until the last part, before the Submit that needs them. DropPixels(digest) ──► when no
prompt does.

Adapters: AddAdapter(adapter) ──►   ◄── adapters(digest) once every rank has it in host memory, before the Submits that
name its digest. RemoveAdapter(digest) ──►

A pull, on P: LeaseCached ──►   ◄── leased(rid, cached blocks), at once, or with checksums after a step.
FreeLease(rid) ──►   While requests of P lack its blocks, ◄── revoke(rid), and P waits for FreeLease(rid).
The reader's side is a handoff whose KV ends before the last tokens; it computes these after KVConfirmed. P pulls a
prefix with Submit(PULL_AND_LEASE), and goes on as after Submit(LEASE).
"""

from __future__ import annotations

from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated

import msgspec
from msgspec import Meta

from pdserve.adapters.adapter import NO_ADAPTER, Adapter
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.runner_oracle import Decision
from pdserve.errors import PdserveError
from pdserve.host.process import one_line
from pdserve.images import Images
from pdserve.ipc.cache_changes import CacheChanges, Medium
from pdserve.kv.layout import KVLayout
from pdserve.kv.states import NO_SLOT
from pdserve.kv.transports import Connected
from pdserve.logprobs import PromptLogprobs, TokenLogprobs
from pdserve.records import FinishReason, Peer, RankKV, ReadResult
from pdserve.request_cost import StepCosts
from pdserve.sampling_params import SamplingParams
from pdserve.weights.change import FileStates, HostDigests, WeightChange
from pdserve.weights.sharing import RankWeights, WeightPeer

MAX_PIXEL_PART = 256 << 10  # bytes of a PutPixels

#: Tokens that P has sampled for each choice; they begin its output. Ignored for a resumed request.
Outputs = tuple[tuple[int, ...], ...]


class Mode(StrEnum):
    """Use of a request's KV."""

    LOCAL = "local"  # prefill and decode here
    HANDOFF = "handoff"  # D: reserve blocks, wait for StartRead or PrefillLocally
    LEASE = "lease"  # P: prefill, sample the first tokens, maybe decode ahead; full blocks are kept until FreeLease
    PULL_AND_LEASE = "pull and lease"  # P: first read a prefix, as HANDOFF in a pull, then LEASE

    @property
    def for_peer(self) -> bool:
        return self in (Mode.LEASE, Mode.PULL_AND_LEASE)

    @property
    def loads(self) -> bool:
        """Whether the request begins with a load."""
        return self in (Mode.HANDOFF, Mode.PULL_AND_LEASE)


# ---------------------------------------------------------------- frontend → engine


class RankPlacement(msgspec.Struct, frozen=True):
    """Devices of the ranks on this host, and where ranks on other hosts connect."""

    devices: tuple[DeviceInfo, ...]  # devices of this host's ranks, rank 0 first
    listen: str = ""  # host:port; empty without ranks on other hosts
    rendezvous_timeout: float = 0.0  # seconds to wait for ranks on other hosts


class Configure(msgspec.Struct, frozen=True, tag=True):
    """The first message. ``agent`` is the connector's name, unique per epoch; empty for a node without connector."""

    config: NodeConfig
    agent: str
    placement: RankPlacement
    peer: WeightPeer | None = None  # a node with the weights of this checkpoint in memory
    cache_changes: bool = False  # batches have ``cache_changes``


class Submit(msgspec.Struct, frozen=True, tag=True):
    rid: int
    token_ids: bytes  # little-endian uint32
    sampling: SamplingParams
    mode: Mode
    cache_salt: str = ""
    priority: int = 0  # lower values are admitted first
    skip_tokens: int = 0  # LEASE: leading tokens whose KV the peer has; only later blocks are leased
    decode_ahead: int = 0  # LEASE: most tokens to sample after the first, while no other request lacks their room
    resume: dict[int, bytes] = {}  # LOCAL, HANDOFF: output so far of each live choice; {}: a new request
    client: int = 0  # opaque; waiting requests are served fairly between clients
    paused: bool = False  # in no step until Resume
    urgent: bool = False  # LEASE: before the waiting requests of its client; a running stream waits for it
    kv_layers: int = 0  # LEASE: layers with a KV cache that the peer has, with those that make drafts; 0: as here
    age: float = 0.0  # seconds since the router got the request
    images: Images = ()  # the prompt's; PutPixels has brought the pixels, unless no token of them is computed here


class LeaseCached(msgspec.Struct, frozen=True, tag=True):
    """Lease the full blocks of a prompt that the prefix cache has, and compute nothing. Answered by one Leased."""

    rid: int
    token_ids: bytes  # little-endian uint32
    cache_salt: str
    skip_tokens: int  # leading tokens whose KV the peer has; only later blocks are leased
    kv_layers: int = 0  # as in Submit
    images: Images = ()
    adapter: str = NO_ADAPTER  # digest: only its KV is leased


class StartRead(msgspec.Struct, frozen=True, tag=True):
    """Read P's next blocks in prompt order; the first read begins after ``Reserved.cached_tokens``.

    Each StartRead has one ReadEnded; several may be in flight.
    """

    rid: int
    epoch: str
    remote_blocks: tuple[int, ...]
    num_tokens: int  # prompt tokens up to the end of these blocks
    digests: tuple[int, ...] = ()  # one per block, then the state's, as announced by P; empty without checksums
    remote_state: int = NO_SLOT  # P's slot with the recurrent state after ``handoff_position`` tokens
    pull: bool = False  # the blocks come from P's cache, and may end before the prompt


class ComputeBeside(msgspec.Struct, frozen=True, tag=True):
    """Compute the first tokens of a prompt while the blocks behind them are pulled. Unknown rids are ignored.

    The first read begins after ``num_tokens``, in place of ``Reserved.cached_tokens``.
    """

    rid: int
    num_tokens: int  # in full blocks; more than ``Reserved.cached_tokens``


class HandoffEnds(msgspec.Struct, frozen=True, tag=True):
    """P has launched the last chunk of the prompt, so the request will decode here soon. Unknown rids are ignored."""

    rid: int
    seconds: float  # until the chunk ends


class KVConfirmed(msgspec.Struct, frozen=True, tag=True):
    """P has confirmed that the lease was valid until all announced blocks had been read."""

    rid: int
    num_tokens: int  # leading tokens with KV: all that a handoff brings, fewer after a pull; 0: P had nothing to pull
    outputs: Outputs  # empty after a pull: P has sampled nothing
    waited: float = 0.0  # seconds since P's last token came; without tokens, since the request


class PrefillLocally(msgspec.Struct, frozen=True, tag=True):
    """Give up the handoff. ``outputs`` is empty if P has sampled no tokens."""

    rid: int
    outputs: Outputs = ()


class Cancel(msgspec.Struct, frozen=True, tag=True):
    """End a request without further outputs; its leased blocks stay leased. Unknown rids are ignored."""

    rid: int


class Pause(msgspec.Struct, frozen=True, tag=True):
    """Leave a request out of steps until Resume; outputs of steps in flight still follow. Unknown rids are ignored."""

    rid: int


class Resume(msgspec.Struct, frozen=True, tag=True):
    rid: int


class FreeLease(msgspec.Struct, frozen=True, tag=True):
    """End a request and the lease on its blocks."""

    rid: int


class PutPixels(msgspec.Struct, frozen=True, tag=True):
    """The next part of an image's pixels, at most MAX_PIXEL_PART bytes: uint8 [height, width, 3] in all."""

    digest: bytes  # ImageSpan.digest
    data: bytes
    last: bool  # the image is complete


class DropPixels(msgspec.Struct, frozen=True, tag=True):
    """No prompt needs these pixels any more. They may be incomplete. Unknown digests are ignored."""

    digest: bytes


class Connect(msgspec.Struct, frozen=True, tag=True):
    peer: Peer


class Disconnect(msgspec.Struct, frozen=True, tag=True):
    epoch: str


class ChangeWeights(msgspec.Struct, frozen=True, tag=True):
    """Change the weights of all ranks, or with ``only_check`` compare them with the change. Answered by WeightsAnswer.

    A change drops the prefix cache; no request may be open.
    """

    change: WeightChange
    only_check: bool = False


class UseWeights(msgspec.Struct, frozen=True, tag=True):
    """The version of the node's KV (NodeConfig.kv_version): at the start, and after each change of the weights."""

    version: str


class AddAdapter(msgspec.Struct, frozen=True, tag=True):
    """Load an adapter to the host memory of all ranks, beside steps. Answered by AdapterAdded."""

    adapter: Adapter


class RemoveAdapter(msgspec.Struct, frozen=True, tag=True):
    """Refuse new requests of an adapter; its memory is freed after the running ones. Unknown digests are ignored."""

    digest: str


class Ping(msgspec.Struct, frozen=True, tag=True):
    """No order: an engine that does not take even this command hangs."""


class Shutdown(msgspec.Struct, frozen=True, tag=True):
    pass


ToEngine = (
    Configure
    | Submit
    | LeaseCached
    | StartRead
    | ComputeBeside
    | HandoffEnds
    | KVConfirmed
    | PrefillLocally
    | Cancel
    | Pause
    | Resume
    | FreeLease
    | PutPixels
    | DropPixels
    | Connect
    | Disconnect
    | ChangeWeights
    | UseWeights
    | AddAdapter
    | RemoveAdapter
    | Ping
    | Shutdown
)


# ---------------------------------------------------------------- engine → frontend


class Progress(msgspec.Struct, frozen=True, tag=True):
    """Progress of the start; ``fraction`` is 0 … 1 of this stage, or -1 if unknown."""

    stage: str
    fraction: float = -1.0


class Ready(msgspec.Struct, frozen=True, tag=True):
    kv_layout: KVLayout  # as allocated; the configuration's layout is an estimate if the runner measures memory
    ranks: tuple[RankKV, ...]  # empty without connector
    decision: Decision  # the configuration's, unless ranks on other hosts lack something
    weights: tuple[RankWeights, ...] = ()  # offered to nodes that start
    loaded_files: tuple[FileStates, ...] = ()  # by rank on this host
    digests: tuple[HostDigests, ...] = ()  # from other hosts


class Failed(msgspec.Struct, frozen=True, tag=True):
    """An error that ends a process. ``message`` is one line for the user."""

    kind: str  # a class name of pdserve.errors; "EngineDied" for any other error
    message: str

    @classmethod
    def of(cls, error: Exception) -> Failed:
        return cls(type(error).__name__ if isinstance(error, PdserveError) else "EngineDied", one_line(error))


class Crashed(msgspec.Struct, frozen=True, tag=True):
    """The last message of an engine that ends with an error: the requests that may be its cause."""

    rids: tuple[int, ...]


class OutputTokens(msgspec.Struct, array_like=True):
    """Sampled tokens of all choices, in parallel columns with an entry per token.

    LEASE: the first tokens of all choices are in one batch; ``finish`` means that no more tokens of the choice follow.
    """

    rids: list[int] = []
    choices: list[int] = []
    token_ids: list[int] = []
    finish: dict[int, FinishReason] = {}  # by index into the columns, for tokens that end their choice
    logprobs: dict[int, TokenLogprobs] = {}  # by index into the columns, where requested

    def add(
        self, rid: int, choice: int, token_id: int, *, logprobs: TokenLogprobs | None, finish: FinishReason | None
    ) -> None:
        if finish is not None:
            self.finish[len(self.rids)] = finish
        if logprobs is not None:
            self.logprobs[len(self.rids)] = logprobs
        self.rids.append(rid)
        self.choices.append(choice)
        self.token_ids.append(token_id)

    def rows(self) -> Iterator[tuple[int, int, int, FinishReason | None, TokenLogprobs | None]]:
        """Yield (rid, choice, token id, finish reason, log-probabilities) of each token."""
        indices = range(len(self.rids))
        details = map(self.finish.get, indices), map(self.logprobs.get, indices)
        return zip(self.rids, self.choices, self.token_ids, *details, strict=True)


class Prefilled(msgspec.Struct, frozen=True, array_like=True):
    """A prompt has been computed here; its first tokens are in the same batch. Sent once per request."""

    rid: int
    cached_tokens: int  # prompt tokens found in the prefix cache
    queued: float  # seconds that the request waited for its first step


class LastChunk(msgspec.Struct, frozen=True, array_like=True):
    """LEASE: a step that is about to be launched computes the rest of the prompt. Repeated after a preemption."""

    rid: int
    seconds: float  # until the step ends, as expected; 0.0: unknown


class DecodeAheadEnded(msgspec.Struct, frozen=True, array_like=True):
    """LEASE: no more tokens of the request's only choice follow, though none of them ended it."""

    rid: int


class Drafted(msgspec.Struct, frozen=True, array_like=True):
    """A decode with drafts, whose tokens are in the same batch. Drafts behind a choice's end are not ``accepted``."""

    rid: int
    accepted: int
    rejected: int


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of more of a prompt's tokens, sent before the first output token or with it."""

    rid: int
    logprobs: PromptLogprobs


class Pooled(msgspec.Struct, frozen=True, array_like=True):
    """The vector of a prompt on a node that pools. Ignore the only output token, in the same batch."""

    rid: int
    vector: bytes  # little-endian float32


class Reserved(msgspec.Struct, frozen=True, array_like=True):
    rid: int
    cached_tokens: int  # a multiple of block_size, less than the prompt's length


class Fetched(msgspec.Struct, frozen=True, array_like=True):
    """End of a fetch: a tier behind the prefix cache has brought a waiting request's cached blocks, or failed to."""

    rid: int
    medium: Medium
    num_tokens: int  # prompt tokens that need no computation; 0: the fetch failed or was given up
    seconds: float  # duration of the fetch
    expected: float  # predicted seconds of the fetch; 0: unknown
    computing: float  # predicted seconds to compute the tokens instead; 0: unknown


class Refused(msgspec.Struct, frozen=True, array_like=True):
    """A request that is not served. ``kind`` is the name of a class in pdserve.errors."""

    rid: int
    kind: str
    message: str


class ReadEnded(msgspec.Struct, frozen=True, array_like=True):
    """The read of one part of a prompt has ended. The request may have ended before."""

    rid: int
    epoch: str  # the peer's
    result: ReadResult  # as the connector reports it


class ReadChecked(msgspec.Struct, frozen=True, array_like=True):
    """The digests of a successful read were compared with P's announced digests."""

    rid: int
    epoch: str  # the peer's
    num_corrupt: int  # blocks whose digests differ
    error: str  # empty: none differs


class Leased(msgspec.Struct, frozen=True, array_like=True):
    """More leased blocks of a prompt; none if a pull finds no more than the peer has."""

    rid: int
    block_ids: tuple[int, ...]  # the next blocks after skipped and previously leased ones
    num_tokens: int  # prompt tokens up to the end of these blocks
    last: bool  # no more blocks follow
    digests: tuple[int, ...] = ()  # one per block, then the state's; empty without checksums
    state_slot: int = NO_SLOT  # with the last blocks: slot of the recurrent state after ``handoff_position`` tokens


class AdapterAdded(msgspec.Struct, frozen=True, array_like=True):
    """The end of an AddAdapter. ``kind`` is the name of a class in pdserve.errors; empty: requests may use it."""

    digest: str
    kind: str = ""
    message: str = ""


class Counters(msgspec.Struct, array_like=True):
    """Counters since the engine's start; ``X`` is exported as ``pdserve_X_total``, with the meaning given here."""

    steps: Annotated[int, Meta(description="Steps with a forward pass.")] = 0
    preemptions: Annotated[
        int, Meta(description="Sequences preempted because KV blocks were lacking, or for fairness.")
    ] = 0
    fair_preemptions: Annotated[
        int, Meta(description="Of these, to make room for a client with far fewer sequences.")
    ] = 0
    preempted_tokens: Annotated[int, Meta(description="Tokens whose KV was dropped by preemption.")] = 0
    admitted_prompt_tokens: Annotated[int, Meta(description="Prompt tokens of admitted requests.")] = 0
    prefix_cached_tokens: Annotated[int, Meta(description="Admitted prompt tokens found in the prefix cache.")] = 0
    sampled_tokens: Annotated[int, Meta(description="Tokens sampled.")] = 0
    step_seconds: Annotated[
        float, Meta(description="Duration of these steps, each without the time of the step before it.")
    ] = 0.0
    host_seconds: Annotated[float, Meta(description="Work of the step loop, without waiting for results.")] = 0.0
    prompt_seconds: Annotated[float, Meta(description="What prompts added to the duration of these steps.")] = 0.0
    mixed_steps: Annotated[int, Meta(description="Steps that computed prompts beside sequences that decode.")] = 0
    mixed_step_seconds: Annotated[float, Meta(description="Duration of these steps.")] = 0.0
    mixed_prompt_tokens: Annotated[int, Meta(description="Prompt tokens computed in these steps.")] = 0
    spec_decode_num_drafts: Annotated[int, Meta(description="Decodes of a sequence with drafts.")] = 0
    spec_decode_num_draft_tokens: Annotated[int, Meta(description="Drafts in these decodes.")] = 0
    spec_decode_num_accepted_tokens: Annotated[int, Meta(description="Drafts that were accepted.")] = 0
    host_kv_hit_tokens: Annotated[
        int, Meta(description="Tokens of prompts whose KV came back from host memory, instead of being computed.")
    ] = 0
    host_kv_load_bytes: Annotated[int, Meta(description="KV copied from host memory to the device, in bytes.")] = 0
    host_kv_load_seconds: Annotated[float, Meta(description="Duration of these copies.")] = 0.0
    host_kv_expected_saved_seconds: Annotated[
        float, Meta(description="Time that these loads were to save: predicted to compute, minus predicted to load.")
    ] = 0.0
    host_kv_saved_seconds: Annotated[
        float, Meta(description="Time that loads have saved: predicted to compute, minus measured.")
    ] = 0.0
    host_kv_lost_seconds: Annotated[
        float, Meta(description="Time lost by loads that took longer than predicted to compute, or that failed.")
    ] = 0.0
    host_kv_store_bytes: Annotated[int, Meta(description="KV copied from the device to host memory, in bytes.")] = 0
    host_kv_evicted_blocks: Annotated[int, Meta(description="Blocks dropped from host memory.")] = 0
    host_kv_missed_blocks: Annotated[
        int, Meta(description="Blocks evicted from the device before they were copied to host memory.")
    ] = 0
    host_kv_corrupt_blocks: Annotated[
        int, Meta(description="Blocks whose content in host memory had changed: their tokens were computed again.")
    ] = 0
    disk_kv_hit_tokens: Annotated[
        int, Meta(description="Tokens of prompts whose KV came back from disk to the device, unchanged.")
    ] = 0
    disk_kv_load_bytes: Annotated[int, Meta(description="KV read from disk, in bytes.")] = 0
    disk_kv_load_seconds: Annotated[float, Meta(description="Duration of these reads.")] = 0.0
    disk_kv_expected_saved_seconds: Annotated[
        float, Meta(description="Time that these reads were to save: predicted to compute, minus predicted to read.")
    ] = 0.0
    disk_kv_saved_seconds: Annotated[
        float, Meta(description="Time that reads have saved: predicted to compute, minus measured.")
    ] = 0.0
    disk_kv_lost_seconds: Annotated[
        float, Meta(description="Time lost by reads that took longer than predicted to compute, or that failed.")
    ] = 0.0
    disk_kv_late_reads: Annotated[
        int, Meta(description="Reads from disk that took longer than to compute their tokens, which was done instead.")
    ] = 0
    disk_kv_store_bytes: Annotated[int, Meta(description="KV written to disk, in bytes.")] = 0
    disk_kv_evicted_blocks: Annotated[
        int, Meta(description="Files of blocks, one per rank, that this node has removed to make room.")
    ] = 0
    disk_kv_missed_blocks: Annotated[
        int, Meta(description="Blocks that left host memory before they were written to disk.")
    ] = 0
    disk_kv_failures: Annotated[int, Meta(description="Reads, writes and removals that failed, on any rank.")] = 0
    disk_kv_corrupt_blocks: Annotated[
        int, Meta(description="Blocks whose content on disk had changed: their tokens were computed again.")
    ] = 0
    images_encoded: Annotated[int, Meta(description="Images encoded.")] = 0
    image_cache_hits: Annotated[
        int, Meta(description="Images of prompts whose embeddings were cached when a step began them.")
    ] = 0


class Totals(Counters):
    """All counters of an engine."""

    accepted_per_position: list[int] = []  # drafts, by the number of drafts before them


class Status(msgspec.Struct, frozen=True, array_like=True):
    """``free + held + leased + quarantined = total``, always."""

    free: int = 0
    held: int = 0
    leased: int = 0
    quarantined: int = 0
    total: int = 0
    waiting: int = 0
    reading: int = 0
    running: int = 0
    totals: Totals = msgspec.field(default_factory=Totals)
    backlog: int = 0  # uncached prompt tokens to compute here
    costs: StepCosts = StepCosts()
    paused: int = 0
    decoding: int = 0  # ``running`` sequences that decode; the others compute prompts
    for_peers: int = 0  # prompts in ``waiting`` and ``running`` that other nodes decode
    itl_target: float = 0.0  # seconds between tokens that steps with prompts keep (engine/scheduler/itl_target.py)
    itl_limit: float = 0.0  # seconds up to which steps with much work of prompts may exceed ``itl_target``
    ttft_target: float = 0.0  # seconds until first tokens for which steps may take longer; 0: none
    state_slots: tuple[int, int, int, int] = (0, 0, 0, 0)  # slots of recurrent state: free, held, leased, quarantined
    host_blocks: tuple[int, int] = (0, 0)  # blocks in host memory: free, and with cached KV
    disk_blocks: int = 0  # blocks on disk that this node knows
    running_adapters: tuple[str, ...] = ()  # digests, of running and loading sequences
    waiting_adapters: tuple[str, ...] = ()  # digests, of waiting sequences


class EventBatch(msgspec.Struct, tag=True):
    """Events of one iteration of the step loop; sent only if there are any.

    The scheduler and its parts add to one batch; ``take`` completes it for the frontend.
    """

    status: Status = Status()
    scored: list[Scored] = []  # applies before the outputs
    pooled: list[Pooled] = []  # applies before the outputs
    prefilled: list[Prefilled] = []  # applies before the outputs
    drafted: list[Drafted] = []  # applies before the outputs
    outputs: OutputTokens = msgspec.field(default_factory=OutputTokens)
    last_chunks: list[LastChunk] = []
    decode_ahead_ended: list[DecodeAheadEnded] = []  # applies after the outputs
    fetched: list[Fetched] = []
    reserved: list[Reserved] = []
    refused: list[Refused] = []
    reads: list[ReadEnded] = []
    checked: list[ReadChecked] = []
    leased: list[Leased] = []
    revoke: list[int] = []  # rids of pulls whose leases must end, as requests on this node need the blocks
    connected: list[Connected] = []
    failed_peers: list[tuple[str, str]] = []  # (epoch, reason)
    adapters: list[AdapterAdded] = []
    status_changed: bool = False  # blocks were freed, or a request was paused or resumed
    cached: list[bytes] = []  # hashes of blocks that entered the prefix cache
    evicted: list[bytes] = []  # hashes of blocks that left it
    cache_changes: list[CacheChanges] = []  # with KV events: net changes with tokens, for all KV cache groups
    images_cached: list[bytes] = []  # digests of images that have embeddings now
    images_dropped: list[bytes] = []  # digests of images that have lost them

    def __bool__(self) -> bool:
        return bool(self.outputs.rids) or any(getattr(self, name) for name in _EVENTS)

    def take(
        self,
        status: Status,
        images: tuple[list[bytes], list[bytes]],
        cached: list[bytes],
        evicted: list[bytes],
        cache_changes: list[CacheChanges],
    ) -> EventBatch:
        """Return the batch as a message, with the changes of images and of the prefix cache, and start over."""
        taken = msgspec.structs.replace(
            self,
            status=status,
            cached=cached,
            evicted=evicted,
            cache_changes=cache_changes,
            images_cached=images[0],
            images_dropped=images[1],
        )
        for name, value in msgspec.structs.asdict(EventBatch()).items():
            setattr(self, name, value)
        return taken


_NO_EVENTS = ("status", "outputs", "cached", "evicted", "cache_changes", "images_cached", "images_dropped")
_EVENTS = tuple(name for name in EventBatch.__struct_fields__ if name not in _NO_EVENTS)


class Heartbeat(msgspec.Struct, frozen=True, tag=True):
    """Liveness of a process. Times are in seconds; the gaps are the longest since Ready."""

    loop_gap: float  # part of a step loop iteration outside the runner
    thread_gap: float  # time in which no other Python thread could run
    iteration: float  # duration of the current step loop iteration; 0.0 between iterations
    silent_ranks: str = ""  # ranks without heartbeat, in words
    waiting_for: str = ""  # ranks that the step loop or a read waits for, in words
    expected: float = 0.0  # duration of ``iteration`` predicted from measured steps; inf if unknown
    num_taken: int = 0  # messages that the step loop has taken from the frontend


class WeightsAnswer(msgspec.Struct, frozen=True, tag=True):
    """The end of a ChangeWeights. ``kind`` is the name of a class in pdserve.errors; empty without an error."""

    kind: str
    message: str
    has_weights: bool  # the new weights, or after an error the old ones, are in use; False: no request can be served


FromEngine = Progress | Ready | Failed | Crashed | EventBatch | Heartbeat | WeightsAnswer
