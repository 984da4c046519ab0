"""A sequence: one choice of a request, as the scheduler, the KV cache and the connector see it.

A sequence has parts. Each part is written by its own methods and by one module; all others only read it:

| part           | content                                 | written by                                 |
|----------------|-----------------------------------------|--------------------------------------------|
| (itself)       | tokens, and how many of them have KV    | methods that the scheduler calls           |
| ``table``      | blocks with its KV                      | kv_cache/kv_cache_manager.py               |
| ``state``      | slots with its recurrent state          | recurrent/state_slots.py                   |
| ``split``      | a load beside steps that compute a part | scheduler/loads.py                         |
| ``drafts``     | guesses of its next tokens              | engine/speculation/, an extra              |
| ``constraint`` | grammar and token rules                 | grammars/constraints.py                    |
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.request import Request
from engine.sequence_parts import NO_SEQUENCE_DRAFTS, BlockTable, Constraint, SequenceDrafts, SplitLoad
from engine.sequence_state import SequenceState
from pdserve.adapters.adapter import NO_ADAPTER_SLOT
from pdserve.hashing import BlockHashes
from pdserve.kv.states import NO_SLOT
from pdserve.records import NewSequence, ScheduledSequence


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: its tokens, how many of them have KV, and the blocks that hold it.

    Steps are launched before the results of earlier ones are known. While decoding with one step in flight:

        ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒░   length: token_ids ▒ and the token being sampled ░
        ████████████████    num_launched: the next step computes the rest
        ███████████████     num_computed

    Drafts of a step in flight count as accepted: then ``length`` and ``num_launched`` are the most that they may be.
    """

    seq: int
    request: Request
    choice: int
    token_ids: array[int]  # uint32: prompt, then output
    hashes: BlockHashes
    prompt_len: int
    max_length: int
    length: int = field(init=False)  # tokens after the steps in flight, at most
    num_computed: int = 0  # tokens with KV
    num_launched: int = 0  # tokens with KV after the steps in flight
    sent_blocks: int = -1  # entries of the block table that the runner knows; -1: it does not know the sequence
    last_step: int = 0  # number of the last step that it took part in
    charged: int = 0  # tokens that its client has been charged for
    ended: bool = False  # its results are dropped, but steps in flight still write to its blocks
    for_peer: bool = field(init=False)  # on P: a peer takes it over
    decode_item: ScheduledSequence = field(init=False)  # its part of a step while it decodes
    table: BlockTable = field(default_factory=BlockTable)
    drafts: SequenceDrafts = NO_SEQUENCE_DRAFTS
    state: SequenceState | None = None  # None: no recurrent layers, or no blocks yet
    split: SplitLoad | None = None  # None: steps compute no part of a load
    constraint: Constraint | None = None  # None: any token may follow
    adapter_slot: int = NO_ADAPTER_SLOT  # slot of its adapter since its admission

    def __post_init__(self) -> None:
        self.length = len(self.token_ids)
        self.decode_item = ScheduledSequence.decode(self.seq)
        self.for_peer = self.request.mode.for_peer

    @property
    def rid(self) -> int:
        return self.request.rid

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def has_output(self) -> bool:
        """Whether the request has output, from this node or an earlier one."""
        return bool(self.num_outputs or self.request.branches)

    @property
    def is_new(self) -> bool:
        """Whether no stream waits for it: it has no output, here or on a peer."""
        return not (self.has_output or self.request.urgent)

    @property
    def load_len(self) -> int:
        """Leading tokens whose KV a load brings: the prompt, or all tokens but the last of a single resumed choice."""
        return self.prompt_len if self.request.branches else max(self.prompt_len, len(self.token_ids) - 1)

    @property
    def shared_len(self) -> int:
        """Leading tokens of the prompt that its choices share: the tokens in full blocks."""
        return self.prompt_len // self.hashes.block_size * self.hashes.block_size

    @property
    def ends_amid_image_block(self) -> bool:
        """Whether the last block of the prompt is not full and has a part of an image: choices need all of its KV."""
        images = self.request.images
        return bool(images) and images[-1].end > self.shared_len

    @property
    def branches_at(self) -> int:
        """Prompt tokens that have KV when its choices branch."""
        return self.prompt_len if self.ends_amid_image_block else self.shared_len

    @property
    def num_loading_choices(self) -> int:
        """The choices that continue behind a load, before ``ChoiceManager.take_from_peer`` knows which have ended."""
        return 1 + len(self.request.branches) if self.has_output else self.request.sampling.n

    @property
    def missing(self) -> int:
        """Tokens that no launched step computes: 1 while decoding, 0 while its last token is being sampled.

        Tokens that a load brings do not count.
        """
        if self.split is not None:
            return self.split.meeting - self.num_launched
        return self.length - self.num_launched if self.length < self.max_length else 0

    @property
    def decodes_next(self) -> bool:
        """Whether its next step is a decode: it continues an output, and only its newest token is missing."""
        length = self.length
        return length > self.prompt_len and length - self.num_launched == 1 and length < self.max_length

    @property
    def decodes_here(self) -> bool:
        """Whether a launched step has sampled its first token, or a peer has, and it continues on this node."""
        return self.length > self.prompt_len and not self.for_peer

    @property
    def blocked(self) -> bool:
        """Whether it waits for the mask of its next token."""
        return self.constraint is not None and self.constraint.mask is None

    @property
    def reusable(self) -> int:
        """Tokens whose KV may come from the cache: all but those whose logits are needed."""
        request = self.request
        must_score = request.sampling.prompt_logprobs >= 0 and request.num_scored < self.prompt_len
        return (request.num_scored if must_score else len(self.token_ids)) - 1

    @property
    def in_flight(self) -> bool:
        """Whether a launched step includes it and its result has not been applied."""
        return self.num_launched > self.num_computed

    @property
    def continues_output(self) -> bool:
        """Whether its next step continues an output: at most a block of tokens lacks KV, as after a pull."""
        return self.num_outputs > 0 and self.split is None and self.missing <= self.hashes.block_size

    @property
    def joins_after_handoff(self) -> bool:
        """Whether its first step on this node continues an answer."""
        return not self.last_step and (self.num_launched >= self.prompt_len or self.continues_output)

    @property
    def can_decode_ahead(self) -> bool:
        """Whether a token for its peer may be decoded now: one at a time, so that the peer waits for one step at most.

        Only the token after the first may be launched before the first is on the host.
        """
        return self.length == self.prompt_len + 1 or not self.in_flight

    @property
    def end_here(self) -> int:
        """End of the prompt, or of the part of it that steps compute beside a load."""
        return self.prompt_len if self.split is None else self.split.meeting

    def ends_after(self, num_tokens: int) -> bool:
        """Whether it samples once ``num_tokens`` more tokens are computed: they are all that is missing."""
        return num_tokens == self.missing and self.split is None

    @property
    def samples_due(self) -> int:
        """Tokens to sample when its last missing token has been computed."""
        return self.request.sampling.n if self.length == self.prompt_len else 1

    # ------------------------------------------------------------ tokens

    def append_token(self, token_id: int) -> None:
        """Add the token that the oldest step in flight has sampled."""
        self.token_ids.append(token_id)

    def continue_as(self, choice: int, token_ids: array[int]) -> None:
        """Become the choice whose first tokens a peer has sampled."""
        self.choice = choice
        self.token_ids.extend(token_ids)
        self.length += len(token_ids)

    def charge_tokens(self) -> int:
        """Return the tokens that its client has not been charged for, and count them as charged."""
        num_tokens = len(self.token_ids) - self.charged
        self.charged += num_tokens
        return num_tokens

    def draft_from(self, drafts: SequenceDrafts) -> None:
        """Let its further decodes have these drafts."""
        self.drafts = drafts

    def end(self) -> None:
        self.ended = True

    def use_adapter(self, slot: int) -> None:
        """Let its further steps read its adapter from this slot."""
        self.adapter_slot = slot

    # ------------------------------------------------------------ steps

    def launch_decode(self, step: int) -> ScheduledSequence:
        """Count its newest token as launched, and the next one as being sampled. Return its part of the step."""
        self.last_step = step
        self.num_launched += 1
        self.length += 1
        return self.decode_item

    def launch_drafts(self, step: int, num_drafts: int) -> ScheduledSequence:
        """Launch a decode with drafts, and count them as accepted. Return its part of the step."""
        self.launch_decode(step)
        self.num_launched += num_drafts
        self.length += num_drafts
        return ScheduledSequence.decode(self.seq, num_drafts)

    def reject_drafts(self, num_drafts: int) -> None:
        """Count drafts of the oldest step in flight as never launched, before its tokens are taken."""
        self.num_launched -= num_drafts
        self.length -= num_drafts

    def launch_prompt(self, step: int, num_tokens: int) -> ScheduledSequence:
        """Count missing tokens as launched. The step samples if it computes the last one. Return its part of it."""
        num_samples = self.samples_due if self.ends_after(num_tokens) else 0
        self.last_step = step
        self.num_launched += num_tokens
        self.length += num_samples > 0
        return ScheduledSequence(self.seq, num_tokens, num_samples)

    def count_computed(self, num_tokens: int) -> bool:
        """Count tokens of a step that has ended as computed. Return whether a block is full or the sequence ended."""
        self.num_computed += num_tokens
        return self.num_computed >= self.table.next_full or self.ended

    def set_computed(self, num_tokens: int) -> None:
        """Let the next step begin behind the first ``num_tokens`` tokens: they have KV. No step is in flight."""
        self.num_computed = num_tokens
        self.num_launched = num_tokens

    def unsent_blocks(self) -> list[int] | None:
        """Return the blocks that the runner does not know, and count them as known; None: not even the sequence."""
        table = self.table
        sent = self.sent_blocks
        self.sent_blocks = table.ready
        return None if sent < 0 else table.blocks[sent : table.ready]

    def drop_in_runner(self) -> bool:
        """Count it as unknown to the runner. Return whether the runner has to be told."""
        is_there = self.sent_blocks >= 0
        self.sent_blocks = -1
        return is_there

    def to_new_sequence(self) -> NewSequence:
        state = self.state
        self.drafts.forget_yielded()
        return NewSequence(
            seq=self.seq,
            token_ids=self.token_ids.tobytes(),
            prompt_len=self.prompt_len,
            num_computed=self.num_computed,
            block_ids=tuple(self.table.blocks[: self.table.ready]),
            sampling=self.request.sampling,
            choice=self.choice,
            num_scored=self.request.num_scored,
            state_slot=NO_SLOT if state is None else state.slot,
            state_from=NO_SLOT if state is None or not self.num_computed else state.begin(),
            images=self.request.images,
            copies=self.table.take_copies(),
            adapter_slot=self.adapter_slot,
        )
