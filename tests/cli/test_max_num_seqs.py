"""The default of ``--max-num-seqs``: as many sequences as KV memory, recurrent states and a step have room for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import ParallelConfig
from pdserve.config.resolution.kv_layouts import RankKV
from pdserve.config.resolution.limits import (
    FEWEST_SEQS,
    MOST_SEQS,
    SEQUENCE_TOKENS,
    choose_batch_tokens,
    choose_max_num_seqs,
    default_max_num_seqs,
)
from pdserve.config.resolution.resolved import Resolved
from pdserve.config.resolution.state_slots import choose_slots
from pdserve.kv.groups import KVCacheGroups
from pdserve.kv.layout import FullAttentionSpec, KVLayout
from pdserve.kv.states import GatedDeltaSpec, StateLayout

CPU = DeviceInfo(kind="cpu", index=0, name="CPU", memory=64 << 30)
GPU = DeviceInfo(kind="cuda", index=0, name="GPU", memory=140 << 30, capability=(9, 0))
ONE = ParallelConfig((32,))
STAGED = ParallelConfig((16, 16))
DRAFTS: dict[str, Any] = {"speculate": "lookup", "num_drafts": 3}
STATE = GatedDeltaSpec(key_heads=16, value_heads=32, key_dim=128, value_dim=128, conv_width=4, dtype="bfloat16")


def unit(layers: int = 32, states: int = 0, windows: tuple[int | None, ...] = (None,)) -> RankKV:
    """Return a block of 16 tokens of ``layers`` layers, with a slot of ``states`` recurrent layers.

    Each window is of another KV cache group with as many layers.
    """
    groups = [n % len(windows) for n in range(layers * len(windows))] if len(windows) > 1 else []
    layout = KVLayout(
        num_blocks=1,
        block_size=16,
        kernel_block_size=16,
        num_layers=layers,
        spec=FullAttentionSpec(8, 128, "bfloat16"),
        groups=KVCacheGroups(windows=windows, layers=tuple(groups)),
    )
    return RankKV(layout, StateLayout(num_slots=1, num_layers=states, spec=STATE) if states else None)


def chosen(
    memory: int, *units: RankKV, device: DeviceInfo = GPU, parallel: ParallelConfig = ONE, **options: Any
) -> Resolved[int]:
    return choose_max_num_seqs(NodeOptions(model="m", **options), device, parallel, memory, list(units) or [unit()])


@given(st.floats(0, 1e12), st.floats(0, 1e12))
def test_default_grows_with_memory_within_its_bounds(fitting: float, more: float) -> None:
    number = default_max_num_seqs(fitting)
    assert FEWEST_SEQS <= number <= MOST_SEQS
    assert number % 64 == 0
    assert number <= max(fitting, FEWEST_SEQS)
    assert number > min(fitting, MOST_SEQS) - 64
    assert default_max_num_seqs(fitting + more) >= number


@given(
    memory=st.integers(0, 1 << 40),
    layers=st.lists(st.integers(1, 80), min_size=1, max_size=4),
    states=st.integers(0, 48),
    drafts=st.integers(0, 8),
    batch_tokens=st.none() | st.integers(9, 1 << 17),
    staged=st.booleans(),
)
def test_sequences_fit_into_memory_and_a_step(
    memory: int, layers: list[int], states: int, drafts: int, batch_tokens: int | None, staged: bool
) -> None:
    units = [unit(number, states) for number in layers]
    parallel = STAGED if staged else ONE
    drafting: dict[str, Any] = {"num_drafts": drafts, "speculate": "lookup"} if drafts else {"speculate": "off"}
    options = NodeOptions(model="m", max_batch_tokens=batch_tokens, **drafting)
    number = choose_max_num_seqs(options, GPU, parallel, memory, units).value
    assert 1 <= number <= MOST_SEQS
    step = choose_batch_tokens(options, GPU, parallel, number).value
    assert number * (1 + options.max_drafts) <= step
    if batch_tokens is None and number > FEWEST_SEQS:
        assert step == (2048 if staged else 8192), "more sequences must not make steps longer"
    if number > FEWEST_SEQS:
        for layout, slot in units:
            if slot is None:
                assert number * layout.blocks_for(SEQUENCE_TOKENS) * layout.block_bytes <= memory
            else:
                assert 2 * number <= choose_slots(memory, layout, slot, number)


def test_reasons_name_what_limits() -> None:
    per_sequence = 128 * 1024 * SEQUENCE_TOKENS
    assert chosen(400 * per_sequence) == Resolved(384, "memory holds 400 sequences of 1024 tokens; within 256 … 512")
    assert chosen(9 * per_sequence).value == FEWEST_SEQS
    assert chosen(5000 * per_sequence).value == MOST_SEQS
    tight = chosen(5000 * per_sequence, parallel=STAGED, max_batch_tokens=1800, **DRAFTS)
    assert tight == Resolved(450, "a step of 1800 tokens has 4 for each")
    assert chosen(5000 * per_sequence, max_batch_tokens=400, **DRAFTS).value == 100
    assert chosen(5000 * per_sequence, max_batch_tokens=400).value == 400
    assert chosen(5000 * per_sequence, device=CPU) == Resolved(FEWEST_SEQS, "on a CPU")
    assert chosen(5000 * per_sequence, max_num_seqs=7) == Resolved(7), "the flag decides"


def test_the_stage_with_the_most_layers_limits() -> None:
    per_sequence = 128 * 1024 * SEQUENCE_TOKENS
    assert chosen(1000 * per_sequence, unit(16), unit(16), parallel=STAGED).value == MOST_SEQS
    assert chosen(1000 * per_sequence, unit(16), unit(64), parallel=STAGED).value == 448


def test_layers_with_a_window_leave_room_for_more() -> None:
    memory = 500 * 128 * 1024 * SEQUENCE_TOKENS
    assert chosen(memory, unit()).value == 448
    assert chosen(memory, unit(windows=(None, 1 << 20))).value == 256, "each of two groups keeps 64 blocks"
    assert chosen(memory, unit(windows=(None, 128))).value == 384, "one keeps 64 blocks, the other one 10"


@pytest.mark.parametrize(
    ("slots", "number"), [(None, 448), (600, 300 // 64 * 64), (4000, MOST_SEQS), (40, FEWEST_SEQS)]
)
def test_recurrent_states_limit(slots: int | None, number: int) -> None:
    recurrent = unit(layers=8, states=24)
    assert recurrent.states is not None
    memory = 900 * (4096 * recurrent.layout.bytes_per_token + recurrent.states.slot_bytes)
    assert chosen(memory, recurrent, state_slots=slots).value == number
