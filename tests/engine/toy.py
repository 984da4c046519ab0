"""A model whose next token is a digest of every token that it reads through its paged KV cache.

One misplaced block, stale slot or extra token changes its output, so comparing with ``reference`` checks all
bookkeeping, in microseconds per token. It computes as late as a device may: when the result of a step is taken. So it
overwrites blocks that were reused too early, and it asserts that there are none.

A change of its weights changes what it writes for a token, so KV of other weights changes its output, too. So does an
adapter: what it writes depends on the one in the slot of the sequence when the step is computed.

With recurrent layers, it also keeps a digest of the tokens so far in the slot of each sequence, and asserts that it is
that of the tokens in the KV cache.

Drafts come with a plan, from an ``ErringSource``, or are its own; they are right or wrong at random. Wrong ones leave
their KV behind, and no trace in a recurrent state.

With KV cache groups, it reads every token from a full group, and in each group with a window it compares the tokens of
the window before each query with those of the sequence.
"""

from __future__ import annotations

import math
import random
import struct
from array import array
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from pdserve.adapters.adapter import NO_ADAPTER, NO_ADAPTER_SLOT, Adapter, AdapterSlot
from pdserve.kv.groups import NULL_BLOCK, KVCacheGroups, KVHeads
from pdserve.kv.layout import FullAttentionSpec, KVLayout, KVRegion, LatentSpec
from pdserve.kv.states import NO_SLOT, GatedDeltaSpec, RankStates, StateLayout, StateShare, StateSnapshot
from pdserve.logprobs import PromptLogprobs
from pdserve.pausing import Pausing, complete
from pdserve.records import DigestOrder, NewSequence, StepOutput, StepPlan
from pdserve.weights.change import FileStates, WeightChange
from pdserve.weights.sharing import OfferedMemory
from runner.sampling.prompt_targets import PromptTargets, Targets

VOCAB = 1000
OF_WEIGHTS = 1 << 16  # token offset per weight change; above all token ids, wrong drafts included
RIGHT_DRAFTS = 3 / 4
_FIRST_OF_ADAPTERS = 256  # weight changes; those of an adapter count from here on
Slot = tuple[int, int]  # block, offset


_STATE = GatedDeltaSpec(1, 1, 1, 1, conv_width=2, dtype="float32")
_SLOT_WORDS = _STATE.layer_bytes // 4  # the first two: number of tokens, digest of the tokens


def _advanced(count: int, digest: int, token: int) -> tuple[int, int]:
    return (count + 1) % 2**32, crc32(struct.pack("<I", token), digest)


def state_after(token_ids: Iterable[int]) -> tuple[int, int]:
    """Return the recurrent state after these tokens."""
    state = 0, 0
    for token in token_ids:
        state = _advanced(*state, int(token))
    return state


def next_token(token_ids: np.ndarray, choice: int) -> int:
    return crc32(np.ascontiguousarray(token_ids, dtype=np.uint32).tobytes(), choice) % VOCAB


def offset_of(adapter: str) -> int:
    """Return what an adapter adds to a token in the KV cache."""
    return 0 if adapter == NO_ADAPTER else (_FIRST_OF_ADAPTERS + crc32(adapter.encode()) % 4096) * OF_WEIGHTS


def reference(
    prompt: list[int],
    choice: int,
    num_outputs: int,
    stop: tuple[int, ...] = (),
    weights: int = 0,
    adapter: str = NO_ADAPTER,
) -> list[int]:
    """Return the output that a sequence must produce."""
    tokens = list(prompt)
    for _ in range(num_outputs):
        tokens.append(next_token(np.array(tokens) + (weights * OF_WEIGHTS + offset_of(adapter)), choice))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def reference_ranks(prompt: list[int]) -> list[int]:
    """Return the ranks of the tokens of a prompt, without the first; they are digests, too."""
    return [next_token(np.array(prompt[:at]), prompt[at]) for at in range(1, len(prompt))]


