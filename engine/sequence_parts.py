"""Parts of a sequence that other modules than the scheduler's write. sequence.py lists the writers."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.acceptance import Acceptance
from engine.draft_source import DraftSource
from engine.token_rules import ChoiceRules
from pdserve.grammar import Grammar, Matcher
from pdserve.records import Drafts

ALL_TOKENS = 1 << 62


@dataclass(slots=True, eq=False)
class BlockTable:
    """Blocks with the KV of a sequence. With several KV cache groups, ``blocks`` is the list of ``KVCacheGroups``."""

    blocks: list[int] = field(default_factory=list)
    ready: int = 0  # leading entries of ``blocks`` that the runner may be told
    capacity: int = 0  # tokens that fit into the blocks
    covered: int = ALL_TOKENS  # with windows, tokens that have blocks in all groups: no step computes further ones
    spare: list[int] = field(default_factory=list)  # blocks for the windows of a load, until their place is known
    kept_from: list[int] = field(default_factory=list)  # by windowed group: its earlier blocks are freed
    next_full: int = 0  # number of computed tokens at which the next block is full and enters the prefix cache
    cached_at_lookup: int = -1  # cached prompt tokens at the last prefix-cache lookup; -1 if never looked up

    def add(self, blocks: Iterable[int], block_size: int, num_groups: int) -> None:
        """Append blocks, which the runner may be told."""
        self.blocks += blocks
        self.ready = len(self.blocks)
        self.capacity = len(self.blocks) // num_groups * block_size

    def replace(self, entry: int, blocks: list[int], step: int) -> list[int]:
        """Replace every ``step``-th entry, from ``entry`` on, and return the former ones."""
        entries = slice(entry, entry + len(blocks) * step, step)
        former = self.blocks[entries]
        self.blocks[entries] = blocks
        return former

    def use_spare(self, entry: int) -> None:
        """Put a spare block at an entry."""
        self.blocks[entry] = self.spare.pop()

    def take_spare(self) -> list[int]:
        """Return the spare blocks, and keep none."""
        spare = self.spare
        self.spare = []
        return spare

    def clear(self) -> None:
        """Drop all blocks."""
        self.blocks = []
        self.spare = []
        self.ready = 0
        self.capacity = 0


@dataclass(slots=True, eq=False)
class SplitLoad:
    """A load of what follows ``meeting``, while steps compute the tokens before it."""

    meeting: int  # tokens before the loaded part: steps compute them
    confirmed: int = 0  # tokens with KV once those before ``meeting`` are computed; 0: reads are in flight
    given_up: bool = False  # its KV will not be used


@dataclass(slots=True, eq=False)
class SequenceDrafts:
    """Drafts of the next decode of a sequence, and where they come from."""

    source: DraftSource | None = None  # guesses its next tokens; None until its first draft
    acceptance: Acceptance | None = None  # how often its drafts are right
    num_next: int = 0  # drafts that its next decode should have
    token_ids: tuple[int, ...] = ()  # tokens of these drafts, if they come with the plan
    yielded: tuple[int, ...] = ()  # tokens of its last decode with drafts of a plan, until the runner is told
    verifying: bool = False  # a step in flight verifies drafts of a plan

    def propose(self, token_ids: array[int], most: int) -> tuple[int, ...]:
        """Return up to ``most`` drafts that follow ``token_ids``."""
        assert self.source is not None
        assert self.acceptance is not None
        drafts = self.source.propose(token_ids, most)
        self.acceptance.proposed(drafts)
        return drafts

    def probe(self, token_ids: array[int], most: int) -> None:
        """Find out how often drafts would be right."""
        assert self.source is not None
        assert self.acceptance is not None
        self.acceptance.probe(token_ids, self.source.propose(token_ids, most))

    def use(self, token_ids: tuple[int, ...]) -> None:
        """Let the next decode verify these drafts."""
        self.token_ids = token_ids
        self.num_next = len(token_ids)

    def take(self, seq: int, num_drafts: int) -> Drafts | None:
        """Return the drafts that the runner needs for the next decode; None if it has them or needs none."""
        drafts = self.token_ids[:num_drafts]
        yielded = self.yielded
        self.use(())
        self.yielded = ()
        self.verifying = bool(drafts)
        return Drafts(seq, drafts, yielded) if drafts or yielded else None

    def count_verified(self, num_drafts: int, token_ids: tuple[int, ...]) -> None:
        """Count the tokens that a decode with drafts of a plan has yielded."""
        assert self.acceptance is not None
        self.acceptance.count(num_drafts, len(token_ids) - 1)
        self.verifying = False
        self.yielded = token_ids

    def forget_yielded(self) -> None:
        """The runner gets all tokens of the sequence: it need not be told the last ones."""
        self.yielded = ()


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

    def begun_matcher(self) -> Matcher:
        """Return the matcher of its grammar. The first call makes it; one thread calls at a time."""
        if self.matcher is None:
            assert self.grammar is not None
            self.matcher = self.grammar.matcher()
        return self.matcher

    def take_masks(self, count: int) -> tuple[bytes, ...]:
        """Return the masks of the next token and of the drafts behind it, ``count`` together. A fixed mask stays."""
        assert self.mask is not None, "a sequence is scheduled without the mask it needs"
        if self.fixed:
            return (self.mask,) * count
        masks = (self.mask, *self.later)[:count]
        assert len(masks) == count, f"{count} masks are needed, the grammar has {len(masks)}"
        self.mask = None
        self.later = ()
        self.drafts = ()
        return masks
