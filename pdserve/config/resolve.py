"""Turn flags into a frozen configuration: ``resolve(options, device)`` decides every "auto" once and logs why."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from itertools import chain
from pathlib import Path

import msgspec

from pdserve.checkpoint.hub import resolve_model
from pdserve.checkpoint.quantized_weights import CheckpointWeights, find_weights
from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.attention_backends import (
    COMMON_PAGES,
    NO_BACKEND,
    Platform,
    check_backend,
    choose_backend,
    choose_page_size,
    find_platform,
)
from pdserve.config.host_kv import check_disk_kv, check_host_kv
from pdserve.config.kv_dtype import choose_kv_dtype, choose_kv_scales, describe_scales
from pdserve.config.library_plans import check_split
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import (
    ALWAYS,
    AUTO,
    EAGLE3,
    LOOKUP,
    MTP,
    OFF,
    SYNTHETIC_SUFFIX,
    NodeOptions,
    check_options,
)
from pdserve.config.parallel import (
    ParallelConfig,
    choose_parallel_config,
    shard_of,
    weight_bytes,
)
from pdserve.config.quantized_layers import (
    check_quantized_at_load,
    keep_quantized,
    kept_doubt,
    kept_problem,
    quantized_at_load,
)
from pdserve.config.runner_oracle import VARIABLE, Decision, Facts, decide, decide_simulated, uses_graphs
from pdserve.config.simulated_costs import KV_TOKENS, SimulatedCosts, choose_costs
from pdserve.config.state_slots import TYPICAL_TOKENS, bytes_per_sequence, choose_slots, most_slots
from pdserve.config.triton_hosts import try_triton
from pdserve.cpus import usable_cpus
from pdserve.errors import CapacityError, ConfigError, shown
from pdserve.kv import DTYPE_BYTES, MAX_BLOCKS, KVLayout, KVScales
from pdserve.model.eagle3 import load_eagle3
from pdserve.model.families import FAMILIES
from pdserve.model.model_config import NATIVE, TRANSFORMERS, ModelConfig, load_model_config
from pdserve.model.pooling import EMBED, GENERATE, SCORE, PoolingConfig, read_pooling
from pdserve.model.text_part import text_headers
from pdserve.model.weight_formats import FP8_AT_LOAD, storage_rules
from pdserve.request_cost import AUTO_ITL_STEPS
from pdserve.rpc.timeouts import PeerTiming
from pdserve.state import LEAST_SLOTS, StateLayout

_CPU_KV_MEMORY = 1 << 30
_CUDA_RESERVE = 2 << 30  # bytes: a guess at activations, workspaces and graphs, until the runner has measured them
# A larger step fills a GPU better, a smaller one holds others up less.
_BATCH_TOKENS = {"cpu": 2048, "cuda": 8192, "simulated": 8192}
_STAGED_BATCH_TOKENS = {"cpu": 512, "cuda": 2048}  # the second stage has nothing to do before the first step's end

_IMPL_REASONS = {NATIVE: "its architecture has native layers", TRANSFORMERS: "its architecture has no native layers"}


def resolve(
    options: NodeOptions, device: DeviceInfo, environ: Mapping[str, str] = os.environ, platform: Platform | None = None
) -> NodeConfig:
    """Fill in every "auto". Reads the checkpoint's config and headers, never its weights.

    ``platform`` defaults to this process's. Raises ConfigError or CapacityError: value, limit and remedy.
    """
    check_options(options)
    model_dir = resolve_model(options.model, weights=options.reads_weights)
    pooling = _choose_pooling(options, model_dir)
    model = load_model_config(model_dir, options.model_impl, embeds=pooling is not None and pooling.task == EMBED)
    model = quantized_at_load(model, options.quantization)
    platform = platform or _try_platform(options, device, environ, model)
    choices = [f"model_impl={model.impl}: {_IMPL_REASONS[model.impl]}"] if options.model_impl == "auto" else []
    if model.multimodal:
        choices.append(f"model=text: the text model of {model.multimodal}; images are refused")
    if model.unread_fields:
        choices.append(f"config.json: {', '.join(map(shown, model.unread_fields))} without effect, as in transformers")
    dtype = _choose_dtype(options.dtype, model, choices)
    backend = _choose_backend(options, platform, dtype, model, environ.get(VARIABLE) == "0", choices)
    parallel = choose_parallel_config(model, options.pp, options.tp, options.stage_layers, options.ep)
    weights = _find_weights(model, model_dir) if options.reads_weights else None
    problem = kept_problem(model, parallel, *((weights.plain, weights.quantized) if weights else ()))
    quantization = problem, kept_doubt(model, dtype, device.name, device.capability)
    decision = _choose_runner(options, platform, model, backend, pooling, quantization, environ.get(VARIABLE))
    check_quantized_at_load(model, decision)
    compat_model, model = msgspec.structs.replace(model, unread_fields=()), keep_quantized(model, decision)
    speculate, model = _choose_speculation(options, model, model_dir, parallel, pooling, choices)
    if model.impl == TRANSFORMERS and parallel.num_ranks > 1:
        choices.append(check_split(model_dir, model.architecture, parallel))
    draft_dir = resolve_model(options.draft_head, weights=options.reads_weights) if options.draft_head else None
    if draft_dir is not None:
        speculate, model = EAGLE3, _with_draft_head(options, model, draft_dir, pooling)
    kv_dtype = choose_kv_dtype(options, device, model, dtype, choices)
    kv_scales = choose_kv_scales(options, model_dir, model, kv_dtype, choices)
    _check_state_options(options, model, parallel, speculate)
    layout, states = _choose_layouts(options, device, model, parallel, (dtype, kv_dtype), backend, choices)
    max_batch_tokens = _choose_batch_tokens(options, device, parallel, choices)
    if model.weight_format == FP8_AT_LOAD:
        choices.append("weights=FP8: linear layers and experts are quantized when loaded, with a scale per output")
    if weights is not None and weights.quantized:
        choices.append(f"weights={weights.memory_cost(model.weight_format, dtype, model.keeps_quantized)}")
    config = NodeConfig(
        model_dir=str(model_dir),
        model=model,
        served_model_name=_choose_name(options, choices),
        device=device,
        dtype=dtype,
        load_format=options.load_format,
        load_from=options.load_from,
        weight_peers=options.weight_peers,
        max_model_len=_choose_max_model_len(
            options, model, (layout, states), max_batch_tokens, _measures(options, device), choices
        ),
        parallel=parallel,
        kv_layout=layout,
        state_layout=states,
        state_slots=options.state_slots,
        kv_scales=kv_scales,
        kv_checksum=options.kv_checksum != "off" and not options.simulated,
        kv_connector=kv_connector_of(options),
        host_kv_memory=options.host_kv_memory or 0,
        disk_kv="" if options.disk_kv is None else str(Path(options.disk_kv).absolute()),
        disk_kv_size=options.disk_kv_size or 0,
        measure_kv_memory=_measures(options, device),
        gpu_memory_utilization=options.memory_share,
        attention_backend=backend,
        decision=decision,
        cuda_graphs=_choose_cuda_graphs(options, platform, decision, choices),
        max_num_seqs=options.max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        itl_target=_choose_itl_target(options, choices),
        max_waiting=options.max_waiting,
        threads=options.threads or usable_cpus(),
        peer_timing=PeerTiming(options.peer_timeout),
        costs=_choose_costs(options, choices),
        sim_crash_token=options.sim_crash_token,
        synthetic_acceptance=options.synthetic_acceptance,
        speculate=speculate,
        draft_dir="" if draft_dir is None else str(draft_dir),
        always_draft=options.speculate_when == ALWAYS,
        max_drafts=0 if options.speculate == AUTO and speculate == OFF else options.max_drafts,
        compat_fields=_compat_fields(compat_model, options, layout, dtype, kv_scales)
        | {"task": GENERATE if pooling is None else pooling.task},
        choices=tuple(choices),
        pooling=pooling,
        triton_problem=platform.triton_problem or "",
    )
    if not config.host_kv_memory:
        return config
    kept = [f"host_kv_memory={config.host_kv_memory}: {check_host_kv(config)}"]
    if config.disk_kv:
        kept.append(f"disk_kv={config.disk_kv}: {check_disk_kv(config)}")
    return msgspec.structs.replace(config, choices=(*config.choices, *kept))


def _choose_name(options: NodeOptions, choices: list[str]) -> str:
    """Return the name in the API. It tells that answers mean nothing."""
    name = options.served_model_name or model_name(options.model)
    if options.synthetic_acceptance is None or options.simulated or name.endswith(SYNTHETIC_SUFFIX):
        return name
    choices.append(f"served_model_name={name}{SYNTHETIC_SUFFIX}: drafts become tokens, whatever the model samples")
    return name + SYNTHETIC_SUFFIX


def kv_connector_of(options: NodeOptions) -> str:
    """Return the name of the connector back end, or its module:Class."""
    if options.kv_connector != "auto":
        return options.kv_connector
    return "simulated" if options.simulated else "nixl"


def _choose_pooling(options: NodeOptions, model_dir: Path) -> PoolingConfig | None:
    if options.simulated:
        return None
    pooling = read_pooling(model_dir, options.task)
    if pooling is not None and options.pp > 1:
        raise ConfigError(f"pp {options.pp}: task {pooling.task} runs on one pipeline stage; use --tp")
    if pooling is not None and pooling.method == SCORE and options.tp > 1:
        raise ConfigError(f"tp {options.tp}: a sequence classifier runs on one rank")
    return pooling


def _try_platform(options: NodeOptions, device: DeviceInfo, environ: Mapping[str, str], model: ModelConfig) -> Platform:
    """Return the platform of this process; where Triton may be used, after a kernel has been tried."""
    found = find_platform(device.kind, environ)
    if options.simulated or model.impl == TRANSFORMERS or found.triton_problem:
        return found
    return msgspec.structs.replace(found, triton_error=try_triton(device, found.interpreted))


def _choose_dtype(requested: str, model: ModelConfig, choices: list[str]) -> str:
    if requested == "auto":
        choices.append(f"dtype={model.dtype}: the checkpoint's")
        return model.dtype
    if requested not in DTYPE_BYTES:
        raise ConfigError(f"dtype {requested!r} is not one of auto, {', '.join(DTYPE_BYTES)}")
    return requested


def _choose_backend(
    options: NodeOptions, platform: Platform, dtype: str, model: ModelConfig, v1_forced: bool, choices: list[str]
) -> str:
    if options.simulated:
        return NO_BACKEND
    if model.impl == TRANSFORMERS:
        if options.attention_backend not in ("auto", "torch"):
            raise ConfigError(
                f"attention_backend {options.attention_backend!r} is for native models; {model.architecture} runs "
                "through transformers. Choose auto or torch"
            )
        choices.append("attention_backend=torch: it has all that a layer of transformers may ask for")
        return "torch"
    if options.attention_backend != "auto":
        check_backend(options.attention_backend, platform, dtype, model.head_dim, model.attention, model.latent)
        return options.attention_backend
    backend, reason = choose_backend(platform, dtype, model.head_dim, model.attention, v1_forced, model.latent)
    choices.append(f"attention_backend={backend}: {reason}")
    return backend


def _choose_runner(
    options: NodeOptions,
    platform: Platform,
    model: ModelConfig,
    backend: str,
    pooling: PoolingConfig | None,
    quantization: tuple[str, str],
    variable: str | None,
) -> Decision:
    """``quantization``: why V2 cannot keep quantized weights, and why it may be slower with them."""
    if options.simulated:
        return decide_simulated(variable)
    problem, doubt = quantization
    facts = Facts(
        architecture=model.architecture,
        platform=platform,
        attention_backend=backend,
        head_dim=model.head_dim if model.latent is None else model.latent.kv_lora_rank,
        model_impl=model.impl,
        rope_type=model.rope.rope_type,
        cuda_graphs=options.cuda_graphs,
        runner_type=GENERATE if pooling is None else pooling.task,
        quantization_problem=problem,
        quantization_doubt=doubt,
    )
    return decide(facts, variable)


def _choose_costs(options: NodeOptions, choices: list[str]) -> SimulatedCosts | None:
    if not options.simulated:
        return None
    costs = choose_costs(options.sim_costs, options.sim_speed)
    choices.append(f"sim_costs={costs}: seconds, at sim_speed {options.sim_speed:g}")
    return costs


def _check_state_options(options: NodeOptions, model: ModelConfig, parallel: ParallelConfig, speculate: str) -> None:
    if model.state is None and options.state_slots is not None:
        raise ConfigError(
            f"state_slots {options.state_slots}: {model.architecture} has no recurrent layers; remove the option"
        )
    drafts = speculate != OFF or options.synthetic_acceptance is not None
    if drafts and (problem := _split_states_problem(model, parallel)):
        option = f"speculate {speculate}"
        if options.synthetic_acceptance is not None:
            option = f"synthetic_acceptance {options.synthetic_acceptance:g}"
        raise ConfigError(f"{option}: {problem}. Remove the option, or use tp in place of pp")


def _split_states_problem(model: ModelConfig, parallel: ParallelConfig) -> str:
    """Say why the stages of a model cannot verify drafts; empty if they can."""
    if model.state is None or parallel.pp == 1:
        return ""
    return (
        f"{model.architecture} has recurrent layers, and with pp {parallel.pp} its first stages learn too late which "
        "drafts their states go on by"
    )


def _choose_speculation(
    options: NodeOptions,
    model: ModelConfig,
    model_dir: Path,
    parallel: ParallelConfig,
    pooling: PoolingConfig | None,
    choices: list[str],
) -> tuple[str, ModelConfig]:
    """Return where drafts come from, and the model with the layer that makes them, if any does."""
    if options.speculate not in (AUTO, MTP):
        return options.speculate, model
    problem = _draft_layer_problem(options, model, model_dir, pooling)
    if options.speculate == AUTO:
        chosen = LOOKUP if problem else MTP
        if split := _split_states_problem(model, parallel):
            chosen, problem = OFF, split
        if pooling is not None:
            chosen = OFF
        choices.append(f"speculate={chosen}: {problem or 'the checkpoint has a layer that predicts further tokens'}")
        return chosen, model.with_draft_layers(int(chosen == MTP))
    if problem:
        raise ConfigError(f"speculate {MTP}: {problem}. Use lookup or off")
    return MTP, model.with_draft_layers(1)


def _draft_layer_problem(
    options: NodeOptions, model: ModelConfig, model_dir: Path, pooling: PoolingConfig | None
) -> str:
    """Say why no layer of the model can make drafts; empty if one can."""
    if pooling is not None:
        return f"a node with task {pooling.task} generates nothing"
    if not model.predictor:
        able = ", ".join(name for name, family in FAMILIES.items() if family.predictor)
        return f"{model.architecture} has no layer here that predicts further tokens; {able} may have one"
    if not model.num_nextn_layers:
        return (
            "config.json names no layer that predicts further tokens (num_nextn_predict_layers, mtp_num_hidden_layers)"
        )
    if problem := _further_layer_problem(model):
        return problem
    stored = chain.from_iterable(read_headers(model_dir).values()) if options.reads_weights else (model.predictor,)
    if not any(name.startswith(model.predictor) for name in stored):
        return f"the checkpoint has no tensors {model.predictor}…, although config.json names such a layer"
    return ""


def _further_layer_problem(model: ModelConfig) -> str:
    """Return why no layer can follow the model's layers; empty if one can."""
    if any(spec.window for spec in model.attention):
        return "layers of this model have sliding windows, and a draft layer would need a KV cache group of its own"
    if model.rope.rope_type == "dynamic":
        return "rotary frequencies of this model depend on the length of a sequence"
    return ""


