"""A minimal engine for a model runner: blocks, chunked prefill, continuous batching. No policy, no limits.

Blocks behind a window are freed after each step and filled with NaN, which no attention may read.
"""

from __future__ import annotations

import ctypes
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

import torch

from pdserve.adapters.adapter import NO_ADAPTER_SLOT, AdapterSlot
from pdserve.images import EncodedImage, Images, tokens_to_end
from pdserve.kv.groups import NULL_BLOCK, first_block
from pdserve.kv.states import NO_SLOT
from pdserve.logprobs import PromptLogprobs
from pdserve.protocols import ModelRunner
from pdserve.records import Drafts, NewBlocks, NewSequence, Sample, ScheduledSequence, StepPlan
from pdserve.rpc.protobuf import pack_tokens
from pdserve.sampling_params import SamplingParams

GREEDY = SamplingParams(max_tokens=1, temperature=0.0)


@dataclass
class Running:
    """A sequence as the engine sees it."""

    tokens: list[int]
    prompt_len: int
    sampling: SamplingParams
    choice: int = 0
    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    state_slot: int = NO_SLOT
    samples: list[Sample] = field(default_factory=list)  # samples of this choice
    images: Images = ()
    adapter_slot: int = NO_ADAPTER_SLOT
    others: list[list[Sample]] = field(default_factory=list)  # per step, all choices where several were drawn

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_len :]