class ErringSource:
    """A DraftSource that is often right, also about a choice other than the first, while the weights are unchanged."""

    right = RIGHT_DRAFTS

    def __init__(self) -> None:
        self._random = random.Random(1)

    def propose(self, token_ids: array[int], most: int) -> tuple[int, ...]:
        rng = self._random
        text = list(token_ids)
        for _ in range(rng.randint(0, most)):
            right = rng.random() < self.right
            text.append(next_token(np.array(text), rng.choice((0, 0, 0, 1))) if right else rng.randrange(VOCAB))
        return tuple(text[len(token_ids) :])


@dataclass
class _State:
    """``num_launched`` exceeds ``num_computed`` by the tokens of steps in flight, if all their drafts are right."""

    seq: int
    token_ids: list[int]
    num_computed: int
    blocks: list[int] = field(default_factory=list)
    choice: int = 0
    num_launched: int = 0
    least_launched: int = 0  # num_launched if all drafts in flight are wrong
    slot: int = NO_SLOT  # slot of the recurrent state
    yielded: tuple[int, ...] = ()  # tokens of the last decode, if the plan gave its drafts
    verifying: bool = False  # a decode with drafts of the plan is in flight
    adapter_slot: int = NO_ADAPTER_SLOT


def num_tokens(plan: StepPlan) -> int:
    return sum(item.num_tokens for item in plan.scheduled)


@dataclass(frozen=True)
class _Work:
    """One sequence's part of a step. The state stays after the runner has dropped the sequence."""

    state: _State
    num_tokens: int
    num_samples: int
    is_decode: bool
    masks: dict[int, bytes]  # allowed tokens, by number of drafts before the position; no mask: all tokens
    drafts: tuple[int, ...] = ()  # drafts that the plan gives


@dataclass(frozen=True)
class ToyStep:
    """A PendingStep."""

    runner: ToyRunner
    step: int
    work: tuple[_Work, ...]
    digests: tuple[DigestOrder, ...]
    targets: list[Targets]
    new: tuple[NewSequence, ...]
    state_snapshots: tuple[StateSnapshot, ...]
    state_copies: tuple[tuple[int, int], ...]
    adapters: tuple[AdapterSlot, ...]

    def done(self) -> bool:
        return not self.runner.busy

    def result(self) -> StepOutput:
        return self.runner.compute(self)


@dataclass(frozen=True)
class ToyDigests:
    """A PendingDigests, computed as late as possible."""

    runner: ToyRunner
    order: DigestOrder

    def done(self) -> bool:
        return True

    def result(self) -> tuple[int, ...]:
        return self.runner._digests(self.order)


