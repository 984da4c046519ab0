"""What the scheduler knows of a request and of its sequences. A request has n choices; each choice is a sequence."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.ipc.messages import Mode
from pdserve.grammar import Grammar, Matcher
from pdserve.hashing import BlockHashes
from pdserve.records import TOKEN_BYTES, NewSequence, SamplingParams, ScheduledSequence


@dataclass(slots=True, eq=False)
class Constraint:
    """The grammar of one choice. ``mask`` is of its next token; None while it is computed, and once it was used."""

    grammar: Grammar
    mask: bytes | None
    matcher: Matcher | None = None  # behind the tokens so far; made with the first one


@dataclass(slots=True, eq=False)
class Request:
    """``prompt`` is shared by all choices; ``sequences`` are the live ones, by choice."""

    rid: int
    prompt: bytes  # token ids, uint32
    sampling: SamplingParams
    mode: Mode
    cache_salt: str
    priority: int = 0  # lower is more urgent
    skip_tokens: int = 0
    ahead: int = 0  # tokens after the first that may be sampled for the peer, which is to go on from there
    cached_tokens: int | None = None  # found in the prefix cache when first admitted
    waits_since: float = 0.0  # a moment of the scheduler's clock
    queued: float = 0.0  # seconds that it has waited for blocks, and a step to compute its prompt in
    sequences: dict[int, Sequence] = field(default_factory=dict)
    branches: dict[int, array[int]] = field(default_factory=dict)  # output of each choice without KV yet
    stop_ids: frozenset[int] = frozenset()  # tokens that end a choice, once it has ``min_tokens``
    num_scored: int = 1  # tokens of the prompt whose log-probabilities were told, if asked for; the first has none
    grammar: Grammar | None = None  # that of its sampling parameters, compiled

    @property
    def prompt_len(self) -> int:
        return len(self.prompt) // TOKEN_BYTES

    @property
    def max_length(self) -> int:
        """Tokens of a choice when it ends here at the latest. On P a single choice may go ahead of its peer."""
        most = self.sampling.max_tokens
        if self.mode is Mode.LEASE:
            most = min(most, 1 + self.ahead) if self.sampling.n == 1 else 1
        return self.prompt_len + most

    @property
    def must_score(self) -> bool:
        """Whether log-probabilities of its prompt are still to be told."""
        return self.sampling.prompt_logprobs >= 0 and self.num_scored < self.prompt_len


@dataclass(slots=True, eq=False)
class Sequence:
    """One choice: its tokens, how many of them have KV, and the blocks that hold it.

    Steps are launched before the results of earlier ones are known. While decoding with one step in flight:

        ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒░   length: token_ids ▒, and what is being sampled ░
        ████████████████    num_launched: the next step computes what is missing
        ███████████████     num_computed
    """

    seq: int
    request: Request
    choice: int
    token_ids: array[int]  # uint32: prompt, then output
    hashes: BlockHashes
    prompt_len: int
    max_length: int
    length: int = field(init=False)  # tokens it has once the steps in flight have ended
    num_computed: int = 0  # tokens whose KV is there
    expected: int = -1  # of its prompt so many tokens were cached when it waited and was looked at; -1: it was not
    num_launched: int = 0  # … or will be, once the steps in flight have ended
    ended: bool = False  # results of steps still in flight are nobody's, but these write to its blocks until they end
    blocks: list[int] = field(default_factory=list)
    known_blocks: int = -1  # how many of its blocks the runner was told; -1: it does not know the sequence
    room: int = 0  # tokens that fit into its blocks
    last_step: int = 0  # that it took part in
    constraint: Constraint | None = None  # of its grammar
    full_at: int = 0  # so many computed tokens fill the next block that is to be offered to the prefix cache
    decode: ScheduledSequence = field(init=False)  # its part of a step while it decodes
    for_peer: bool = field(init=False)  # on P: a peer is to take it over

    def __post_init__(self) -> None:
        self.length = len(self.token_ids)
        self.decode = ScheduledSequence(self.seq, 1, 1)
        self.for_peer = self.request.mode is Mode.LEASE

    @property
    def rid(self) -> int:
        return self.request.rid

    @property
    def from_peer(self) -> bool:
        """Whether a peer computes the prompt and this node reads its KV."""
        return self.request.mode is Mode.HANDOFF

    @property
    def skip_tokens(self) -> int:
        return self.request.skip_tokens

    @property
    def num_outputs(self) -> int:
        return len(self.token_ids) - self.prompt_len

    @property
    def missing(self) -> int:
        """Tokens that no launched step computes: 1 while decoding, 0 when its last token is being sampled."""
        return self.length - self.num_launched if self.length < self.max_length else 0

    @property
    def blocked(self) -> bool:
        """Whether it cannot be scheduled until the mask of its next token is there."""
        return self.constraint is not None and self.constraint.mask is None

    @property
    def reusable(self) -> int:
        """How many of its tokens may come from the cache. What has to be computed are the last one, for its logits,
        and those of the prompt whose logits tell log-probabilities.
        """
        request = self.request
        return request.num_scored - 1 if request.must_score else len(self.token_ids) - 1

    @property
    def in_flight(self) -> bool:
        """Whether a launched step includes it whose result has not been applied."""
        return self.num_launched > self.num_computed

    @property
    def may_go_ahead(self) -> bool:
        """Whether a token for its peer may be decoded now: one at a time, so that nobody waits for more than that."""
        return self.length == self.prompt_len + 1 or not self.in_flight

    @property
    def samples_due(self) -> int:
        """How many tokens to draw when the last missing token has been computed."""
        return self.request.sampling.n if self.length == self.prompt_len else 1

    def introduction(self) -> NewSequence:
        """What a runner must know to take it up."""
        return NewSequence(
            seq=self.seq,
            token_ids=self.token_ids.tobytes(),
            prompt_len=self.prompt_len,
            num_computed=self.num_computed,
            block_ids=tuple(self.blocks),
            sampling=self.request.sampling,
            choice=self.choice,
            num_scored=self.request.num_scored,
        )
