"""A model whose next token is a digest of every token it can see through its paged KV cache.

One misplaced block, stale slot or token too many, and its output differs from ``reference``: it checks bookkeeping to
the bit, in microseconds per token.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from zlib import crc32

import numpy as np

from pdserve.kv import KVLayout
from pdserve.records import KVRegion, Sample, SequenceOutput, StepOutput, StepPlan

VOCAB = 1000


def next_token(token_ids: np.ndarray, choice: int) -> int:
    return crc32(np.ascontiguousarray(token_ids, dtype=np.uint32).tobytes(), choice) % VOCAB


def reference(prompt: list[int], choice: int, num_outputs: int) -> list[int]:
    """What a sequence must produce."""
    tokens = list(prompt)
    for _ in range(num_outputs):
        tokens.append(next_token(np.array(tokens), choice))
    return tokens[len(prompt) :]


@dataclass
class _State:
    token_ids: list[int]
    num_computed: int
    blocks: list[int] = field(default_factory=list)
    choice: int = 0


class ToyRunner:
    """A ModelRunner over host memory; K holds token ids, V their positions."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.kv_layout = KVLayout(num_blocks, block_size, block_size, 1, 1, 1, "float32")
        self._cache = np.full(self.kv_layout.shape, 0xFFFFFFFF, dtype=np.uint32)
        self._states: dict[int, _State] = {}

    @property
    def kv_region(self) -> KVRegion:
        return KVRegion(self._cache.ctypes.data, self._cache.nbytes, "cpu", 0)

    def execute(self, plan: StepPlan) -> StepOutput:
        for seq in plan.finished:
            del self._states[seq]
        for new in plan.new:
            self._states[new.seq] = _State(list(new.token_ids), new.num_computed, list(new.block_ids), new.choice)
        outputs = []
        for item in plan.scheduled:
            state = self._states[item.seq]
            state.blocks += item.new_block_ids
            for position in range(state.num_computed, state.num_computed + item.num_tokens):
                self._slot(state, position)[:] = state.token_ids[position], position
            state.num_computed += item.num_tokens
            if item.num_samples:
                outputs.append(SequenceOutput(item.seq, self._sample(state, item.num_samples)))
        return StepOutput(plan.step, tuple(outputs))

    def close(self) -> None:
        self._states.clear()

    def _sample(self, state: _State, num_samples: int) -> tuple[Sample, ...]:
        seen = np.array([self._slot(state, position)[0] for position in range(state.num_computed)])
        choices = range(num_samples) if num_samples > 1 else (state.choice,)
        samples = tuple(Sample(next_token(seen, choice)) for choice in choices)
        state.token_ids.append(samples[0].token_id)
        return samples

    def _slot(self, state: _State, position: int) -> np.ndarray:
        size = self.kv_layout.block_size
        return self._cache[state.blocks[position // size], 0, 0, :, position % size, 0]