class ToyRunner:
    """A ModelRunner over host memory; K holds token ids, V their positions."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        max_in_flight: int = 1,
        stages: int = 1,
        layered: bool = False,
        num_state_slots: int = 0,
        windows: tuple[int | None, ...] = (None,),
        latent: bool = False,
        heads: tuple[KVHeads, ...] = (),
    ) -> None:
        """``layered``: launches take long enough for results of earlier steps to arrive meanwhile.

        ``latent``: token ids and positions are one row, in place of K and V. ``heads``: of groups, if they are unlike.
        """
        self._layered = layered
        self.max_in_flight = max_in_flight
        self.stages = stages
        groups = KVCacheGroups(windows, tuple(range(len(windows))), heads)
        finest = groups.finest if heads else KVHeads(1, 1)
        spec = (
            LatentSpec(1, 2, "float32")
            if latent
            else FullAttentionSpec(finest.num_kv_heads, finest.head_dim, "float32")
        )
        num_layers = groups.block_layers(range(len(windows)), finest.num_kv_heads)
        self.kv_layout = KVLayout(num_blocks, block_size, block_size, num_layers, spec, groups)
        self.weights = 0  # changes so far
        self._windows = windows
        self.busy = False  # whether steps in flight go on for now; their results may be taken all the same
        self.launched: list[StepPlan] = []
        self.behind: list[int] = []  # steps that were in flight at each of these launches
        self.num_overlapped = 0  # results taken while a later forward pass was launched
        self.cache = np.full(self.kv_layout.shape, 0xFFFFFFFF, dtype=np.uint32)
        self._of_group = [self._blocks_of(group) for group in range(len(windows))]
        self.slots = np.full((num_state_slots, _SLOT_WORDS), 0xFFFFFFFF, dtype=np.uint32)
        self.adapters: dict[str, Adapter] = {}  # in host memory, by digest
        self.adapter_slots: dict[int, str] = {}  # digests, by slot
        self._states: dict[int, _State] = {}
        self._in_flight: deque[ToyStep] = deque()
        self._targets = PromptTargets()
        self._random = random.Random(num_blocks)

    def _blocks_of(self, group: int) -> np.ndarray:
        """Return a view of the cache as blocks of a group: [blocks, planes, block_size, head_dim] of the last head."""
        shape = self.kv_layout.of_group(group).shape
        *_, planes, size, elements = shape
        head_elements = math.prod(shape[2:])
        first = (shape[1] - 1) * head_elements
        rows = self.cache.reshape(len(self.cache), -1)[:, first : first + planes * size * elements]
        blocks = np.lib.stride_tricks.as_strided(
            rows, (len(rows), planes, size, elements), (rows.strides[0], 4 * size * elements, 4 * elements, 4)
        )
        assert np.shares_memory(blocks, self.cache)
        return blocks

    @property
    def kv_region(self) -> KVRegion:
        return KVRegion(self.cache.ctypes.data, self.cache.nbytes, "cpu", 0)

    @property
    def state_layout(self) -> StateLayout | None:
        return StateLayout(len(self.slots), 1, _STATE) if len(self.slots) else None

    @property
    def state_region(self) -> KVRegion | None:
        return KVRegion(self.slots.ctypes.data, self.slots.nbytes, "cpu", 0) if len(self.slots) else None

    @property
    def rank_states(self) -> RankStates | None:
        region = self.state_region
        layout = self.state_layout
        return None if region is None or layout is None else RankStates(region, layout, StateShare(0, 1, 1, 0, 1))

    @property
    def num_tokens(self) -> int:
        """Tokens computed since the start."""
        return sum(map(num_tokens, self.launched))

    @property
    def writing(self) -> dict[int, int]:
        """Blocks that steps in flight write to, with the sequence of each."""
        return {block: seq for seq, slots in self._may_write() for block, _ in slots}

    @property
    def slots_writing(self) -> set[Slot]:
        """Slots that steps in flight write to."""
        return {slot for _, slots in self._may_write() for slot in slots}

    def _may_write(self) -> Iterator[tuple[int, list[Slot]]]:
        """Yield the slots that each sequence of the steps in flight may write to, with right drafts and wrong ones."""
        least: dict[int, int] = {}  # by state: tokens computed before the step, if all drafts are wrong
        most: dict[int, int] = {}
        for work in (work for step in self._in_flight for work in step.work):
            state = work.state
            key = id(work.state)
            first = least.get(key, state.num_computed)
            end = most.get(key, state.num_computed) + work.num_tokens
            least[key] = first + (1 if work.is_decode else work.num_tokens)
            most[key] = end
            yield state.seq, self._slots(state, first, end)

    @property
    def used(self) -> set[int]:
        """Blocks of known sequences and of steps in flight."""
        return {block for state in self._states.values() for block in self._read_by(state)} | self.writing.keys()

    def launch(self, plan: StepPlan) -> ToyStep:
        return complete(self.launch_with_pauses(plan))

    def launch_with_pauses(self, plan: StepPlan) -> Pausing[ToyStep]:
        assert len(self._in_flight) < self.max_in_flight
        self.launched.append(plan)
        self.behind.append(len(self._in_flight))
        for seq in plan.finished:
            del self._states[seq]
            self._targets.remove(seq)
        states = [*self._states.values(), *(work.state for step in self._in_flight for work in step.work)]
        used_slots = {state.adapter_slot for state in states}
        assert not used_slots & {filled.slot for filled in plan.adapters}, "a slot is filled that a sequence uses"
        for new in plan.new:
            assert new.seq not in self._states
            assert new.seq not in self.writing.values(), "a sequence was preempted while a step with it is in flight"
            tokens = new.tokens(0, new.num_tokens).tolist()
            state = _State(new.seq, tokens, new.num_computed, list(new.block_ids), new.choice)
            state.num_launched = state.least_launched = new.num_computed
            state.slot = new.state_slot
            state.adapter_slot = new.adapter_slot
            assert (new.adapter_slot == NO_ADAPTER_SLOT) == (new.sampling.adapter == NO_ADAPTER)
            assert (state.slot == NO_SLOT) == (not len(self.slots))
            self._states[new.seq] = state
            self._targets.add(new)
        self._check_stages(plan)
        step = ToyStep(
            self,
            plan.step,
            tuple(self._take_in(plan)),
            plan.digests,
            self._targets.take(plan.scheduled),
            plan.new,
            plan.state_snapshots,
            plan.state_copies,
            plan.adapters,
        )
        if self._layered:
            yield
        self._in_flight.append(step)
        return step

    def launches_by_layer(self, plan: StepPlan) -> bool:
        return plan.num_tokens - len(plan.scheduled) >= 256

    def compute(self, step: ToyStep) -> StepOutput:
        """Compute a step. Later steps see its samples at once, as on a device."""
        assert self._in_flight.popleft() is step, "results are taken in the order of launching, once"
        self.num_overlapped += any(later.work for later in self._in_flight)
        token_ids: list[int] = []
        counts: list[int] = []
        for filled in step.adapters:
            self.adapter_slots[filled.slot] = self.adapters[filled.digest].digest
        for new in step.new:
            for source, target in new.copies:
                self.cache[target] = self.cache[source]
            if new.state_from != new.state_slot:
                self.slots[new.state_slot] = 0 if new.state_from == NO_SLOT else self.slots[new.state_from]
        states = {work.state.seq: work.state for work in step.work}
        for work in step.work:
            state = work.state
            if work.is_decode:
                tokens = self._verify(state, work)
                counts.append(len(tokens))
                token_ids += tokens
                continue
            snapshots = [snapshot for snapshot in step.state_snapshots if snapshot.seq == state.seq]
            assert all(0 < snapshot.num_tokens < work.num_tokens for snapshot in snapshots)
            for position in range(state.num_computed, state.num_computed + work.num_tokens):
                for snapshot in snapshots:
                    if position == state.num_computed + snapshot.num_tokens:
                        self.slots[snapshot.slot] = self.slots[state.slot]
                self._write(state, position, state.token_ids[position])
                self._check_windows(state, position)
                self._advance(state, state.token_ids[position])
            state.num_computed += work.num_tokens
            if work.num_samples:
                token_ids += self._sample(state, work.num_samples, work.masks.get(0, b""))
        for source, target in step.state_copies:
            self.slots[target] = self.slots[source]
        scored = [(targets.seq, self._score(states[targets.seq], targets)) for targets in step.targets]
        return StepOutput(
            step.step,
            token_ids=tuple(token_ids),
            decode_counts=tuple(counts) if any(work.is_decode and work.num_tokens > 1 for work in step.work) else (),
            digests=tuple(map(self._digests, step.digests)),
            prompt_logprobs=tuple(scored),
        )

    @property
    def loaded_files(self) -> FileStates:
        return {}

    def offered_weights(self) -> OfferedMemory:
        return OfferedMemory((), ())

    def check_weights(self, change: WeightChange) -> None:
        """Accept any change: the toy has no weight tensors."""

    def change_weights(self, change: WeightChange) -> None:
        assert not self._in_flight, "weights change beside a step"
        self.weights += 1

    @property
    def has_weights(self) -> bool:
        return True

    def load_adapter(self, adapter: Adapter) -> None:
        self.adapters[adapter.digest] = adapter

    def drop_adapter(self, digest: str) -> None:
        self.adapters.pop(digest, None)

    def close(self) -> None:
        self._states.clear()

    def overwrite(self, block: int) -> None:
        """Change a block, as a peer may before it is read."""
        self.cache[block] += 1

    def digest(self, order: DigestOrder) -> ToyDigests:
        return ToyDigests(self, order)

    def _digests(self, order: DigestOrder) -> tuple[int, ...]:
        size = self.kv_layout.block_size
        digests = []
        groups = order.groups or (0,) * len(order.block_ids)
        last = {group: index for index, group in enumerate(groups)}
        for index, (block, group) in enumerate(zip(order.block_ids, groups, strict=True)):
            count = (order.num_tokens - 1) % size + 1 if last[group] == index else size
            digests.append(crc32(self._of_group[group][block, :, :count].tobytes()))
        return (*digests, *(crc32(self.slots[slot].tobytes()) for slot in order.state_slots))

    def _advance(self, state: _State, token: int) -> None:
        """Let a sequence's recurrent state take in a token."""
        if state.slot != NO_SLOT:
            self.slots[state.slot, :2] = _advanced(*self.state_in(state.slot), self._written(state, token))

    def state_in(self, slot: int) -> tuple[int, int]:
        """Return the recurrent state in a slot: tokens and their digest."""
        count, digest = map(int, self.slots[slot, :2])
        return count, digest

    def _check_state(self, state: _State, seen: Iterable[int]) -> None:
        if state.slot != NO_SLOT:
            assert self.state_in(state.slot) == state_after(seen), "a recurrent state is of other tokens"

    def _take_in(self, plan: StepPlan) -> list[_Work]:
        works = []
        others = self.writing
        masks = defaultdict[int, dict[int, bytes]](dict)
        for mask in plan.masks:
            masks[mask.seq][mask.drafts_before] = mask.words
        drafts_of = {drafts.seq: drafts.token_ids for drafts in plan.drafts}
        told = {drafts.seq: drafts.yielded for drafts in plan.drafts}
        for more in plan.new_blocks:
            self._states[more.seq].blocks += more.block_ids
        for index, item in enumerate(plan.scheduled):
            state = self._states[item.seq]
            is_decode = index < plan.num_decodes
            assert not state.verifying, "a step continues from drafts that are not on the host yet"
            assert told.get(item.seq, ()) == state.yielded
            state.yielded = ()
            state.verifying = bool(drafts_of.get(item.seq))
            first = state.least_launched
            end = state.num_launched + item.num_tokens
            assert all(others.get(block, item.seq) == item.seq for block in self._read_by(state)), (
                "two write to one block"
            )
            others |= dict.fromkeys((block for block, _ in self._slots(state, first, end)), item.seq)
            state.num_launched = end
            state.least_launched += 1 if is_decode else item.num_tokens
            drafts = drafts_of.get(item.seq, ())
            assert not drafts or len(drafts) == item.num_tokens - 1
            works.append(_Work(state, item.num_tokens, item.num_samples, is_decode, masks[item.seq], drafts))
        return works

    def _check_stages(self, plan: StepPlan) -> None:
        """A token sampled at the last stage reaches the first one after as many further steps as there are stages."""
        steps = [step for step in self._in_flight if step.work]
        just_before = steps[max(0, len(steps) - self.stages + 1) :]
        drawn = {work.state.seq for step in just_before for work in step.work if work.num_samples}
        assert not drawn & {item.seq for item in plan.scheduled}, "a step continues from a token that has not arrived"
        for index, item in enumerate(plan.scheduled if self.max_in_flight == self.stages else ()):
            state = self._states[item.seq]
            num_known = 1 if index < plan.num_decodes else item.num_tokens
            assert state.num_launched + num_known <= len(state.token_ids), "a token is not on the host yet"

    def _verify(self, state: _State, work: _Work) -> list[int]:
        """Compute the newest token and drafts. Return the accepted drafts, and the token after them."""
        num_drafts = work.num_tokens - 1
        masks = work.masks
        assert not masks or len(masks) == 1 + len(work.drafts) == 1 + num_drafts
        first = state.num_computed
        token_ids = list[int]()
        right = True
        draft = state.token_ids[first]
        for index in range(1 + num_drafts):
            self._write(state, first + index, draft)
            if right:  # a runner keeps the state after the last token that is accepted
                self._advance(state, draft)
                self._check_windows(state, first + index)
                state.num_computed += 1
                token_ids += self._sample(state, 1, masks.get(index, b""))
            if index < num_drafts and work.drafts:
                draft = work.drafts[index]
                right &= draft == token_ids[-1]
            else:
                right &= self._random.random() < RIGHT_DRAFTS
                draft = token_ids[-1] if right else self._random.randrange(VOCAB, 2 * VOCAB)
        if work.drafts:
            state.yielded = tuple(token_ids)
            state.verifying = False
        state.num_launched -= 1 + num_drafts - len(token_ids)
        state.least_launched += len(token_ids) - 1
        return token_ids

    def _sample(self, state: _State, num_samples: int, mask: bytes) -> list[int]:
        seen = self._seen(state)
        self._check_state(state, seen)
        choices = range(num_samples) if num_samples > 1 else (state.choice,)
        bits = int.from_bytes(mask, "little")
        allowed = [token for token in range(bits.bit_length()) if bits >> token & 1] or range(VOCAB)
        token_ids = [allowed[next_token(seen, choice) % len(allowed)] for choice in choices]
        state.token_ids.append(token_ids[0])
        return token_ids

    def _score(self, state: _State, targets: Targets) -> PromptLogprobs:
        seen = self._seen(state)
        rows = enumerate(targets.token_ids, targets.first)
        ranks = [next_token(seen[:at], token) for at, token in rows]
        return PromptLogprobs(targets.first, 0, b"".join(struct.pack("<fI", -1.0, rank) for rank in ranks))

    def _slots(self, state: _State, first: int, end: int) -> list[Slot]:
        """Return the slots of a sequence's positions, in all groups."""
        groups = range(len(self._windows))
        return [self._slot_of(state, position, group) for position in range(first, end) for group in groups]

    def _slot_of(self, state: _State, position: int, group: int) -> Slot:
        index, offset = divmod(position, self.kv_layout.block_size)
        block = state.blocks[index * len(self._windows) + group]
        assert block != NULL_BLOCK, f"position {position} has no block in group {group}"
        return block, offset

    def _slot(self, state: _State, position: int, group: int = 0) -> np.ndarray:
        block, offset = self._slot_of(state, position, group)
        planes = self._of_group[group][block, :, offset]
        return planes[0] if len(planes) == 1 else planes[:, 0]

    def _written(self, state: _State, token: int) -> int:
        adapter = NO_ADAPTER if state.adapter_slot == NO_ADAPTER_SLOT else self.adapter_slots[state.adapter_slot]
        return token + self.weights * OF_WEIGHTS + offset_of(adapter)

    def _write(self, state: _State, position: int, token: int) -> None:
        for group in range(len(self._windows)):
            self._slot(state, position, group)[:] = self._written(state, token), position

    def _seen(self, state: _State) -> np.ndarray:
        """Return the computed tokens as a full group has them; without one, those in windows were compared."""
        if self._windows[0] is not None:
            return np.array([self._written(state, token) for token in state.token_ids[: state.num_computed]])
        return np.array([self._slot(state, position)[0] for position in range(state.num_computed)])

    def _check_windows(self, state: _State, position: int) -> None:
        """Compare what the query at ``position`` reads in groups with a window with the tokens of its sequence."""
        for group, window in enumerate(self._windows):
            if window is not None or group:
                for seen in range(0 if window is None else max(0, position - window + 1), position):
                    cached = self._slot(state, seen, group).tolist()
                    assert cached == [self._written(state, state.token_ids[seen]), seen], (seen, position, group)

    def _read_by(self, state: _State) -> set[int]:
        """Return the blocks that the next steps of a sequence may read."""
        size = self.kv_layout.block_size
        count = len(self._windows)
        blocks = set()
        for entry, block in enumerate(state.blocks):
            index, group = divmod(entry, count)
            window = self._windows[group]
            if window is None or (index + 1) * size > state.num_computed - window + 1:
                blocks.add(block)
        return blocks - {NULL_BLOCK}
