"""From flags to a frozen configuration: ``resolve(options, device)`` fills every "auto" once and says why."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path

import msgspec

from pdserve.errors import CapacityError, ConfigError
from pdserve.hub import resolve_model, weights_fingerprint
from pdserve.kv import DTYPE_BYTES, KVLayout, choose_kernel_block_size
from pdserve.model_config import ModelConfig, load_model_config
from pdserve.oracle import VARIABLE, Decision, decide


class NodeOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What a person asked of a node. ``None`` and "auto" are decided by ``resolve``."""

    model: str  # directory or hub id
    served_model_name: str | None = None
    device: str = "auto"  # auto, cpu, cuda, cuda:N
    dtype: str = "auto"  # auto: the checkpoint's
    max_model_len: int | None = None  # tokens
    block_size: int = 16  # tokens
    kernel_block_size: int | None = None  # tokens
    kv_cache_memory: int | None = None  # bytes
    gpu_memory_utilization: float = 0.9
    attention_backend: str = "auto"
    max_num_seqs: int = 256  # sequences decoding at once
    max_batch_tokens: int = 2048  # tokens of one step
    max_waiting: int = 1024  # requests queued for room; more are refused
    threads: int | None = None  # of torch, on CPU


class DeviceInfo(msgspec.Struct, frozen=True):
    """A device as found: ``kind`` is "cpu" or "cuda", ``memory`` its total bytes."""

    kind: str
    index: int
    name: str
    memory: int


class NodeConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a node's processes must agree on. Sent to the engine process as it is."""

    model_dir: str
    model: ModelConfig
    served_model_name: str
    device: DeviceInfo
    dtype: str
    max_model_len: int
    kv_layout: KVLayout
    attention_backend: str
    decision: Decision
    max_num_seqs: int
    max_batch_tokens: int
    max_waiting: int
    threads: int
    compat_fields: dict[str, str]  # what two nodes must have in common to exchange KV
    choices: tuple[str, ...] = ()  # every "auto", what it became, and why


#: Attention backends and the page sizes they can index; None is any size.
ATTENTION_BACKENDS: dict[str, tuple[int, ...] | None] = {"torch": None}

_CPU_KV_MEMORY = 1 << 30
_CUDA_RESERVE = 2 << 30  # activations and workspaces; a measured profile will replace it


def resolve(options: NodeOptions, device: DeviceInfo, environ: Mapping[str, str] = os.environ) -> NodeConfig:
    """Fill in every "auto". Reads the checkpoint's config and headers, never its weights.

    Raises ConfigError or CapacityError, naming value, limit and remedy.
    """
    _check_ranges(options)
    model_dir = resolve_model(options.model)
    model = load_model_config(model_dir)
    choices: list[str] = []
    dtype = _choose_dtype(options.dtype, model, choices)
    backend = _choose_backend(options.attention_backend, choices)
    page = choose_kernel_block_size(
        options.block_size, options.kernel_block_size, [(backend, ATTENTION_BACKENDS[backend])]
    )
    if options.kernel_block_size is None:
        choices.append(f"kernel_block_size={page}: the largest page of backend {backend!r} that divides block_size")
    one_block = KVLayout(
        num_blocks=1,
        block_size=options.block_size,
        kernel_block_size=page,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        head_dim=model.head_dim,
        dtype=dtype,
    )
    memory = _choose_kv_memory(options, device, model_dir, choices)
    num_blocks = memory // one_block.block_bytes
    layout = msgspec.structs.replace(one_block, num_blocks=num_blocks)
    max_model_len = _choose_max_model_len(options, model, layout, choices)
    threads = options.threads or len(os.sched_getaffinity(0))
    return NodeConfig(
        model_dir=str(model_dir),
        model=model,
        served_model_name=options.served_model_name or model_name(options.model),
        device=device,
        dtype=dtype,
        max_model_len=max_model_len,
        kv_layout=layout,
        attention_backend=backend,
        decision=decide(environ.get(VARIABLE)),
        max_num_seqs=options.max_num_seqs,
        max_batch_tokens=options.max_batch_tokens,
        max_waiting=options.max_waiting,
        threads=threads,
        compat_fields=_compat_fields(model, model_dir, layout),
        choices=tuple(choices),
    )


