"""The share of random examples and of matrices that the fast set of tests, ``-m "not slow"``, runs.

Also the behaviours that must stay in it: if their only fast test becomes slow, no change tests them any more.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

_E2E = "tests/e2e/test_{}.py::test_{}".format

#: Tests of processes that are the only fast ones of a behaviour. Some cell of each is never slow.
NEVER_SLOW = {
    _E2E(
        "chosen_runner", "v2_that_the_oracle_chose_serves_a_handoff_between_unlike_stages"
    ): "V2 that the oracle chose",
    _E2E("chosen_runner", "choices_of_a_handoff_between_stages_of_v2_are_those_of_one_node"): "a V2 prefill node",
    _E2E("chosen_runner", "a_failing_stage_of_v2_ends_its_node_which_names_it"): "an error in a stage of V2",
    _E2E("v2_nodes", "handed_off_tokens_equal_transformers"): "a handoff between V1 and V2",
    _E2E("latent_models", "tokens_are_exact_between_unlike_nodes"): "latents between unlike nodes",
    _E2E("recurrent_models", "tokens_are_exact_between_unlike_nodes"): "recurrent states between unlike nodes",
    _E2E("window_groups", "tokens_are_exact_between_unlike_nodes"): "groups with windows between unlike nodes",
    _E2E("transformers_handoff", "tokens_are_exact_through_a_handoff"): "layers of transformers on several ranks",
    _E2E("fp8_handoff", "tokens_equal_those_of_a_runner_alone"): "an FP8 KV cache",
    _E2E("structured_outputs", "choices_of_a_handoff_follow_a_schema"): "grammars on stages",
    _E2E("speculation", "answers_are_the_same_through_handoffs"): "drafts behind a handoff",
    _E2E("pulled_prefixes", "answer_after_a_pull_is_that_of_the_model"): "a pull of real KV",
    _E2E("pulled_prefixes", "fault_amid_a_split_changes_no_token"): "a fault amid a split pull",
    _E2E("host_memory", "evicted_conversations_come_back_on_both_nodes"): "the host tier",
    _E2E("disk_kv", "killed_node_finds_the_files_of_both"): "the disk tier",
    _E2E("elastic", "crossing_handoffs_are_exact"): "handoffs between nodes of both roles",
    _E2E("elastic", "streams_move_without_a_change_of_their_tokens"): "moves of streams",
    _E2E("image_answers", "answers_behind_handoffs_are_the_library_s"): "images behind a handoff",
    _E2E("image_users", "users_with_images_of_equal_size_get_their_own_answers"): "images of other users",
    _E2E("fault_table", "prefill_node_faults_end_as_the_table_says"): "the fault table",
    _E2E("wedged_nodes", "requests_leave_a_node_whose_step_does_not_end"): "a node that hangs",
    _E2E("draining_fleet", "draining_decode_node_migrates_its_requests"): "a drain under load",
    _E2E("tls", "prompt_travels_with_mutual_tls"): "mutual TLS",
    "tests/hosts/test_links.py::test_requests_survive_a_partition_of_d_and_p": "a partition of hosts",
}


def moved_to_slow(cells: Iterable[tuple[str, bool]]) -> list[str]:
    """Return the tests of NEVER_SLOW that have collected cells, but no fast one, with their behaviours.

    A cell is the id of a collected test, and whether it is slow.
    """
    are_slow = defaultdict[str, list[bool]](list)
    for name, is_slow in cells:
        are_slow[name.partition("[")[0]].append(is_slow)
    return [f"{test}: {behaviour}" for test, behaviour in NEVER_SLOW.items() if are_slow[test] and all(are_slow[test])]


#: Part of the random examples that a test takes; tests/conftest.py sets it before it imports tests.
share = 1.0


def examples(number: int) -> settings:
    """Return a decorator for a test with random input: with it, the fast set takes a fifth, but 5 at least."""
    return settings(max_examples=max(min(number, 5), round(number * share)))


def sampled(*axes: Iterable[Any], every: int) -> list[Any]:
    """Return all cells of a matrix as parameters; the fast set has each ``every``-th of a row, a column, and so on."""
    numbered = itertools.product(*(enumerate(axis) for axis in axes))
    return [
        pytest.param(*(value for _, value in cell), marks=[pytest.mark.slow] * (sum(at for at, _ in cell) % every > 0))
        for cell in numbered
    ]
