"""Records between scheduler, runner, connector and nodes. All are frozen plain values, free of torch, NIXL and gRPC."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from pdserve.adapters.adapter import NO_ADAPTER_SLOT, Adapter, AdapterLoaded, AdapterSlot
from pdserve.images import EncodedImage, Images
from pdserve.kv.disk_transfers import AnyDiskOrder, DiskEvent
from pdserve.kv.host_copies import CopyResult, HostCopy, HostRoom
from pdserve.kv.layout import KVLayout, KVRegion, KVShare
from pdserve.kv.states import NO_SLOT, RankStates, StateSnapshot
from pdserve.kv.transports import Connected
from pdserve.logprobs import PromptLogprobs, TokenLogprobs
from pdserve.sampling_params import SamplingParams

TOKEN_BYTES = 4  # token ids in bulk are one buffer of little-endian uint32


class FinishReason(StrEnum):
    """Why a choice ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


class Sample(msgspec.Struct, frozen=True, array_like=True):
    """A token that P has sampled for one choice."""

    token_id: int
    logprobs: TokenLogprobs | None = None


class RankKV(msgspec.Struct, frozen=True):
    """The address and layout of one rank's KV cache, for peers that read from it."""

    agent: str  # NIXL agent name, holds the epoch
    metadata: bytes  # NIXL agent metadata
    region: KVRegion
    layout: KVLayout
    share: KVShare | None = None  # None: the whole model
    states: RankStates | None = None  # None: no recurrent layers

    @property
    def part(self) -> KVShare:
        return self.share or KVShare.whole(self.layout)


class Peer(msgspec.Struct, frozen=True):
    """A node to read from."""

    node_id: str
    epoch: str
    ranks: tuple[RankKV, ...]
    other_drafts: bool = False  # another layer or head makes its drafts, whose KV is of no use here


class KVRead(msgspec.Struct, frozen=True):
    """Read ``remote_blocks[i]`` of a peer into ``local_blocks[i]``, for all i."""

    read_id: int  # unique in this engine
    epoch: str
    local_blocks: tuple[int, ...]
    remote_blocks: tuple[int, ...]
    groups: tuple[int, ...] = ()  # KV cache group of each block; empty: the model has one group
    local_state: int = NO_SLOT  # slot that receives the recurrent state of ``remote_state``
    remote_state: int = NO_SLOT


class ReadResult(msgspec.Struct, frozen=True):
    """A read that has ended: none of its bytes can land any more. ``error`` is empty if all bytes arrived."""

    read_id: int
    error: str = ""
    num_bytes: int = 0
    num_descriptors: int = 0
    seconds: float = 0.0  # with reads in flight since this peer's last read ended; overlapping time counts once


class DigestOrder(msgspec.Struct, frozen=True):
    """Compute a digest of each block, then of each slot of recurrent state."""

    block_ids: tuple[int, ...]
    num_tokens: int  # prompt tokens up to the end of the last block of each group
    groups: tuple[int, ...] = ()  # KV cache group of each block; empty: the model has one group
    state_slots: tuple[int, ...] = ()
    num_layers: int = 0  # leading layers that the digests cover; 0: all


class KVConnectorOrders(msgspec.Struct, frozen=True):
    """Orders for every rank that wait for no step: about KV that no step writes, and adapters in host memory."""

    connect: tuple[Peer, ...] = ()
    disconnect: tuple[str, ...] = ()  # epochs
    reads: tuple[KVRead, ...] = ()
    digests: tuple[tuple[int, DigestOrder], ...] = ()  # (id, order); the id is unique in this engine
    copies: tuple[HostCopy, ...] = ()
    allocate_host_memory: bool = False  # begin the allocation
    disk: tuple[AnyDiskOrder, ...] = ()
    dropped_adapters: tuple[str, ...] = ()  # digests; before the loads
    adapters: tuple[Adapter, ...] = ()  # to be loaded to host memory


NO_ORDERS = KVConnectorOrders()


# ---------------------------------------------------------------- scheduler → runner


