"""Copies of hot experts: their placement by load, the tokens spread over them, and changes of their weights."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import make_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from runner.expert_balance import ExpertBalance
from runner.models.layers.expert_copies import ExpertCopies
from runner.models.layers.expert_placement import (
    UNUSED,
    Placement,
    balanced_placement,
    busiest_load,
    first_placement,
    next_placement,
)
from torch import Tensor
from weight_patches import patched, read_tensors, write_patch

from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.node_config import DeviceInfo
from pdserve.config.parallel import ParallelConfig, choose_parallel_config, with_redundant_experts
from pdserve.model.model_config import load_model_config
from pdserve.records import ScheduledSequence, StepPlan
from runner.batch import Routing
from runner.distributed.parallel_state import ParallelState
from runner.kernels import expert_reference, routing
from runner.loading.offered_weights import offer_shards
from runner.loading.patches import CheckedPatch
from runner.loading.stored_weights import StoredWeights
from runner.loading.weights import fill_shard, open_weights
from runner.models.decoder import Decoder
from runner.models.layers.weight_shard import WeightShard
from runner.models.registry import decoder_class
from runner.placement import TensorPlacement

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
CPU = TensorPlacement(torch.device("cpu"), torch.float32, torch.float32)


@st.composite
def loads_and_slots(draw: st.DrawFn) -> tuple[list[int], int, int]:
    """Draw the loads of experts, the shards that divide them, and each shard's slots for copies."""
    shards, each = draw(st.integers(2, 4)), draw(st.integers(1, 5))
    one = st.one_of(st.just(0), st.integers(0, 10), st.integers(0, 1 << 40))
    loads = draw(st.lists(one, min_size=shards * each, max_size=shards * each))
    return loads, shards, draw(st.integers(1, (shards - 1) * each))


def check_placement(placement: Placement, num_experts: int, shards: int, slots: int) -> None:
    """Assert that slots hold experts of other shards, each once."""
    each = num_experts // shards
    assert [len(experts) for experts in placement] == [slots] * shards
    for shard, experts in enumerate(placement):
        copies = [expert for expert in experts if expert != UNUSED]
        assert len(set(copies)) == len(copies)
        assert set(copies) <= set(range(num_experts)) - set(range(shard * each, (shard + 1) * each))


@given(loads_and_slots())
def test_copies_never_make_the_busiest_shard_busier(given_: tuple[list[int], int, int]) -> None:
    loads, shards, slots = given_
    found = balanced_placement(loads, shards, slots)
    check_placement(found, len(loads), shards, slots)
    alone = busiest_load(loads, ((),) * shards)
    assert sum(loads) / shards <= busiest_load(loads, found) * (1 + 1e-9)
    assert busiest_load(loads, found) <= alone * (1 + 1e-9)


@given(loads_and_slots())
def test_the_next_placement_is_never_busier_and_leaves_copies_in_their_slots(
    given_: tuple[list[int], int, int],
) -> None:
    loads, shards, slots = given_
    first = first_placement(len(loads), shards, slots)
    check_placement(first, len(loads), shards, slots)
    found = next_placement(loads, first)
    check_placement(found, len(loads), shards, slots)
    assert busiest_load(loads, found) <= busiest_load(loads, first)
    assert next_placement(loads, found) == found
    for old, new in zip(first, found, strict=True):
        assert all(new[slot] == expert for slot, expert in enumerate(old) if expert in new)


@pytest.mark.parametrize("load", [0, 6])
def test_equal_loads_stay_equal_and_move_no_copy(load: int) -> None:
    for slots in range(7):
        first = first_placement(9, 3, slots)
        assert busiest_load([load] * 9, first) == 3 * load
        assert next_placement([load] * 9, first) == first


def test_a_hot_expert_is_copied_to_the_least_busy_shards() -> None:
    assert balanced_placement([90, 5, 1, 5, 5, 5], 3, 1) == ((4,), (0,), (0,))
    assert next_placement([90, 5, 1, 5, 5, 5], ((UNUSED,), (4,), (0,))) == ((4,), (0,), (0,))
    assert next_placement([90, 5, 1, 5, 6, 5], ((5,), (0,), (0,))) == ((5,), (0,), (0,))  # no other is clearly better


@pytest.mark.parametrize(("tokens", "top_k"), [(0, 2), (1, 3), (90, 3)])
def test_spread_tokens_equal_torch(tokens: int, top_k: int) -> None:
    generator = torch.Generator().manual_seed(tokens)
    experts = torch.randint(0, 5, (tokens, top_k), generator=generator, dtype=torch.int32).to(DEVICE)
    slots = torch.arange(15, dtype=torch.int32, device=DEVICE).view(5, 3)
    counts = torch.tensor([1, 2, 3, 1, 3], dtype=torch.int32, device=DEVICE)
    found_load, load = (torch.full((5,), 7, device=DEVICE) for _ in range(2))
    found = routing.spread_over_slots(experts, slots, counts, found_load)
    assert torch.equal(found, expert_reference.spread_over_slots(experts, slots, counts, load))
    assert torch.equal(found_load, load)
    assert int(load.sum()) == 35 + tokens * top_k