def _check_ranges(options: NodeOptions) -> None:
    for name in ("block_size", "max_num_seqs", "max_batch_tokens", "max_model_len", "kv_cache_memory", "threads"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} {value} must be at least 1")
    if options.max_waiting < 0:
        raise ConfigError(f"max_waiting {options.max_waiting} must be at least 0")
    if options.max_batch_tokens < options.max_num_seqs:
        raise ConfigError(
            f"max_batch_tokens {options.max_batch_tokens} is less than max_num_seqs {options.max_num_seqs}: "
            "every running sequence needs one token per step; raise the first or lower the second"
        )
    if not 0.0 < options.gpu_memory_utilization <= 1.0:
        raise ConfigError(f"gpu_memory_utilization {options.gpu_memory_utilization} is not within 0 … 1")


def _choose_dtype(requested: str, model: ModelConfig, choices: list[str]) -> str:
    if requested == "auto":
        choices.append(f"dtype={model.dtype}: the checkpoint's")
        return model.dtype
    if requested not in DTYPE_BYTES:
        raise ConfigError(f"dtype {requested!r} is not one of auto, {', '.join(DTYPE_BYTES)}")
    return requested


def _choose_backend(requested: str, choices: list[str]) -> str:
    if requested == "auto":
        choices.append("attention_backend=torch: the only one of this version")
        return "torch"
    if requested not in ATTENTION_BACKENDS:
        raise ConfigError(f"attention_backend {requested!r} is not one of auto, {', '.join(ATTENTION_BACKENDS)}")
    return requested


def _choose_kv_memory(options: NodeOptions, device: DeviceInfo, model_dir: Path, choices: list[str]) -> int:
    """Bytes for the KV cache."""
    if options.kv_cache_memory is not None:
        return options.kv_cache_memory
    if device.kind == "cpu":
        memory = min(_CPU_KV_MEMORY, device.memory // 8)
        choices.append(f"kv_cache_memory={memory}: 1 GiB on a CPU, at most an eighth of the memory")
        return memory
    weights = sum(file.stat().st_size for file in model_dir.glob("*.safetensors"))
    memory = int(device.memory * options.gpu_memory_utilization) - weights - _CUDA_RESERVE
    if memory <= 0:
        raise CapacityError(
            f"{device.name}: {options.gpu_memory_utilization:.0%} of {device.memory} bytes does not hold weights of "
            f"{weights} bytes plus {_CUDA_RESERVE} for a step; use a larger GPU or a smaller model"
        )
    choices.append(f"kv_cache_memory={memory}: {options.gpu_memory_utilization:.0%} of the GPU less weights and steps")
    return memory


def _choose_max_model_len(options: NodeOptions, model: ModelConfig, layout: KVLayout, choices: list[str]) -> int:
    room = layout.num_blocks * layout.block_size
    limit = model.max_position_embeddings
    wanted = options.max_model_len or limit
    if wanted > limit:
        raise ConfigError(f"max_model_len {wanted} exceeds the model's {limit} positions")
    if options.max_model_len is None and room < limit:
        wanted = room
        choices.append(f"max_model_len={room}: what the KV cache holds; the model could do {limit}")
    elif options.max_model_len is None:
        choices.append(f"max_model_len={limit}: the model's")
    if room < max(wanted, 2):
        needed = -(-max(wanted, 2) // layout.block_size) * layout.block_bytes
        raise CapacityError(
            f"a KV cache of {layout.total_bytes} bytes ({layout.num_blocks} blocks, {room} tokens) has no room for one "
            f"sequence of {max(wanted, 2)} tokens; give --kv-cache-memory {needed} or lower --max-model-len"
        )
    return wanted


def model_name(model: str) -> str:
    """What a model is called when nobody gave it a name: the directory's name, or the hub id as it is."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _compat_fields(model: ModelConfig, model_dir: Path, layout: KVLayout) -> dict[str, str]:
    """What must be equal on both sides of a handoff, by name, so that a refusal can say what differs."""
    return {
        "architecture": model.architecture,
        "config": hashlib.sha256(msgspec.json.encode(model, order="sorted")).hexdigest()[:16],
        "weights": weights_fingerprint(model_dir),
        "kv_dtype": layout.dtype,
        "num_layers": str(layout.num_layers),
        "num_kv_heads": str(layout.num_kv_heads),
        "head_dim": str(layout.head_dim),
        "block_size": str(layout.block_size),
        "kernel_block_size": str(layout.kernel_block_size),
    }
