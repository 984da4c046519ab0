"""Parts of a sequence that other modules than the scheduler's write. sequence.py lists the writers."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from engine.token_rules import ChoiceRules
from pdserve.grammar import Grammar, Matcher

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
    copies: tuple[tuple[int, int], ...] = ()  # (from, to) blocks, copied before its first step
    copied_from: list[int] = field(default_factory=list)  # sources of the step that is planned, of all sequences

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

    def order_copies(self, copies: tuple[tuple[int, int], ...], copied_from: list[int]) -> None:
        """Let the first step begin with copies of blocks. ``copied_from`` gets the sources when it is planned."""
        self.copies = copies
        self.copied_from = copied_from

    def take_copies(self) -> tuple[tuple[int, int], ...]:
        """Return the copies for the step that is planned."""
        copies = self.copies
        self.copied_from += [source for source, _ in copies]
        self.copies = ()
        return copies

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


class SequenceDrafts:
    """Drafts of the next decode of a sequence. This one has none, for all sequences of a node without speculation."""

    __slots__ = ()
    num_next: int = 0  # drafts that its next decode should have
    verifying: bool = False  # a step in flight verifies drafts of a plan

    def forget_yielded(self) -> None:
        """The runner gets all tokens of the sequence: it need not be told the last ones."""


NO_SEQUENCE_DRAFTS = SequenceDrafts()


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
