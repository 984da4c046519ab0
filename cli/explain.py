"""``pdserve explain``: the configuration of a node with these flags. Of weights it reads the headers only."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from pdserve.checkpoint.hub import EMBEDDED_MODEL
from pdserve.checkpoint.hub_headers import resolve_headers
from pdserve.config.device import node_devices
from pdserve.config.memory_fit import check_memory, dtype_in_memory
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import add_node_flags, node_options_from
from pdserve.config.parallel import active_parameters, num_parameters, shard_of, weight_bytes
from pdserve.config.resolution.images import SCREEN, describe_images
from pdserve.config.resolve import resolve
from pdserve.config.tensor_check import checked_tensors
from pdserve.errors import CapacityError
from pdserve.flags import sources as flag_sources
from pdserve.flags.parser import CommandParser, command_parser
from pdserve.host.process import run_command
from pdserve.images import most_tokens
from pdserve.model.generation_defaults import load_generation_defaults
from pdserve.model.image_processor import token_count


def main(argv: Sequence[str] | None = None) -> int:
    return run_command(lambda: explain(make_parser().parse_args(argv)))


def make_parser() -> CommandParser:
    parser = command_parser("pdserve explain", "Show the resolved configuration of a node without loading weights.")
    add_node_flags(parser, model_default=str(EMBEDDED_MODEL))
    parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def explain(args: argparse.Namespace) -> int:
    """Print the explanation. Raises ConfigError or CapacityError if a node would refuse to start.

    As a node does before it reads weights, it compares config.json with the headers of the weights and the layers.
    """
    options = node_options_from(args)
    devices = node_devices(options, options.num_ranks)
    config = resolve(options, devices[0], locate=resolve_headers)
    flags = flag_sources.describe(args)
    warnings = [] if options.simulated else _warnings(config, devices)
    tensors = checked_tensors(config)
    if args.json:
        more = {"tensors": tensors.number, "flags": flags, "warnings": warnings}
        print(json.dumps(describe(config) | more, indent=2))
    else:
        set_by = [f"set: {flag} = {setting['value']}, by {setting['source']}" for flag, setting in flags.items()]
        print("\n".join([as_text(config), f"checked: {tensors}", *set_by, *(f"warning: {text}" for text in warnings)]))
    return 0


def _warnings(config: NodeConfig, devices: Sequence[DeviceInfo]) -> list[str]:
    """Return why this machine's memory keeps a node with this configuration from starting; empty if it suffices."""
    try:
        for rank, device in enumerate(devices):
            check_memory(config.for_rank(rank, device))
    except CapacityError as exc:
        return [f"a node would not start here: {exc}"]
    return []


def describe(config: NodeConfig) -> dict[str, Any]:
    """Return the explanation as plain values. Sizes are in tokens, elements or bytes as the names say.

    The KV layout and the sizes derived from it are rank 0's; ``ranks`` has all ranks.
    """
    layout = config.kv_layout
    return {
        "model": config.served_model_name,
        "architecture": config.model.architecture,
        "runner": config.decision.runner,
        "reasons": list(config.decision.reasons),
        "device": {"kind": config.device.kind, "index": config.device.index, "name": config.device.name},
        "dtype": config.dtype,
        "load_format": config.options.load_format,
        "attention_backend": config.attention_backend,
        "cuda_graphs": config.cuda_graphs,
        "generation_defaults": msgspec.structs.asdict(load_generation_defaults(Path(config.model_dir))),
        "max_model_len": config.max_model_len,
        "max_batch_tokens": config.max_batch_tokens,
        "itl_target": config.itl_target,
        "ttft_target": config.options.ttft_target / 1e3,
        "kv_layout": {
            "kind": layout.spec.kind,
            "shape": list(layout.shape),
            "strides": list(layout.strides),
            "dtype": layout.dtype,
            "block_size": layout.block_size,
            "kernel_block_size": layout.kernel_block_size,
        },
        "kv_groups": {
            "windows": list(layout.groups.windows),
            "layers": list(layout.groups.layers),
            "heads": [[heads.num_kv_heads, heads.head_dim] for heads in layout.groups.heads],
        },
        "longest_sequence_bytes": longest_sequence_bytes(config),
        "state_layout": _describe_states(config),
        "images": _describe_images(config),
        "ranks": [_describe_rank(rank) for rank in _ranks(config)],
        "bytes_per_token": layout.bytes_per_token,
        "num_blocks": layout.num_blocks,
        "measure_kv_memory": config.measure_kv_memory,
        "choices": list(config.choices),
    }