class Stepper:
    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self.free = list(range(runner.kv_layout.num_blocks))
        self.samples = True  # False: the runner is of an earlier pipeline stage, whose tokens are not known here
        self.whole_images = False  # a step computes all tokens of an image
        self.keeps_windows = False  # keep blocks behind windows: other sequences begin with them
        self.num_freed = 0  # blocks behind windows
        random.Random(seed).shuffle(self.free)
        states = runner.state_layout
        self.free_slots = [] if states is None else list(range(states.num_slots))
        random.Random(seed).shuffle(self.free_slots)
        self.live: dict[int, Running] = {}
        self.scored: dict[int, list[PromptLogprobs]] = {}  # by sequence
        self.pixels: dict[bytes, EncodedImage] = {}  # by digest, of the images of all prompts
        self.filling: list[AdapterSlot] = []  # slots of adapters that the next step fills
        self.encoded: list[bytes] = []  # digests, in the order of encoding
        self._embedded: set[bytes] = set()
        self._yielded: dict[int, tuple[int, ...]] = {}  # tokens of the last decode with drafts
        self._known: set[int] = set()
        self._finished: list[int] = []
        self._next = 0
        self._step = 0

    def add(
        self,
        tokens: Sequence[int],
        sampling: SamplingParams = GREEDY,
        prompt_len: int | None = None,
        choice: int = 0,
        images: Images = (),
        adapter_slot: int = NO_ADAPTER_SLOT,
    ) -> int:
        seq = self._next
        self._next += 1
        self.live[seq] = Running(list(tokens), prompt_len or len(tokens), sampling, choice, images=images)
        self.live[seq].adapter_slot = adapter_slot
        return seq

    def finish(self, seq: int) -> Running:
        sequence = self.live.pop(seq)
        self.free += [block for block in sequence.blocks if block != NULL_BLOCK]
        if sequence.state_slot != NO_SLOT:
            self.free_slots.append(sequence.state_slot)
        self._finished.append(seq)
        return sequence

    def preempt(self, seq: int) -> int:
        """Drop a sequence's KV and add its tokens as a new sequence; return the new number."""
        old = self.finish(seq)
        new = self.add(old.tokens, old.sampling, old.prompt_len, old.choice, old.images, old.adapter_slot)
        self.live[new].samples = old.samples
        return new

    def step(
        self,
        chunk: int = 1 << 30,
        num_samples: int = 1,
        pieces: Sequence[EncodedImage] = (),
        dropped: tuple[bytes, ...] = (),
    ) -> None:
        """Run all sequences for up to ``chunk`` tokens each; draw ``num_samples`` samples at a sequence's end.

        ``pieces``, of images that no sequence has yet, come before the images of the sequences; ``dropped`` ones go.
        """
        new = []
        scheduled = []
        new_blocks = []
        for seq, sequence in self.live.items():
            count = min(chunk, len(sequence.tokens) - sequence.computed)
            if self.whole_images:
                last = sequence.computed + count - 1
                count = last + tokens_to_end(sequence.images, last) - sequence.computed
            blocks = self._extend(sequence, sequence.computed + count)
            ends = sequence.computed + count == len(sequence.tokens)
            if seq not in self._known:
                self._known.add(seq)
                if self.runner.state_layout is not None:
                    sequence.state_slot = self.free_slots.pop()
                new.append(
                    NewSequence(
                        seq=seq,
                        token_ids=pack_tokens(sequence.tokens),
                        prompt_len=sequence.prompt_len,
                        num_computed=sequence.computed,
                        block_ids=tuple(sequence.blocks),
                        sampling=sequence.sampling,
                        choice=sequence.choice,
                        state_slot=sequence.state_slot,
                        images=sequence.images,
                        adapter_slot=sequence.adapter_slot,
                    )
                )
            elif blocks:
                new_blocks.append(NewBlocks(seq, tuple(blocks)))
            scheduled.append(ScheduledSequence(seq, count, num_samples if ends else 0))
        unneeded, images = self._order_images(scheduled)
        self._embedded |= {image.digest for image in pieces if image.ends}
        plan = StepPlan(
            self._step,
            dropped_images=(*dropped, *unneeded),
            images=(*pieces, *images),
            finished=tuple(self._finished),
            new=tuple(new),
            scheduled=tuple(scheduled),
            new_blocks=tuple(new_blocks),
            adapters=tuple(self.filling),
        )
        self._step += 1
        self._finished = []
        self.filling = []
        output = self.runner.launch(plan).result()
        assert output.step == plan.step
        token_ids = output.token_ids
        if not self.samples:
            assert not token_ids
            token_ids = (0,) * sum(item.num_samples for item in scheduled)
        assert len(token_ids) == sum(item.num_samples for item in scheduled)
        for seq, logprobs in output.prompt_logprobs:
            self.scored.setdefault(seq, []).append(logprobs)
        samples = (Sample(token, output.logprobs.get(index)) for index, token in enumerate(token_ids))
        for item in scheduled:
            sequence = self.live[item.seq]
            sequence.computed += item.num_tokens
            if not self.keeps_windows:
                self._free_behind_windows(sequence)
            if item.num_samples:
                drawn = list(islice(samples, item.num_samples))
                sequence.tokens.append(drawn[0].token_id)
                sequence.samples.append(drawn[0])
                sequence.others.append(drawn)

    def decode(self, seq: int, drafts: tuple[int, ...] = (), drafts_ahead: int = 0) -> tuple[int, ...]:
        """Decode one sequence with ``drafts``; return those that the model makes for the next step."""
        sequence = self.live[seq]
        blocks = self._extend(sequence, len(sequence.tokens) + len(drafts) + drafts_ahead)
        yielded = self._yielded.pop(seq, ())
        plan = StepPlan(
            self._step,
            scheduled=(ScheduledSequence.decode(seq, len(drafts)),),
            num_decodes=1,
            new_blocks=(NewBlocks(seq, tuple(blocks)),) if blocks else (),
            drafts=(Drafts(seq, drafts, yielded),) if drafts or yielded else (),
            drafts_ahead=drafts_ahead,
        )
        self._step += 1
        output = self.runner.launch(plan).result()
        if drafts:
            self._yielded[seq] = output.token_ids
        sequence.tokens += output.token_ids
        sequence.computed += len(output.token_ids)
        return dict(output.drafts).get(seq, ())

    def _order_images(self, scheduled: list[ScheduledSequence]) -> tuple[tuple[bytes, ...], tuple[EncodedImage, ...]]:
        """Return the images that no sequence needs any more, and those whose first token is computed now."""
        needed: set[bytes] = set()
        for sequence in self.live.values():
            needed |= {span.digest for span in sequence.images if sequence.computed < span.end}
        dropped = tuple(self._embedded - needed)
        self._embedded &= needed
        images = []
        for item in scheduled:
            sequence = self.live[item.seq]
            for span in sequence.images:
                starts = span.start < sequence.computed + item.num_tokens and sequence.computed < span.end
                if starts and span.digest not in self._embedded:
                    self._embedded.add(span.digest)
                    self.encoded.append(span.digest)
                    images.append(self.pixels[span.digest])
        return dropped, tuple(images)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        num_tokens: int,
        sampling: SamplingParams = GREEDY,
        chunk: int = 1 << 30,
        stagger: int = 0,
        images: Sequence[Images] = (),
        adapter_slots: Sequence[int] = (),
    ) -> list[Running]:
        """Run prompts together, each until it has ``num_tokens`` outputs; they arrive ``stagger`` steps apart.

        ``images``: the images of each prompt; their ``pixels`` are known. Empty: no prompt has any. ``adapter_slots``:
        the slot of each prompt's adapter. Empty: all have the base.
        """
        slots = adapter_slots or [NO_ADAPTER_SLOT] * len(prompts)
        waiting = list(zip(prompts, images or [()] * len(prompts), slots, strict=True))
        seqs: list[int] = []
        results: dict[int, Running] = {}
        step = 0
        while waiting or len(results) < len(prompts):
            while waiting and (stagger == 0 or step >= stagger * len(seqs)):
                prompt, spans, slot = waiting.pop(0)
                seqs.append(self.add(prompt, sampling, images=spans, adapter_slot=slot))
            self.step(chunk)
            step += 1
            for seq in [s for s in seqs if s in self.live and len(self.live[s].output) == num_tokens]:
                results[seq] = self.finish(seq)
        return [results[seq] for seq in seqs]

    def _extend(self, sequence: Running, num_tokens: int) -> list[int]:
        layout = self.runner.kv_layout
        wanted = -(-num_tokens // layout.block_size) * layout.groups.num_groups - len(sequence.blocks)
        blocks = [self.free.pop() for _ in range(wanted)]
        if layout.groups.has_windows:
            for block in blocks:
                self._fill(block, 0)
        sequence.blocks += blocks
        return blocks

    def _free_behind_windows(self, sequence: Running) -> None:
        layout = self.runner.kv_layout
        for group, window in enumerate(layout.groups.windows):
            for index in range(first_block(sequence.computed, window, layout.block_size)):
                entry = index * layout.groups.num_groups + group
                if (block := sequence.blocks[entry]) != NULL_BLOCK:
                    sequence.blocks[entry] = NULL_BLOCK
                    self._fill(block, 0xFF)
                    self.free.insert(0, block)
                    self.num_freed += 1

    def _fill(self, block: int, value: int) -> None:
        cache: torch.Tensor = getattr(self.runner, "_cache").tensor  # noqa: B009
        cache.view(torch.uint8).view(self.runner.kv_layout.num_blocks, -1)[block] = value


def copy_to(target: Stepper, source: Stepper, seq: int) -> int:
    """Copy the blocks of a sequence that has its first token to another runner's host memory; return its number there.

    Both runners have one layout. The target samples the tokens that follow.
    """
    sequence = source.live[seq]
    layout = target.runner.kv_layout
    new = target.add(sequence.tokens, prompt_len=sequence.prompt_len, images=sequence.images)
    target.live[new].computed = sequence.computed
    blocks = [NULL_BLOCK if block == NULL_BLOCK else target.free.pop() for block in sequence.blocks]
    target.live[new].blocks = blocks
    ours = target.runner.kv_region
    theirs = source.runner.kv_region
    assert ours.num_bytes == theirs.num_bytes == layout.total_bytes
    for to, block in zip(blocks, sequence.blocks, strict=True):
        if block == NULL_BLOCK:
            continue
        ctypes.memmove(
            ours.address + to * layout.block_bytes, theirs.address + block * layout.block_bytes, layout.block_bytes
        )
    return new
