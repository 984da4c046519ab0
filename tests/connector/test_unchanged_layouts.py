"""Models of equal heads keep the layouts, handshakes, reads and digests of releases before KV heads per layer.

A node of an earlier release, and files on disk, know only these. The hashes were computed by commit 50f2cb3d.
"""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoints import _TINY, CONFIG_CLASSES, CONVOLUTIONS, MAMBA2

from connector.planning.rank_mapping import LocalRank
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import choose_parallel_config
from pdserve.config.resolution.compat_fields import compat_fields_of
from pdserve.config.resolution.kv_layouts import units_of_stages
from pdserve.kv.layout import KVLayout, KVRegion, KVShare
from pdserve.model.model_config import load_model_config
from pdserve.records import Peer, RankKV
from pdserve.rpc.protobuf import rank_to_pb
from runner.kv_digest import KVDigester

_MISTRAL = {"sliding_window": 20, "num_hidden_layers": 5, "layer_types": ["full_attention"] + ["sliding_attention"] * 4}
_QWEN = {"use_sliding_window": True, "sliding_window": 24, "max_window_layers": 2, "num_hidden_layers": 7}
LATER = (*CONVOLUTIONS, *MAMBA2, "gemma4_text", "ministral3", "mistral4")  # families that earlier releases do not serve
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "mistral-windows": ("mistral", _MISTRAL),
    "qwen3-windows": ("qwen3", _QWEN),
}
HASHES: dict[str, str] = {
    "llama": "461f0cbdbe48a942",
    "mistral": "2825c41f0f60148f",
    "qwen2": "4ff1b2c5145efc1e",
    "qwen3": "8bde88e48a924cee",
    "qwen3_moe": "43ff09538fbf1f4e",
    "mixtral": "5a3a54cedd27a864",
    "gpt_oss": "8addb3992ba0160a",
    "glm4_moe": "26f581609a4f5d98",
    "qwen3_next": "cf157f2647ee5860",
    "qwen3_5_text": "0bce70a70b1e8b00",
    "qwen3_5_moe_text": "f19242e9d5faed19",
    "minimax_m2": "fe589c101824fa19",
    "deepseek_v2": "e3c1c5e5a0914f87",
    "deepseek_v3": "bb83abf74ffd3159",
    "glm4_moe_lite": "b0a6f452cd5b88f1",
    "mistral-windows": "ded05c426b27e547",
    "qwen3-windows": "87cb834fd7ae4024",
}


def cases() -> dict[str, tuple[str, dict[str, Any]]]:
    return {family: (family, {}) for family in CONFIG_CLASSES if family not in LATER} | MORE


def described(directory: Path) -> Iterator[bytes]:
    """Yield bytes that describe a model's layouts, their handshakes, and what ranks read and digest."""
    model = load_model_config(directory)
    options = NodeOptions(model="m")
    nodes = []
    for pp, tp, page in ((1, 1, 16), (1, 2, 16), (2, 1, 8), (1, 4, 16)):
        if model.state is not None and (pp, tp) != (1, 1):
            continue
        parallel = choose_parallel_config(model, pp, tp)
        shares = parallel.shares(model)
        units = units_of_stages(options, model, parallel, page, "float16", "float16")
        layouts = [units[rank // tp].layout for rank in range(len(shares))]
        fields = compat_fields_of(options, model, None, layouts[0], "float16", ())
        del fields["config"]  # a hash of all fields of a ModelConfig, which may become more
        yield repr(sorted(fields.items())).encode()
        ranks = [rank_of(str(number), *pair) for number, pair in enumerate(zip(layouts, shares, strict=True))]
        yield from (rank_to_pb(rank).SerializeToString(deterministic=True) for rank in ranks)
        nodes.append((shares, layouts, ranks))
        for layout, share in zip(layouts, shares, strict=True):
            memory = torch.zeros(layout.shape, dtype=torch.float16)
            yield KVDigester(memory, layout, share)._multipliers.numpy().tobytes()
    for shares, layouts, _ in nodes:
        for _, _, ranks in nodes:
            for number, layout in enumerate(layouts):
                for source in LocalRank(shares, number).source_ranks(layout, Peer("node", "e1", tuple(ranks))):
                    yield source.rank.agent.encode()
                    for part in source.slices:
                        for side in part:
                            yield np.concatenate([side.offsets, side.num_bytes, [side.block_bytes]]).tobytes()


def rank_of(agent: str, layout: KVLayout, share: KVShare) -> RankKV:
    return RankKV(agent, b"", KVRegion(4096, layout.total_bytes, "cpu", 0), layout, share)


def hash_of(name: str, directory: Path) -> str:
    family, fields = cases()[name]
    config_class, model_class, defaults = CONFIG_CLASSES[family]
    config = config_class(**copy.deepcopy({**_TINY, **defaults, **fields}))
    config.architectures = [model_class.__name__]
    config.dtype = "float16"
    config.save_pretrained(directory)
    digest = hashlib.sha256()
    for part in described(directory):
        digest.update(len(part).to_bytes(8, "little") + part)
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("name", cases())
def test_models_of_equal_heads_keep_their_layouts(name: str, tmp_path: Path) -> None:
    assert hash_of(name, tmp_path) == HASHES[name]


def test_every_family_has_a_hash() -> None:
    assert HASHES.keys() == cases().keys()