def test_tokens_go_to_slots_that_hold_their_experts_in_turn() -> None:
    position = SimpleNamespace(parallel=SimpleNamespace(ep=2, ep_redundancy=2), shard=1)
    copies = ExpertCopies(6, position, CPU)  # type: ignore[arg-type]
    copies.place(((5, UNUSED), (1, 0)))
    assert (copies.local, copies.mine) == (range(5, 10), [1, 0])
    experts = torch.tensor([[0, 5], [0, 5], [2, 1]], dtype=torch.int32)
    found = copies(Routing(torch.ones(3, 2), experts))
    assert found.experts.tolist() == [[0, 7], [9, 3], [2, 1]]
    assert list(copies.moves(((5, 4), (1, 2)))) == [(1, 1, 0, 4), (0, 2, 1, 4)]


def test_steps_count_only_if_every_rank_gets_them() -> None:
    """Rank 0 alone gets plans without orders; the warm-up has step -1."""
    position = ParallelConfig((1,), ep_rebalance_steps=2).position(0)
    balance = ExpertBalance(ParallelState(position, DeviceInfo("cpu", 0, "cpu", 0), ""), [])
    some = (ScheduledSequence(0, 1, 1),)
    plans = [StepPlan(-1, scheduled=some), StepPlan(1, scheduled=some), StepPlan(2), StepPlan(3, scheduled=some)]
    assert [balance.part(plan) for plan in plans] == [None, None, None, balance]


# ---------------------------------------------------------------- weights


class Rank:
    """A rank's decoder, of two shards with two slots for copies."""

    def __init__(self, directory: Path, shard: int) -> None:
        self.directory, model = directory, load_model_config(directory)
        parallel = with_redundant_experts(model, choose_parallel_config(model, 1, 2, ep=2), 2, 100)
        world: Any = SimpleNamespace(position=parallel.position(shard), device=CPU.device)
        self.decoder: Decoder = decoder_class(model.architecture)(model, world, CPU)
        self.load()

    def load(self) -> None:
        def fill(shards: Mapping[str, WeightShard]) -> None:
            for name, shard in shards.items():
                fill_shard(self.directory, name, shard, weights[name], 1 << 30)

        with open_weights(self.directory, self.decoder.config, CPU.device, CPU.stored) as weights:
            for group in self.decoder.weight_groups():
                group.refill(fill)

    def place(self, placement: Placement) -> None:
        """Put copies elsewhere without their weights."""
        for mixture in self.decoder.mixtures():
            assert mixture.copies is not None
            mixture.copies.place(placement)

    def patch(self, path: Path) -> None:
        headers = [header for headers in read_headers(self.directory).values() for header in headers.items()]
        with open_weights(self.directory, self.decoder.config, CPU.device, CPU.stored) as weights:
            stored = StoredWeights(dict(headers), weights)
        CheckedPatch(path, stored, 1 << 30).apply(self.decoder.weight_groups())

    def check(self, tensors: dict[str, Tensor], copied: set[int]) -> None:
        """Assert that slots hold these tensors, and copies of just these experts."""
        shards = {name: shard for name, shard in self.decoder.weight_shards() if ".experts." in name}
        assert {int(name.split(".")[5]) for name, shard in shards.items() if shard.is_copy} == copied
        for name, shard in shards.items():
            assert torch.equal(shard.memory, shard.part_of(tensors[name])), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "qwen3_moe", num_hidden_layers=1)


def test_reloads_and_patches_reach_every_copy(checkpoint: Path, tmp_path: Path) -> None:
    tensors = read_tensors(checkpoint)
    name = "model.layers.0.mlp.experts.{}.down_proj.weight"
    entries = {f"{name.format(expert)}.rows.3": torch.full((2, 48), float(expert)) for expert in (0, 3, 6)}
    path = write_patch(tmp_path / "patch.safetensors", entries)
    for shard, first, later in ((0, {4, 5}, {6, 7}), (1, {0, 1}, {0, 3})):
        rank = Rank(checkpoint, shard)
        rank.check(tensors, first)
        rank.place(((6, 7), (0, 3)))
        rank.load()
        rank.check(tensors, later)
        rank.patch(path)
        rank.check(patched(tensors, entries), later)


def test_peers_are_not_offered_copies_which_may_be_replaced(checkpoint: Path) -> None:
    stored = {name: header for headers in read_headers(checkpoint).values() for name, header in headers.items()}
    offered, _ = offer_shards(Rank(checkpoint, 0).decoder.weight_shards(), stored)
    experts = {int(part.name.split(".")[5]) for part in offered.parts if ".experts." in part.name}
    assert experts == {0, 1, 2, 3}
