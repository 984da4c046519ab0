"""State of a request and of its sequences in the scheduler. A request has n choices; each choice is a sequence."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from engine.acceptance import Acceptance
from engine.draft_source import DraftSource
from engine.sequence_state import SequenceState
from engine.token_rules import ChoiceRules, TokenRules
from pdserve.grammar import Grammar, Matcher
from pdserve.hashing import BlockHashes
from pdserve.ipc.messages import Mode
from pdserve.records import TOKEN_BYTES, Drafts, NewSequence, ScheduledSequence
from pdserve.sampling_params import SamplingParams
from pdserve.state import NO_SLOT

ALL_TOKENS = 1 << 62


@dataclass(slots=True, eq=False)
class Constraint:
    """Grammar and rules of one choice. ``mask`` is for its next token; None while it is computed and after its use.

    ``later`` holds the masks behind each of ``drafts``, which its grammar allows.
    """

    grammar: Grammar | None
    rules: ChoiceRules | None = None
    mask: bytes | None = None
    later: tuple[bytes, ...] = ()
    drafts: tuple[int, ...] = ()
    matcher: Matcher | None = None  # after the tokens so far; made with the first token
    fixed: bool = False  # ``mask`` is for all further tokens, too


@dataclass(slots=True, eq=False)
class SplitLoad:
    """A load of what follows ``meeting``, while steps compute the tokens before it."""

    meeting: int  # tokens with KV once those before ``meeting`` are computed; 0: it is being read
    confirmed: int = 0  # tokens whose KV is here once those before ``meeting`` are computed; 0: it is being read
    given_up: bool = False  # its KV will not be used


@dataclass(slots=True, eq=False)
class Request:
    """The first fields come from Submit. ``sequences`` holds the live choices."""

    rid: int
    token_ids: bytes  # the prompt, uint32
    sampling: SamplingParams
    mode: Mode
    cache_salt: str
    priority: int = 0  # lower is more urgent
    skip_tokens: int = 0
    decode_ahead: int = 0  # LEASE: tokens that may be sampled after the first, before the peer takes over
    client: int = 0
    cached_tokens: int | None = None  # found in the prefix cache at the first admission
    waits_since: float = 0.0  # scheduler clock
    queued: float = 0.0  # seconds of waiting for blocks and for a step that computes its prompt
    sequences: dict[int, Sequence] = field(default_factory=dict)
    branches: dict[int, array[int]] = field(default_factory=dict)  # output of choices that wait for the prompt's KV
    stop_ids: frozenset[int] = frozenset()  # tokens that end a choice after ``min_tokens``
    num_scored: int = 1  # prompt tokens whose log-probabilities were sent; the first token has none
    grammar: Grammar | None = None  # compiled from its sampling parameters
    rules: TokenRules | None = None  # made from its sampling parameters
    paused: bool = False  # its client does not read: no step includes it
    urgent: bool = False  # on P: before the waiting requests of its client
    kv_layers: int = 0  # on P: layers with a KV cache that the peer has; 0: as here
    lacks_draft_kv: bool = False  # a peer without the layer that makes drafts has computed the prompt

    @property
    def prompt_len(self) -> int:
        return len(self.token_ids) // TOKEN_BYTES

    def end_load(self) -> None:
        """End the load: this node computes the rest."""
        self.mode = Mode.LEASE if self.mode.for_peer else Mode.LOCAL

    @property
    def max_length(self) -> int:
        """Tokens at which a choice ends on this node. On P only a single choice decodes ahead."""
        most = self.sampling.max_tokens
        if self.mode.for_peer:
            most = min(most, 1 + self.decode_ahead) if self.sampling.n == 1 else 1
        return self.prompt_len + most


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: its tokens, how many of them have KV, and the blocks that hold it.

    Other modules read its fields and change them by its methods only; ``constraint`` belongs to GrammarConstraints.

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
    cached_at_lookup: int = -1  # cached prompt tokens at the last prefix-cache lookup; -1 if never looked up
    charged: int = 0  # tokens that its client has been charged for
    ended: bool = False  # its results are dropped, but steps in flight still write to its blocks
    blocks: list[int] = field(default_factory=list)  # with several KV cache groups, the list of kv_groups.py
    ready_blocks: int = 0  # leading entries of ``blocks`` that the runner may be told
    sent_blocks: int = -1  # entries that the runner knows; -1: it does not know the sequence
    capacity: int = 0  # tokens that fit into its blocks
    covered: int = ALL_TOKENS  # with windows, tokens that have blocks in all groups: no step computes further ones
    spare: list[int] = field(default_factory=list)  # blocks for the windows of a load, until their place is known
    kept_from: list[int] = field(default_factory=list)  # by windowed group: its earlier blocks are freed
    last_step: int = 0  # number of the last step that it took part in
    constraint: Constraint | None = None
    next_full: int = 0  # num_computed at which its next block is full and enters the prefix cache
    state: SequenceState | None = None  # None: no recurrent layers, or no blocks yet
    split: SplitLoad | None = None  # while it loads and is computed at once
    decode_item: ScheduledSequence = field(init=False)  # its part of a step while it decodes
    num_drafts: int = 0  # drafts that its next decode should have
    drafts: tuple[int, ...] = ()  # tokens of these drafts, if they come with the plan
    yielded: tuple[int, ...] = ()  # tokens of its last decode with drafts of a plan, until the runner is told
    verifying: bool = False  # a step in flight verifies drafts of a plan
    draft_source: DraftSource | None = None  # guesses its next tokens
    acceptance: Acceptance | None = None  # how often its drafts are right
    for_peer: bool = field(init=False)  # on P: a peer takes it over

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
    def load_len(self) -> int:
        """Leading tokens whose KV a load brings: the prompt, or all tokens but the last of a single resumed choice."""
        return self.prompt_len if self.request.branches else max(self.prompt_len, len(self.token_ids) - 1)

    @property
    def shared_len(self) -> int:
        """Leading tokens of the prompt that its choices share: the tokens in full blocks."""
        return self.prompt_len // self.hashes.block_size * self.hashes.block_size

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
    def may_draft(self) -> bool:
        return not (self.request.sampling.disable_spec_decode or self.request.lacks_draft_kv)

    def draft_limit(self, most: int) -> int:
        """Return how many drafts, up to ``most``, its next decode may have: no more tokens than its output may grow by.

        A masked sequence has the drafts that its masks cover. No draft passes the next snapshot of a recurrent state.
        """
        if not self.may_draft:
            return 0
        if self.state is not None:
            most = min(most, self.state.draft_limit(self.num_launched))
        if self.constraint is not None and not self.constraint.fixed:
            most = min(most, len(self.constraint.drafts))
        return min(most, self.max_length - self.length - 1)

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

    def append(self, token_id: int) -> None:
        """Add the token that the oldest step in flight has sampled."""
        self.token_ids.append(token_id)

    def continue_as(self, choice: int, token_ids: array[int]) -> None:
        """Become the choice whose first tokens a peer has sampled."""
        self.choice = choice
        self.token_ids.extend(token_ids)
        self.length += len(token_ids)

    def charge(self) -> int:
        """Return the tokens that its client has not been charged for, and count them as charged."""
        num_tokens = len(self.token_ids) - self.charged
        self.charged += num_tokens
        return num_tokens

    def end(self) -> None:
        self.ended = True

    # ------------------------------------------------------------ steps

    def launch_decode(self, step: int) -> ScheduledSequence:
        """Count its newest token as launched, and the next one as being sampled. Return its part of the step."""
        self.last_step = step
        self.num_launched += 1
        self.length += 1
        return self.decode_item

    def want_drafts(self, num_drafts: int) -> None:
        """Let the runner draft ``num_drafts`` tokens for its next decode."""
        self.num_drafts = num_drafts

    def begin_drafts(self, make_source: Callable[[], DraftSource], acceptance: Acceptance) -> None:
        """Get a source of drafts, and the acceptance to begin with."""
        self.draft_source, self.acceptance = make_source(), acceptance

    def draft(self, most: int) -> None:
        """Let its next decode verify up to ``most`` drafts of its source."""
        if self.constraint is not None and not self.constraint.fixed:
            self.drafts = self.constraint.drafts[:most]
        else:
            self.drafts = self.propose(most)
        self.num_drafts = len(self.drafts)

    def propose(self, most: int) -> tuple[int, ...]:
        """Return up to ``most`` drafts of its source."""
        assert self.draft_source is not None
        assert self.acceptance is not None
        drafts = self.draft_source.propose(self.token_ids, most)
        self.acceptance.proposed(drafts)
        return drafts

    def probe_drafts(self, most: int) -> None:
        """Find out how often drafts would be right."""
        assert self.draft_source is not None
        assert self.acceptance is not None
        self.acceptance.probe(self.token_ids, self.draft_source.propose(self.token_ids, most))

    def drop_drafts(self) -> None:
        """Have no drafts in the next decode."""
        self.num_drafts, self.drafts = 0, ()

    def launch_drafts(self, step: int, num_drafts: int) -> ScheduledSequence:
        """Launch a decode with drafts, and count them as accepted. Return its part of the step."""
        self.launch_decode(step)
        self.num_launched += num_drafts
        self.length += num_drafts
        return ScheduledSequence.decode(self.seq, num_drafts)

    def take_drafts(self, num_drafts: int) -> Drafts | None:
        """Return the drafts that the runner needs for its next decode; None if it has them or needs none."""
        drafts, yielded = self.drafts[:num_drafts], self.yielded
        self.num_drafts, self.drafts, self.yielded = 0, (), ()
        self.verifying = bool(drafts)
        return Drafts(self.seq, drafts, yielded) if drafts or yielded else None

    def reject_drafts(self, num_drafts: int) -> None:
        """Count drafts of the oldest step in flight as never launched, before its tokens are taken."""
        self.num_launched -= num_drafts
        self.length -= num_drafts

    def verified(self, num_drafts: int, token_ids: tuple[int, ...]) -> None:
        """Count the tokens that a decode with drafts of a plan has yielded."""
        assert self.acceptance is not None
        self.acceptance.count(num_drafts, len(token_ids) - 1)
        self.verifying = False
        self.yielded = token_ids

    def launch_prompt(self, step: int, num_tokens: int) -> ScheduledSequence:
        """Count missing tokens as launched. The step samples if it computes the last one. Return its part of it."""
        num_samples = self.samples_due if self.ends_after(num_tokens) else 0
        self.last_step = step
        self.num_launched += num_tokens
        self.length += num_samples > 0
        return ScheduledSequence(self.seq, num_tokens, num_samples)

    def computed(self, num_tokens: int) -> bool:
        """Count tokens of a step that has ended as computed. Return whether a block is full or the sequence ended."""
        self.num_computed += num_tokens
        return self.num_computed >= self.next_full or self.ended

    def unsent_blocks(self) -> list[int] | None:
        """Return the blocks that the runner does not know, and count them as known; None: not even the sequence."""
        sent = self.sent_blocks
        self.sent_blocks = self.ready_blocks
        return None if sent < 0 else self.blocks[sent : self.ready_blocks]

    def drop_in_runner(self) -> bool:
        """Count it as unknown to the runner. Return whether the runner has to be told."""
        known = self.sent_blocks >= 0
        self.sent_blocks = -1
        return known

    # ------------------------------------------------------------ KV

    def looked_up(self, num_cached: int) -> None:
        """Note that the prefix cache has ``num_cached`` tokens of its prompt."""
        self.cached_at_lookup = num_cached

    def hold(self, blocks: list[int], num_cached: int, block_size: int, num_groups: int = 1) -> None:
        """Take blocks; the first ones have the KV of ``num_cached`` tokens."""
        self.blocks = []
        self.hold_more(blocks, block_size, num_groups)
        self.num_computed = num_cached
        self.num_launched = num_cached
        self.next_full = num_cached + block_size

    def hold_more(self, blocks: Iterable[int], block_size: int, num_groups: int = 1) -> None:
        self.blocks += blocks
        self.ready_blocks = len(self.blocks)
        self.capacity = len(self.blocks) // num_groups * block_size

    def cover(self, num_tokens: int, ready_blocks: int) -> None:
        """Let steps compute the first ``num_tokens`` tokens, with the first entries of ``blocks``."""
        self.covered = num_tokens
        self.ready_blocks = ready_blocks

    def hold_windows(self, kept_from: list[int], spare: list[int]) -> None:
        """Begin with these blocks of windows, and take spare ones."""
        self.kept_from = kept_from
        self.spare = spare

    def put_blocks(self, entry: int, blocks: list[int], step: int) -> list[int]:
        """Replace every ``step``-th entry of ``blocks``, from ``entry`` on, and return the former ones."""
        entries = slice(entry, entry + len(blocks) * step, step)
        former, self.blocks[entries] = self.blocks[entries], blocks
        return former

    def use_spare(self, entry: int) -> None:
        """Put a spare block at an entry of ``blocks``."""
        self.blocks[entry] = self.spare.pop()

    def drop_spare(self) -> list[int]:
        """Return the spare blocks, and hold none."""
        spare, self.spare = self.spare, []
        return spare

    def loaded(self, num_tokens: int) -> None:
        """End its load: the first ``num_tokens`` tokens have KV, at most ``load_len``.

        Pulled tokens count as cached, tokens computed meanwhile do not; after a handoff no count is reported.
        """
        request, computed = self.request, 0
        if self.split is not None:
            assert self.num_computed == self.split.meeting
            assert request.cached_tokens is not None, "a sequence with blocks was admitted"
            computed = self.split.meeting - request.cached_tokens
            self.end_split()
        request.cached_tokens = min(num_tokens, self.prompt_len) - computed
        self.num_computed = num_tokens
        self.num_launched = num_tokens

    def begin_split(self, meeting: int) -> None:
        """Compute the tokens before ``meeting`` while a load brings the rest. No step has the blocks of the rest."""
        self.split = SplitLoad(meeting)
        self.ready_blocks = meeting // self.hashes.block_size

    def end_split(self) -> None:
        """End the split: steps may use all blocks."""
        if self.split is not None:
            self.split = None
            self.ready_blocks = len(self.blocks)

    def cached(self, next_full: int) -> None:
        """Note that its full blocks are in the prefix cache; the next one is full with ``next_full`` tokens."""
        self.next_full = next_full

    def hold_state(self, state: SequenceState) -> None:
        self.state = state

    def drop_state(self) -> SequenceState | None:
        state, self.state = self.state, None
        return state

    def drop_blocks(self) -> None:
        self.split = None
        self.blocks = []
        self.spare = []
        self.ready_blocks = 0
        self.capacity = 0
        self.num_computed = 0
        self.num_launched = 0

    def to_new_sequence(self) -> NewSequence:
        state = self.state
        self.yielded = ()  # they are among its tokens
        return NewSequence(
            seq=self.seq,
            token_ids=self.token_ids.tobytes(),
            prompt_len=self.prompt_len,
            num_computed=self.num_computed,
            block_ids=tuple(self.blocks[: self.ready_blocks]),
            sampling=self.request.sampling,
            choice=self.choice,
            num_scored=self.request.num_scored,
            state_slot=NO_SLOT if state is None else state.slot,
            state_from=NO_SLOT if state is None or not self.num_computed else state.begin(),
        )