class NewSequence(msgspec.Struct, frozen=True):
    """A sequence that the runner does not know, because it is new or was preempted."""

    seq: int  # unique in this engine
    token_ids: bytes  # uint32: prompt, then the output so far
    prompt_len: int
    num_computed: int  # leading tokens whose KV is in ``block_ids`` already
    block_ids: tuple[int, ...]  # as in pdserve/kv/groups.py; later, blocks behind a window are freed without notice
    sampling: SamplingParams
    choice: int = 0  # index among the n choices of its request
    num_scored: int = 1  # leading prompt tokens whose log-probabilities were reported already
    state_slot: int = NO_SLOT  # slot of the recurrent state
    state_from: int = NO_SLOT  # slot with the state after ``num_computed`` tokens; NO_SLOT: ``num_computed`` is 0
    images: Images = ()  # all of the prompt
    copies: tuple[tuple[int, int], ...] = ()  # (from, to) blocks, copied before its first step
    adapter_slot: int = NO_ADAPTER_SLOT  # slot of its adapter; NO_ADAPTER_SLOT: the base model

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    def tokens(self, start: int, end: int) -> array[int]:
        return array("I", self.token_ids[start * TOKEN_BYTES : end * TOKEN_BYTES])


class ScheduledSequence(msgspec.Struct, frozen=True):
    """One sequence's part of a step: its next ``num_tokens`` tokens are computed.

    ``num_samples`` is 0 for a prompt chunk that is not the last, 1 normally, and n at the end of a prompt shared by n
    choices: all are sampled from the same logits, and the sequence continues as choice 0.

    A decode computes the newest token of a sequence, then drafts: guesses of the tokens after it. The runner samples at
    each of these positions, and accepts drafts while they equal the samples. So a decode yields 1 … ``num_tokens``
    tokens: one per accepted draft, and one more. The next step begins at the last of them, and overwrites the KV of
    rejected drafts. If the drafts come with the plan (``Drafts``), it is planned once the host knows these tokens.
    """

    seq: int
    num_tokens: int
    num_samples: int

    @classmethod
    def decode(cls, seq: int, num_drafts: int = 0) -> ScheduledSequence:
        """Return a decode: it computes the newest token of a sequence and ``num_drafts`` drafts."""
        return cls(seq, num_tokens=1 + num_drafts, num_samples=1)

    def sampled_choices(self, own: int) -> Sequence[int]:
        """Return the choices that are sampled: all of a prompt's, or ``own``, which is the sequence's."""
        return range(self.num_samples) if self.num_samples > 1 else (own,) * self.num_samples


class Drafts(msgspec.Struct, frozen=True, array_like=True):
    """Drafts of a decode, and the tokens that its last decode with drafts yielded, for ranks that lack either."""

    seq: int
    token_ids: tuple[int, ...] = ()  # one less than the decode's ``num_tokens``
    yielded: tuple[int, ...] = ()
    accept: int | None = None  # number of drafts that become tokens without verification (--synthetic-acceptance)


class NewBlocks(msgspec.Struct, frozen=True):
    """Further blocks of a sequence that the runner knows."""

    seq: int
    block_ids: tuple[int, ...]


