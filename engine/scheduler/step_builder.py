"""Builds a step: decodes, then prompts one after the other, within a budget of tokens."""

from __future__ import annotations

from collections.abc import Callable, Collection

from engine.images.image_steps import NO_IMAGES, ImageSteps
from engine.scheduler.itl_target import ChunkBudget
from engine.scheduler.microbatch import StepSequences
from engine.sequence import Sequence
from engine.step_cost_meter import StepWork
from pdserve.adapters.adapter import AdapterSlot
from pdserve.kv.states import StateOrders
from pdserve.records import DigestOrder, Drafts, NewBlocks, NewSequence, ScheduledSequence, StepPlan, TokenMask

Launch = Callable[[Sequence, int], ScheduledSequence]  # int: the step
# Share of a full step for prompts of a crowding client: 6 ms (8B, H200), beside a decode step of 5 ms.
CROWDING_FRACTION = 1 / 8


class StepBuilder:
    """Collects the sequences of the next step and the tokens that each one computes.

    The first prompt may use the whole budget. Others only fill the step up to ``full_step`` prompt tokens: with that
    many the device is busy, so one prompt more would not end earlier, but all prompts of the step would get their first
    tokens later. So short prompts share a step, and long ones follow each other. Half of a step is first offered to
    waiting prompts of clients without a running one. A ``budget`` limits all prompts beside sequences that decode, but
    not the last tokens before an output continues.
    Prompts of a crowding client get a small part of a step, so that the step is not much longer for the clients that
    decode beside it.
    """

    def __init__(
        self,
        step: int,
        max_tokens: int,
        full_step: int,
        tile: int = 1,
        images: ImageSteps = NO_IMAGES,
        crowding: Callable[[Sequence, int], int | None] = lambda sequence, step: None,
    ) -> None:
        """``crowding``: see FairShare. It is asked about prompts that may become the first one of the step.

        A step whose prompts ``budget`` limits has a multiple of ``tile`` tokens, if it has as many.
        """
        self.budget: ChunkBudget | None = None
        self.crowding: int | None = None  # client whose prompts are limited; set before the first prompt is added
        self.drafts_ahead = 0
        self._step = step
        self._tokens_left = max_tokens
        self._full_step = full_step
        self._tile = tile
        self._most_tokens = max_tokens
        self._images = images
        self._prompt_tokens = 0
        self._image_work = 0  # encoding of images, in tokens of a prompt
        self._attended = 0.0  # tokens that the prompt tokens attend to, summed over these
        self._find_crowding = crowding
        self._crowding_tokens = max(1, int(full_step * CROWDING_FRACTION))  # tokens of ``crowding`` that still fit
        self._new: list[NewSequence] = []
        self._new_blocks: list[NewBlocks] = []
        self._scheduled: list[ScheduledSequence] = []
        self._masks: list[TokenMask] = []
        self._num_drafts = 0
        self._drafts: list[Drafts] = []  # drafts that come with the plan
        self._decodes: list[Sequence] = []
        self._prompts: list[Sequence] = []

    @property
    def has_prompts(self) -> bool:
        return self._prompt_tokens > 0

    @property
    def work(self) -> StepWork:
        context = self._attended / max(1, self._prompt_tokens)
        return StepWork(len(self._decodes), self._prompt_tokens, context, self._num_drafts, self._image_work)

    def room(self, sequence: Sequence) -> int:
        """Count the tokens of a prompt that fit."""
        return self._room(sequence, self.crowding if self.has_prompts else self._find_crowding(sequence, self._step))

    def _room(self, sequence: Sequence, crowding: int | None) -> int:
        room = self._room_in_step(sequence, crowding)
        return room if self.budget is None or sequence.continues_output else min(room, self.budget.room(sequence))

    def _image_room(self, sequence: Sequence) -> int:
        """Count the work of images for a prompt that fits. Streams keep their gaps also if it continues an output."""
        most = self._room_in_step(sequence, self.crowding)
        return most if self.budget is None else min(most, self.budget.image_room(sequence))

    def _room_in_step(self, sequence: Sequence, crowding: int | None) -> int:
        room = self._tokens_left
        if self._prompt_tokens:
            room = min(room, self._full_step - self._prompt_tokens - self._image_work)
        if sequence.request.client == crowding:
            room = min(room, self._crowding_tokens)
        return room

    def has_room_beside(self, sequence: Sequence) -> bool:
        """Whether the sequence fits into half of the step; running prompts get the other half."""
        room = min(self._tokens_left + self._prompt_tokens, self._full_step) // 2 - self._prompt_tokens
        return len(sequence.token_ids) - max(0, sequence.table.cached_at_lookup) <= room

    def add_decodes(self, sequences: Collection[Sequence], launch: Launch = Sequence.launch_decode) -> None:
        """Add the newest token of each sequence; called before any prompt is added.

        A step has room for every sequence that may run, with the drafts that ``launch`` adds.
        """
        step = self._step
        scheduled = self._scheduled
        for sequence in sequences:
            if sequence.sent_blocks != sequence.table.ready:
                self._send_blocks(sequence)
            item = launch(sequence, step)
            if sequence.constraint is not None:
                self._add_masks(sequence, item.num_tokens)
            scheduled.append(item)
        self._tokens_left -= len(sequences)
        self._decodes += sequences

    def count_drafts(self, num_drafts: int, drafts: Collection[Drafts]) -> None:
        """Count the drafts of the decodes; some of them, or all, come with the plan."""
        self._num_drafts += num_drafts
        self._tokens_left -= num_drafts
        self._drafts += drafts

    def add_prompt(self, sequence: Sequence) -> int:
        """Add as many of its missing tokens as fit, at least one, with one snapshot among them. Return how many.

        Return 0 if the first of them waits for an image, of which the step may encode a piece.
        """
        missing = sequence.missing
        held = min(missing, sequence.table.covered - sequence.num_launched, self._tokens_left)
        room = self._room(sequence, self.crowding)
        most = max(1, min(room, held))
        image_room = self._image_room(sequence)
        room = min(room, image_room)
        if not (num_tokens := self._images.limit(sequence, most, room, held, paced=self.budget is not None)):
            self._count_images(sequence, self._images.add_piece(sequence, image_room))
            return 0
        if sequence.state is not None:
            num_tokens = sequence.state.limit(sequence.num_launched, num_tokens)
        if self.budget is not None:
            if num_tokens < missing:
                spare = (self._most_tokens - self._tokens_left + num_tokens) % self._tile
                num_tokens -= spare if spare < num_tokens and not self._images.cuts(sequence, num_tokens - spare) else 0
            self.budget.spend(sequence, num_tokens)
        self._count_images(sequence, self._images.add(sequence, num_tokens, room))
        self._send_blocks(sequence)
        if sequence.ends_after(num_tokens):
            self._add_masks(sequence)
        self._attended += num_tokens * (sequence.num_launched + num_tokens / 2)
        self._scheduled.append(sequence.launch_prompt(self._step, num_tokens))
        self._tokens_left -= num_tokens
        self._prompt_tokens += num_tokens
        if sequence.request.client == self.crowding:
            self._crowding_tokens -= num_tokens
        self._prompts.append(sequence)
        return num_tokens

    def _count_images(self, sequence: Sequence, work: int) -> None:
        self._image_work += work
        if self.budget is not None:
            self.budget.spend_images(work)
        if sequence.request.client == self.crowding:
            self._crowding_tokens -= work

    def sequences(self) -> StepSequences:
        return StepSequences(tuple(self._decodes), tuple(self._prompts))

    def plan(
        self,
        finished: tuple[int, ...],
        digests: tuple[DigestOrder, ...],
        states: StateOrders,
        adapters: tuple[AdapterSlot, ...],
    ) -> StepPlan:
        images = self._images.take_orders()
        return StepPlan(
            self._step,
            finished=finished,
            new=tuple(self._new),
            scheduled=tuple(self._scheduled),
            num_decodes=len(self._decodes),
            new_blocks=tuple(self._new_blocks),
            digests=digests,
            masks=tuple(self._masks),
            drafts=tuple(self._drafts),
            drafts_ahead=self.drafts_ahead,
            state_snapshots=states.snapshots,
            state_copies=states.copies,
            dropped_images=images.dropped,
            images=images.encoded,
            adapters=adapters,
        )

    def _add_masks(self, sequence: Sequence, count: int = 1) -> None:
        """Move the masks of a sampling sequence into the step, also those behind drafts; a fixed mask stays as well."""
        if sequence.constraint is not None:
            masks = sequence.constraint.take_masks(count)
            self._masks += [TokenMask(sequence.seq, mask, index) for index, mask in enumerate(masks)]

    def _send_blocks(self, sequence: Sequence) -> None:
        """Send the runner the blocks of a sequence that it lacks, or the whole sequence if it does not know it."""
        blocks = sequence.unsent_blocks()
        if blocks is None:
            self._new.append(sequence.to_new_sequence())
        elif blocks:
            self._new_blocks.append(NewBlocks(sequence.seq, tuple(blocks)))
