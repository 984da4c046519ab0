"""Sizes and limits of a node, as its scheduler knows them. None of them changes.

A scheduler is tested without a model and a device, so it takes this record in place of ``NodeConfig``.
"""

from __future__ import annotations

from collections.abc import Collection

import msgspec

from engine.kv_cache.block_pool import ONE_GROUP
from pdserve.config.node_config import NodeConfig
from pdserve.kv.groups import KVCacheGroups
from pdserve.kv.layout import KVLayout
from pdserve.kv.states import StateLayout

# Prompt tokens from which on a step's time grows in proportion to them, by kind of device.
FULL_STEP = {"cpu": 512, "cuda": 2048, "simulated": 2048}
# Products on an H200 compute tokens in tiles. A step of Llama 8B takes 24.9 ms with 1,024 tokens, 29.7 with 1,088 to
# 1,152, and 31.2 with 1,280 (bench/mixed_steps.py).
TILE = {"cpu": 1, "cuda": 256, "simulated": 1}


class SchedulerConfig(msgspec.Struct, frozen=True, kw_only=True):
    num_blocks: int
    block_size: int  # tokens
    num_state_slots: int = 0  # slots of recurrent state; 0: no recurrent layers
    groups: KVCacheGroups = ONE_GROUP
    max_num_seqs: int  # running sequences
    max_batch_tokens: int  # tokens of a step
    full_step: int  # tokens that keep the device busy: see StepBuilder
    tile: int = 1  # tokens that the device computes together: see StepBuilder
    max_drafts: int = 0  # drafts of a decode; 0: none
    whole_images: bool = False  # a step computes all tokens of an image that have no KV yet
    max_waiting: int  # requests without output
    stages: int = 1  # pipeline stages: see microbatch.py
    itl_target: float | None = 0.0  # seconds; 0: none, None: as itl_target.py measures
    ttft_target: float = 0.0  # seconds; 0: none
    idle_step: float = 0.0  # seconds of a step without work for the device
    vocab_size: int = 0
    eos_token_ids: Collection[int] = ()

    @classmethod
    def of_node(
        cls, config: NodeConfig, layout: KVLayout, states: StateLayout | None, idle_step: float
    ) -> SchedulerConfig:
        """Return the record of a node whose ranks have allocated these layouts."""
        return cls(
            num_blocks=layout.num_blocks,
            block_size=layout.block_size,
            num_state_slots=0 if states is None else states.num_slots,
            groups=layout.groups,
            max_num_seqs=config.max_num_seqs,
            max_batch_tokens=config.max_batch_tokens,
            full_step=FULL_STEP[config.device.kind],
            tile=TILE[config.device.kind],
            max_drafts=config.max_drafts,
            whole_images=config.model.whole_images,
            max_waiting=config.options.max_waiting,
            stages=config.parallel.pp,
            itl_target=config.itl_target,
            ttft_target=config.options.ttft_target / 1e3,
            idle_step=idle_step,
            vocab_size=config.model.vocab_size,
            eos_token_ids=config.model.eos_token_ids,
        )