def _with_draft_head(
    options: NodeOptions, model: ModelConfig, draft_dir: Path, pooling: PoolingConfig | None
) -> ModelConfig:
    """Return the model with the head in ``draft_dir``. Raises ConfigError unless it can make drafts."""
    if pooling is not None:
        problem = f"a node with task {pooling.task} generates nothing"
    elif model.impl == TRANSFORMERS:
        problem = f"{model.architecture} runs through transformers, which gives no auxiliary hidden states"
    elif model.latent is not None or model.state is not None:
        kind = "latents" if model.latent is not None else "recurrent states"
        problem = f"{model.architecture} keeps {kind}, and a head keys and values"
    else:
        problem = _further_layer_problem(model)
    if problem:
        raise ConfigError(f"speculate {options.speculate}: {problem}. Use lookup or off")
    head = load_eagle3(draft_dir, model.sizes_for_head, weights=options.reads_weights)
    if head.intermediate_size % options.tp:
        raise ConfigError(
            f"tp {options.tp} does not divide the intermediate_size of {draft_dir}, {head.intermediate_size}; choose a "
            "divisor"
        )
    return model.with_draft_layers(1, head)


def _choose_layouts(
    options: NodeOptions,
    device: DeviceInfo,
    model: ModelConfig,
    parallel: ParallelConfig,
    dtypes: tuple[str, str],
    backend: str,
    choices: list[str],
) -> tuple[KVLayout, StateLayout | None]:
    """Choose rank 0's layouts of KV and of recurrent state.

    All ranks have as many blocks and slots, so the rank with the largest ones limits their numbers. ``dtypes`` are the
    model's and the cache's.
    """
    dtype, kv_dtype = dtypes
    page = choose_page_size(options.block_size, options.kernel_block_size, backend)
    if options.kernel_block_size is None:
        able = "every backend" if page in COMMON_PAGES else f"backend {backend}"
        choices.append(f"kernel_block_size={page}: the largest page of {able} that divides block_size")
    groups = model.kv_cache_groups
    stages = [groups.block_layers(share.layers) for share in parallel.shares(model)]
    if groups.num_groups > 1:
        padding = groups.num_groups * groups.block_layers(range(model.num_layers)) - model.num_layers
        choices.append(f"kv_groups={groups.num_groups}: {groups}; {padding} layers are padding")
    one_block = KVLayout(
        num_blocks=1,
        block_size=options.block_size,
        kernel_block_size=page,
        num_layers=stages[0],
        spec=shard_of(model, parallel.position(0)).kv_cache_spec(kv_dtype),
        groups=groups,
    )
    states = _one_slot(model, parallel, dtype)
    if options.simulated and options.kv_cache_memory is None:
        choices.append(f"kv_cache_memory: for {KV_TOKENS} tokens, as of an 8B model on an H200")
        num_blocks = max(1, KV_TOKENS // options.block_size) * max(1, groups.windows.count(None))
        if states is not None:
            memory = KV_TOKENS // TYPICAL_TOKENS * bytes_per_sequence(one_block, states)
            num_slots = _choose_state_slots(options, memory, [(one_block, states)], choices)
            states = msgspec.structs.replace(states, num_slots=num_slots)
        return msgspec.structs.replace(one_block, num_blocks=num_blocks), states
    weights = max(weight_bytes(model, parallel.position(rank), dtype) for rank in range(parallel.num_ranks))
    memory = _choose_kv_memory(options, device, weights, choices)
    blocks = [msgspec.structs.replace(one_block, num_layers=layers) for layers in stages[:: parallel.tp]]
    rest = [memory] * parallel.pp  # bytes left for KV blocks, by stage
    if states is not None:
        counts = [share.num_layers for share in parallel.state_shares(model)[:: parallel.tp]]
        slots = [msgspec.structs.replace(states, num_layers=layers) for layers in counts]
        num_slots = _choose_state_slots(options, memory, list(zip(blocks, slots, strict=True)), choices)
        states = msgspec.structs.replace(states, num_slots=num_slots)
        rest = [memory - num_slots * each.slot_bytes for each in slots]
    fitting = [max(room, 0) // each.block_bytes for room, each in zip(rest, blocks, strict=True)]
    return msgspec.structs.replace(one_block, num_blocks=min(*fitting, MAX_BLOCKS)), states


def _one_slot(model: ModelConfig, parallel: ParallelConfig, dtype: str) -> StateLayout | None:
    """Return rank 0's layout of recurrent state with one slot; None for a model without any."""
    spec, shares = shard_of(model, parallel.position(0)).state_spec(dtype), parallel.state_shares(model)
    return None if spec is None else StateLayout(num_slots=1, num_layers=shares[0].num_layers, spec=spec)


def _choose_state_slots(
    options: NodeOptions, memory: int, stages: list[tuple[KVLayout, StateLayout]], choices: list[str]
) -> int:
    """``stages`` have one block and one slot each."""
    if options.state_slots is not None:
        return options.state_slots
    found = min(choose_slots(memory, *each, options.max_num_seqs) for each in stages)
    choices.append(
        f"state_slots={found}: sequences of {TYPICAL_TOKENS} tokens that fit beside their KV, within {LEAST_SLOTS} … "
        f"{most_slots(options.max_num_seqs)}; {max(slot.slot_bytes for _, slot in stages)} bytes each"
    )
    return found


def _measures(options: NodeOptions, device: DeviceInfo) -> bool:
    return device.kind == "cuda" and options.kv_cache_memory is None


def _choose_kv_memory(options: NodeOptions, device: DeviceInfo, weights: int, choices: list[str]) -> int:
    """Return the bytes of the KV cache beside ``weights`` bytes of weights."""
    if options.kv_cache_memory is not None:
        return options.kv_cache_memory
    if device.kind == "cpu":
        memory = min(_CPU_KV_MEMORY, device.memory // 8)
        choices.append(f"kv_cache_memory={memory}: 1 GiB on a CPU, at most an eighth of the memory")
        return memory
    memory = int(device.memory * options.memory_share) - weights - _CUDA_RESERVE
    if memory <= 0:
        raise CapacityError(
            f"{device.name}: {options.memory_share:.0%} of {device.memory} bytes does not hold weights of "
            f"{weights} bytes plus {_CUDA_RESERVE} for a step; use a larger GPU or a smaller model"
        )
    choices.append(
        f"kv_cache_memory={memory}: an estimate, {options.memory_share:.0%} of the GPU less weights and "
        "steps; at start the runner measures both and takes what is left"
    )
    return memory


def _choose_max_model_len(
    options: NodeOptions,
    model: ModelConfig,
    layouts: tuple[KVLayout, StateLayout | None],
    max_batch_tokens: int,
    estimated: bool,
    choices: list[str],
) -> int:
    """Return tokens. From an ``estimated`` cache take nine tenths, because the measured one must hold them."""
    layout, states = layouts
    limit = model.max_position_embeddings
    room = layout.longest(max_batch_tokens, limit)
    wanted = options.max_model_len or limit
    if wanted > limit:
        raise ConfigError(f"max_model_len {wanted} exceeds the model's {limit} positions")
    sure = room * 9 // 10 if estimated else room
    if options.max_model_len is None and sure < limit:
        wanted = sure
        choices.append(f"max_model_len={sure}: what the KV cache surely holds; the model's limit is {limit}")
    elif options.max_model_len is None:
        choices.append(f"max_model_len={limit}: the model's")
    if room < max(wanted, 2):
        longest = max(options.max_model_len or limit, 2)
        needed = layout.blocks_for(longest, max_batch_tokens) * layout.block_bytes
        if states is not None:  # ``choose_slots`` takes a slot for every few tokens
            beside = options.state_slots or LEAST_SLOTS + longest // TYPICAL_TOKENS
            needed += beside * states.slot_bytes
        raise CapacityError(
            f"a KV cache of {layout.total_bytes} bytes ({layout.num_blocks} blocks, {room} tokens) has no room for one "
            f"sequence of {max(wanted, 2)} tokens; give --kv-cache-memory {needed} for {longest} tokens, or "
            "--max-model-len N for fewer"
        )
    return wanted


def _choose_cuda_graphs(options: NodeOptions, platform: Platform, decision: Decision, choices: list[str]) -> bool:
    """``decide`` has refused "on" where there are none."""
    if options.cuda_graphs != "auto":
        return options.cuda_graphs == "on"
    possible = uses_graphs(decision, platform)
    choices.append(f"cuda_graphs={'on: V2 on a GPU' if possible else 'off: only V2 on a GPU captures them'}")
    return possible


def _choose_batch_tokens(options: NodeOptions, device: DeviceInfo, parallel: ParallelConfig, choices: list[str]) -> int:
    if options.max_batch_tokens is not None:
        return options.max_batch_tokens
    usual = (_BATCH_TOKENS if parallel.pp == 1 else _STAGED_BATCH_TOKENS)[device.kind]
    least = options.max_num_seqs * (1 + options.max_drafts)
    tokens = max(usual, least)
    where = "on a simulated device" if options.simulated else f"on a {device.kind.upper()} device"
    if parallel.pp > 1:
        where += ", so that pipeline stages compute parts of one prompt at the same time"
    choices.append(f"max_batch_tokens={tokens}: {usual} {where}, and at least {least} for max_num_seqs")
    return tokens


def _choose_itl_target(options: NodeOptions, choices: list[str]) -> float | None:
    if options.itl_target is not None:
        return options.itl_target / 1e3
    steps = f"{AUTO_ITL_STEPS:g} times the measured decode step of one sequence"
    choices.append(f"itl_target=auto: {steps}, so that prompts beside few decodes take 9/8 of their time")
    return None


def _find_weights(model: ModelConfig, model_dir: Path) -> CheckpointWeights | None:
    """Read the headers of the weights, so that broken files are found before anything starts."""
    headers = read_headers(model_dir)
    headers = text_headers(headers) if model.multimodal else headers
    rules = storage_rules(model.weight_format, model.quantization)
    return None if rules is None else find_weights(model_dir, headers, rules)


def model_name(model: str) -> str:
    """Return the default served name: the directory's name, or the hub id."""
    path = Path(model)
    return path.resolve().name if path.exists() else model


def _config_hash(model: ModelConfig) -> str:
    """Return a hash of the model's configuration."""
    return hashlib.sha256(msgspec.json.encode(model, order="sorted")).hexdigest()[:16]


def _compat_fields(
    model: ModelConfig, options: NodeOptions, layout: KVLayout, dtype: str, kv_scales: tuple[KVScales, ...]
) -> dict[str, str]:
    """Return the fields that must be equal on both sides of a handoff; ``config_with_weights.py`` adds the weights.

    A simulated node has no KV to read, so ``weights`` keeps it from being paired with a real one.
    """
    state = model.state_spec(dtype)
    return {
        "architecture": model.architecture,
        "model_impl": model.impl,
        "config": _config_hash(model),
        "weights": "simulated" if options.simulated else "dummy" if not options.reads_weights else "checkpoint",
        **model.kv_cache_spec(layout.dtype).compat_fields,
        **({} if state is None else state.compat_fields),
        "kv_scales": describe_scales(kv_scales),
        "num_layers": str(model.num_layers),
        "kv_groups": str(layout.groups),
        "block_size": str(layout.block_size),
        "kv_checksum": options.kv_checksum or "on",
        "kv_connector": kv_connector_of(options),
    }