def as_text(config: NodeConfig) -> str:
    layout = config.kv_layout
    tokens = layout.num_tokens
    weights = weight_bytes(config.model, config.position, dtype_in_memory(config))
    of_group = f" of each of {full} groups" if (full := layout.groups.windows.count(None)) > 1 else ""
    estimated = ", estimated" if config.measure_kv_memory else ""
    rows = [
        ("model", f"{config.served_model_name} ({config.model.architecture})"),
        *_expert_rows(config),
        ("runner", f"{config.decision.runner}: {'; '.join(config.decision.reasons)}"),
        ("device", config.device.name),
        ("dtype", config.dtype + (", random weights" if config.random_weights else "")),
        ("weights", f"{weights / 2**30:.2f} GiB in memory"),
        ("attention", config.attention_backend),
        ("graphs", "CUDA graphs for decode steps" if config.cuda_graphs else "none"),
        ("sampling", f"defaults of the checkpoint: {load_generation_defaults(Path(config.model_dir))}"),
        ("longest", f"{config.max_model_len} tokens of prompt and output"),
        ("KV cache", f"{layout.num_blocks} blocks × {layout.block_size} tokens{of_group} = {tokens} tokens{estimated}"),
        ("", f"{layout.bytes_per_token} bytes per token, {layout.total_bytes / 2**20:.0f} MiB in all"),
        *_window_rows(config),
        ("KV layout", f"{list(layout.shape)} {layout.dtype}, strides {list(layout.strides)}"),
        ("", _legend(config)),
        *_draft_rows(config),
        *_state_rows(config),
        *([("images", images)] if (images := describe_images(config)) else ()),
        *(_rank_rows(config) if config.parallel.num_ranks > 1 else ()),
    ]
    lines = [f"{name:<10} {text}" for name, text in rows]
    return "\n".join([*lines, "", *(f"chosen: {choice}" for choice in config.choices)])