class TokenMask(msgspec.Struct, frozen=True, array_like=True):
    """Tokens that a grammar or token rules allow next: bit t % 32 of the little-endian uint32 at t // 32 is token t.

    It respects ``min_tokens`` and always allows some token. A decode with drafts has one for each of its tokens.
    """

    seq: int
    words: bytes  # num_bytes(vocab_size)
    drafts_before: int = 0  # drafts of the step before the sampled position of this mask

    @staticmethod
    def num_bytes(vocab_size: int) -> int:
        """Return the length of ``words``; all masks of a step have it."""
        return 4 * -(-vocab_size // 32)


class StepPlan(msgspec.Struct, frozen=True):
    """One forward pass. The runner drops ``finished`` sequences before it adds ``new`` ones.

    ``scheduled`` begins with ``num_decodes`` decodes (``ScheduledSequence.decode``); prompts follow, which may have one
    token, too. It equals the last step's while the same sequences decode with as many drafts.
    """

    step: int
    finished: tuple[int, ...] = ()
    new: tuple[NewSequence, ...] = ()
    scheduled: tuple[ScheduledSequence, ...] = ()
    num_decodes: int = 0
    new_blocks: tuple[NewBlocks, ...] = ()
    digests: tuple[DigestOrder, ...] = ()  # computed on the blocks' content after this step
    masks: tuple[TokenMask, ...] = ()  # for each masked sequence that samples in this step
    drafts: tuple[Drafts, ...] = ()  # for decodes
    drafts_ahead: int = 0  # drafts that the model makes for the next step of each sequence that samples
    state_snapshots: tuple[StateSnapshot, ...] = ()
    state_copies: tuple[tuple[int, int], ...] = ()  # (from, to) slots of recurrent state, copied behind this step
    dropped_images: tuple[bytes, ...] = ()  # digests of embeddings that no step needs any more; before ``images``
    images: tuple[EncodedImage, ...] = ()  # encoded before the forward pass; pieces may come without ``scheduled``
    adapters: tuple[AdapterSlot, ...] = ()  # copied to their slots before the forward pass; no sequence uses these

    @property
    def has_orders(self) -> bool:
        orders = self.finished, self.digests, self.dropped_images, self.images, self.adapters
        return bool(self.scheduled or any(orders))

    @property
    def num_tokens(self) -> int:
        return sum(item.num_tokens for item in self.scheduled)

    @property
    def prompts(self) -> tuple[ScheduledSequence, ...]:
        """Scheduled sequences other than decodes: chunks of prompts, and tokens that a peer has sampled."""
        return self.scheduled[self.num_decodes :]

    @property
    def num_prompt_tokens(self) -> int:
        return sum(prompt.num_tokens for prompt in self.prompts)

    @property
    def num_drafts(self) -> int:
        return sum(decode.num_tokens for decode in self.scheduled[: self.num_decodes]) - self.num_decodes


class StepOutput(msgspec.Struct, frozen=True):
    """Results of a step: tokens in the plan's order.

    ``decode_counts`` has the tokens that each decode yields; it is empty if no decode has drafts, so that each yields
    one. Prompts yield their ``num_samples``. ``logprobs`` has an entry for some indices of ``token_ids``. ``digests``
    has one signed 64-bit number per block of each of the plan's orders. ``prompt_logprobs`` has, by sequence, the
    log-probabilities of the prompt tokens that follow the computed ones. ``pooled`` has the vectors of prompts that
    ended, little-endian float32, by sequence; the tokens of such a node mean nothing.
    """

    step: int
    token_ids: tuple[int, ...] = ()
    decode_counts: tuple[int, ...] = ()
    drafts: tuple[tuple[int, tuple[int, ...]], ...] = ()  # by sequence, made by the model behind its last token
    logprobs: dict[int, TokenLogprobs] = {}
    digests: tuple[tuple[int, ...], ...] = ()
    prompt_logprobs: tuple[tuple[int, PromptLogprobs], ...] = ()
    pooled: tuple[tuple[int, bytes], ...] = ()


class KVConnectorOutput(msgspec.Struct, frozen=True):
    """Events of one rank since the last poll: of its connector, its memory behind the KV cache, its adapters.

    ``connected`` and ``failed_peers`` answer connect orders; the latter also name connections that broke later.
    """

    finished_recving: tuple[ReadResult, ...] = ()
    connected: tuple[Connected, ...] = ()
    failed_peers: tuple[tuple[str, str], ...] = ()  # (epoch, reason)
    digested: tuple[tuple[int, tuple[int, ...]], ...] = ()  # digests, one per block, by the id of their order
    copied: tuple[CopyResult, ...] = ()
    host_room: tuple[HostRoom, ...] = ()  # allocated so far, whenever it has grown
    disk: tuple[DiskEvent, ...] = ()
    adapters: tuple[AdapterLoaded, ...] = ()

    def __bool__(self) -> bool:
        return any(getattr(self, name) for name in self.__struct_fields__)


EMPTY_CONNECTOR_OUTPUT = KVConnectorOutput()


class ModelRunnerOutput(msgspec.Struct, frozen=True):
    """Output of a rank for every step, with or without a forward pass."""

    step: StepOutput
    connector: KVConnectorOutput = EMPTY_CONNECTOR_OUTPUT


NO_STEP = 0  # the steps of an engine are numbered from 1 on
EMPTY_OUTPUT = ModelRunnerOutput(StepOutput(NO_STEP))  # without any event
