"""Sizes and limits of a node, as its scheduler knows them. None of them changes."""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from engine.kv_cache.block_pool import ONE_GROUP
from engine.scheduler.drafting import NO_DRAFTS, DraftOptions
from pdserve.kv_groups import KVCacheGroups


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    num_blocks: int
    block_size: int  # tokens
    num_state_slots: int = 0  # slots of recurrent state; 0: no recurrent layers
    groups: KVCacheGroups = ONE_GROUP
    max_num_seqs: int  # running sequences
    max_batch_tokens: int  # tokens of a step
    full_step: int  # tokens that keep the device busy: see StepBuilder
    tile: int = 1  # tokens that the device computes together: see StepBuilder
    drafts: DraftOptions = NO_DRAFTS
    max_waiting: int  # requests without output
    stages: int = 1  # pipeline stages: see microbatch.py
    itl_target: float | None = 0.0  # seconds; 0: none, None: as itl_target.py measures
    idle_step: float = 0.0  # seconds of a step without work for the device
    vocab_size: int = 0
    eos_token_ids: Collection[int] = ()