def longest_sequence_bytes(config: NodeConfig) -> dict[str, int]:
    """Return the bytes of rank 0's KV that the longest sequence holds while it decodes, and without windows."""
    layout = config.kv_layout
    blocks = layout.blocks_for(config.max_model_len)
    groups = [group for group, _ in layout.groups.places(config.share.layers)]
    layer_bytes = [layout.of_group(group).spec.page_bytes(layout.block_size) for group in groups]
    every = -(-config.max_model_len // layout.block_size) * sum(layer_bytes)
    return {"with_windows": blocks * layout.block_bytes, "without_windows": every}


def _legend(config: NodeConfig) -> str:
    """Describe each dimension of the KV layout."""
    page = config.kv_layout.kernel_block_size
    latent = config.model.latent
    if config.kv_layout.groups.heads:
        return (
            f"[pages, KV heads, layers, K/V, {page} tokens of a page, head size] of the group with most heads; blocks "
            "of other groups have as many bytes"
        )
    if latent is None:
        return f"[pages, KV heads, layers, K/V, {page} tokens of a page, head size]"
    row = f"latent of {latent.kv_lora_rank} and rotated key of {latent.qk_rope_head_dim}"
    return f"[pages, 1, layers, 1, {page} tokens of a page, {row}]"


def _window_rows(config: NodeConfig) -> list[tuple[str, str]]:
    groups = config.kv_layout.groups
    held = longest_sequence_bytes(config)
    if not groups.has_windows:
        return []
    sizes = [held[name] / 2**20 for name in ("with_windows", "without_windows")]
    return [
        ("KV groups", f"{groups.num_groups}: {groups} tokens"),
        ("", f"a sequence of {config.max_model_len} tokens holds {sizes[0]:.1f} MiB; without windows {sizes[1]:.1f}"),
    ]


def _describe_states(config: NodeConfig) -> dict[str, Any] | None:
    """Return the sizes of rank 0's recurrent states, None for a model without any."""
    states = config.state_layout
    if states is None:
        return None
    return {"num_slots": states.num_slots, "bytes_per_sequence": states.slot_bytes, "num_layers": states.num_layers}


def _describe_images(config: NodeConfig) -> dict[str, Any]:
    """Return what the node does with images, and the bytes of rank 0's tower and embeddings."""
    accepted = config.image_input
    return {
        "mode": str(config.images),
        "problem": config.image_problem,
        "tower_bytes": config.tower_bytes,
        "cache_bytes": config.image_cache,
        "bytes_per_token": config.image_token_bytes,
        "token_cost": config.image_token_cost.at(0 if accepted is None else token_count(accepted, *SCREEN)),
        "tokens_of_1080p": 0 if accepted is None else token_count(accepted, *SCREEN),
        "largest_image": 0 if accepted is None else most_tokens(accepted, config.max_model_len),
    }


def _state_rows(config: NodeConfig) -> list[tuple[str, str]]:
    states = config.state_layout
    if states is None:
        return []
    estimated = ", estimated" if config.measure_kv_memory else ""
    size = f"{states.slot_bytes} bytes per sequence, {states.total_bytes / 2**20:.0f} MiB in all"
    return [("state", f"{states.num_slots} slots × {states.num_layers} recurrent layers{estimated}"), ("", size)]


def _draft_rows(config: NodeConfig) -> list[tuple[str, str]]:
    """Describe the memory of the draft layer or draft head on a rank of the last stage."""
    model = config.model
    last = config.parallel.position(config.parallel.num_ranks - 1)
    if not model.num_draft_layers:
        return []
    without = msgspec.structs.replace(model, num_draft_layers=0)
    weights, others = (weight_bytes(shape, last, config.dtype) for shape in (model, without))
    per_token = shard_of(model, last).kv_cache_spec(config.kv_layout.dtype).page_bytes(1)
    size = f"{(weights - others) / 2**20:.0f} MiB of these weights, {per_token} bytes of KV per token"
    if model.draft_head is None:
        return [("drafts", f"by a layer of the model: {size}, up to {config.max_drafts} per step")]
    layers = ", ".join(map(str, model.draft_head.layers))
    return [
        ("drafts", f"by the EAGLE-3 head {config.draft_dir}: {size}, up to {config.max_drafts} per step"),
        ("", f"from the hidden states before layers {layers} of {model.num_layers}"),
    ]


def _ranks(config: NodeConfig) -> list[NodeConfig]:
    return [config.for_rank(rank, config.device) for rank in range(config.parallel.num_ranks)]


def _describe_rank(config: NodeConfig) -> dict[str, Any]:
    share = config.share
    return {
        "rank": config.rank,
        "stage": config.position.stage,
        "shard": config.position.shard,
        "layers": [config.position.layers[0], config.position.layers[-1]],
        "kv_heads": [share.first_head, share.first_head + share.num_heads - 1],
        "parameters": num_parameters(config.model, config.position),
        "active_parameters": active_parameters(config.model, config.position),
        "weight_bytes": weight_bytes(config.model, config.position, config.dtype),
        "experts": _local_experts(config),
        "kv_shape": list(config.kv_layout.shape),
    }


def _local_experts(config: NodeConfig) -> list[int] | None:
    """Return the first and the last expert of this rank, None for dense models."""
    if config.model.moe is None:
        return None
    local = config.position.local_experts(config.model.moe)
    return [local[0], local[-1]]


def _expert_rows(config: NodeConfig) -> list[tuple[str, str]]:
    model = config.model
    position = config.position
    moe = config.model.moe
    if moe is None:
        return []
    shared = " and shared experts" if moe.shared_intermediate_size else ""
    used = active_parameters(model, position) / 1e6
    held = num_parameters(model, position) / 1e6
    return [
        ("experts", f"{moe.num_experts} in each of {model.num_layers - len(moe.dense_layers)} layers"),
        ("", f"a token uses {moe.top_k}{shared}: {used:.1f} M of {held:.1f} M parameters"),
    ]


def _rank_rows(config: NodeConfig) -> list[tuple[str, str]]:
    parallel = config.parallel
    sizes = f"{parallel.pp} pipeline stages × {parallel.tp} tensor shards"
    rows = [("ranks", f"{parallel.num_ranks}: {sizes}; above is rank 0")]
    for rank in map(_describe_rank, _ranks(config)):
        layer, last_layer = rank["layers"]
        head, last_head = rank["kv_heads"]
        rows.append(
            (
                f"rank {rank['rank']}",
                f"layers {layer} … {last_layer}, KV heads {head} … {last_head}, "
                f"{rank['parameters'] / 1e6:.1f} M parameters, KV {rank['kv_shape']}",
            )
        )
    return rows
