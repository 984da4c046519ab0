"""Turn options into a frozen configuration: ``resolve`` decides every "auto" once.

Here is the order of the decisions. The functions that decide are in ``resolution/``, by subject; each returns a value
with its reason.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from pdserve.checkpoint.hub import resolve_model
from pdserve.checkpoint.quantized_weights import CheckpointWeights, find_weights
from pdserve.checkpoint.weight_files import read_headers
from pdserve.config.attention_backends import Platform, flashinfer_kernels, patch_kernel
from pdserve.config.kernels.flashinfer_hosts import compiler_problem, missing_kernels, with_compiled_kernels
from pdserve.config.library_plans import check_split
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import AUTO, MTP, OFF, SYNTHETIC_SUFFIX, NodeOptions, check_options, model_name
from pdserve.config.parallel import choose_parallel_config
from pdserve.config.resolution.adapters import choose_adapters
from pdserve.config.resolution.at_load import check_quantized_at_load, quantized_at_load
from pdserve.config.resolution.compat_fields import compat_fields_of
from pdserve.config.resolution.drafts import check_drafts, choose_draft_source, with_draft_head
from pdserve.config.resolution.host_kv import check_disk_kv, check_host_kv
from pdserve.config.resolution.images import choose_images, with_whole_images
from pdserve.config.resolution.kernels import (
    QuantizationLimits,
    choose_attention_backend,
    choose_cuda_graphs,
    choose_dtype,
    choose_runner,
    try_platform,
)
from pdserve.config.resolution.kv_dtype import choose_kv_dtype, choose_kv_scales
from pdserve.config.resolution.kv_layouts import (
    blocks_that_fit,
    check_state_slots,
    choose_kv_memory,
    choose_num_slots,
    choose_page,
    measures_kv_memory,
    padding_of_groups,
    units_of_stages,
)
from pdserve.config.resolution.limits import (
    choose_batch_tokens,
    choose_itl_target,
    choose_max_model_len,
    choose_max_num_seqs,
)
from pdserve.config.resolution.quantized_layers import (
    KeptLayers,
    keep_layers,
    keep_quantized,
    kept_doubt,
    kept_problem,
)
from pdserve.config.resolution.resolved import Reasons, Resolved
from pdserve.config.runner_oracle import VARIABLE
from pdserve.config.simulated_costs import SimulatedCosts, choose_costs
from pdserve.errors import ConfigError, shown
from pdserve.host.cpus import usable_cpus
from pdserve.kv.layout import FP8_E4M3
from pdserve.model.model_config import NATIVE, TRANSFORMERS, ModelConfig, load_model_config
from pdserve.model.pooling import EMBED, SCORE, PoolingConfig, read_pooling
from pdserve.model.quantization.at_load import AT_LOAD_NOTES, is_at_load
from pdserve.model.quantization.weight_formats import storage_rules
from pdserve.model.text_part import text_headers

_IMPL_REASONS = {NATIVE: "its architecture has native layers", TRANSFORMERS: "its architecture has no native layers"}


def resolve(
    options: NodeOptions,
    device: DeviceInfo,
    environ: Mapping[str, str] = os.environ,
    platform: Platform | None = None,
    locate: Callable[[str, bool], Path] = resolve_model,
    encodes: bool = True,
) -> NodeConfig:
    """Fill in every "auto". Reads the checkpoint's config and headers, never its weights.

    ``platform`` defaults to this process's, whose kernels are tried or looked up; all kernels of another run.
    ``locate`` returns the directory of a model, with its weights or without; ``resolve_headers`` spares their download.
    ``encodes`` is whether the node's role computes prompts, and so encodes their images.
    Raises ConfigError or CapacityError: value, limit and remedy.
    """
    check_options(options)
    reasons = Reasons()
    model_dir = locate(options.model, options.reads_weights)
    pooling = _choose_pooling(options, model_dir)
    model = load_model_config(model_dir, options.model_impl, embeds=pooling is not None and pooling.task == EMBED)
    model = quantized_at_load(model, options.quantization)
    tries_compilers = platform is None
    platform = platform or try_platform(options, device, environ, model)
    _note_model(options, model, reasons)

    dtype = reasons.take("dtype", choose_dtype(options, model))
    v1_forced = environ.get(VARIABLE) == "0"
    backend = reasons.take("attention_backend", choose_attention_backend(options, platform, dtype, model, v1_forced))
    parallel = choose_parallel_config(model, options.pp, options.tp, options.stage_layers, options.ep)
    images = reasons.take("images", choose_images(options, model_dir, model, pooling, parallel, dtype, encodes))
    weights = stored_weights(model, model_dir) if options.reads_weights else None
    kept = keep_layers(model, parallel, weights)
    quantization = QuantizationLimits(
        problem=kept_problem(model, parallel, kept, weights.plain if weights else ()),
        doubt=kept_doubt(model, kept, dtype, device),
    )
    decision = choose_runner(options, platform, model, backend, pooling, quantization, environ.get(VARIABLE))
    check_quantized_at_load(model, decision)
    compat_model = msgspec.structs.replace(model, unread_fields=())
    model = keep_quantized(model, decision, kept, dtype)

    speculate = reasons.take("speculate", choose_draft_source(options, model, model_dir, parallel, pooling))
    if speculate == MTP:
        model = model.with_draft_layers(1)
    if model.impl == TRANSFORMERS and parallel.num_ranks > 1:
        reasons.note(check_split(model_dir, model.architecture, parallel))
    draft_dir = locate(options.draft_head, options.reads_weights) if options.draft_head else None
    if draft_dir is not None:
        model = with_draft_head(options, model, draft_dir, pooling)

    kv_dtype = reasons.take("kv_cache_dtype", choose_kv_dtype(options, device, model, dtype))
    kv_scales = reasons.take("kv_scales", choose_kv_scales(options, model_dir, model, kv_dtype))
    check_state_slots(options, model)
    check_drafts(options, model, parallel, speculate)
    page = reasons.take("kernel_block_size", choose_page(options, backend))
    reasons.note(padding_of_groups(model))
    units = units_of_stages(options, model, parallel, page, dtype, kv_dtype)
    kv_memory = choose_kv_memory(options, device, model, parallel, dtype, units, images.memory)
    memory = reasons.take("kv_cache_memory", kv_memory)
    max_num_seqs = reasons.take("max_num_seqs", choose_max_num_seqs(options, device, parallel, memory, units))
    num_slots = reasons.take("state_slots", choose_num_slots(options, max_num_seqs, memory, units))
    kv = units[0].resized(blocks_that_fit(options, memory, num_slots, units), num_slots)
    measured = measures_kv_memory(options, device)

    max_batch_tokens = reasons.take("max_batch_tokens", choose_batch_tokens(options, device, parallel, max_num_seqs))
    _note_weights(model, weights, kept, dtype, reasons)
    served_model_name = reasons.take("served_model_name", _choose_name(options))
    max_model_len = reasons.take(
        "max_model_len", choose_max_model_len(options, model, kv, max_batch_tokens, estimated=measured)
    )
    images = reasons.take(
        "images", with_whole_images(images, options, model, max_batch_tokens, max_num_seqs, max_model_len)
    )
    cuda_graphs = reasons.take("cuda_graphs", choose_cuda_graphs(options, platform, decision))
    itl_target = reasons.take("itl_target", choose_itl_target(options))
    costs = reasons.take("sim_costs", _choose_costs(options))
    adapters = reasons.take("adapters", choose_adapters(options, model, pooling))
    config = NodeConfig(
        options=options,
        model_dir=str(model_dir),
        model=model,
        pooling=pooling,
        served_model_name=served_model_name,
        device=device,
        dtype=dtype,
        random_weights=options.load_format == "dummy",
        parallel=parallel,
        decision=decision,
        attention_backend=backend,
        cuda_graphs=cuda_graphs,
        triton_problem=platform.triton_problem or "",
        kv_layout=kv.layout,
        state_layout=kv.states,
        kv_scales=kv_scales,
        measure_kv_memory=measured,
        disk_kv="" if options.disk_kv is None else str(Path(options.disk_kv).absolute()),
        max_model_len=max_model_len,
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        itl_target=itl_target,
        threads=options.threads or usable_cpus(),
        costs=costs,
        adapters=adapters,
        speculate=speculate,
        draft_dir="" if draft_dir is None else str(draft_dir),
        max_drafts=0 if options.speculate == AUTO and speculate == OFF else options.max_drafts,
        compat_fields=compat_fields_of(options, compat_model, pooling, kv.layout, dtype, kv_scales),
        choices=tuple(reasons.lines),
    )
    if tries_compilers:
        config = _with_compiled_kernels(config, environ)
    return _with_tiers_checked(images.within(config))


def _choose_pooling(options: NodeOptions, model_dir: Path) -> PoolingConfig | None:
    if options.simulated:
        return None
    pooling = read_pooling(model_dir, options.task)
    if pooling is not None and options.pp > 1:
        raise ConfigError(f"pp {options.pp}: task {pooling.task} runs on one pipeline stage; use --tp")
    if pooling is not None and pooling.method == SCORE and options.tp > 1:
        raise ConfigError(f"tp {options.tp}: a sequence classifier runs on one rank")
    return pooling


def _with_compiled_kernels(config: NodeConfig, environ: Mapping[str, str]) -> NodeConfig:
    """Return the configuration for a start that waits for no compiler, unless the user has named the backend."""
    if config.options.attention_backend != AUTO or config.attention_backend != "flashinfer":
        return config
    assert config.device.capability is not None
    kernels = flashinfer_kernels(config.model, config.dtype, config.kv_layout.dtype == FP8_E4M3)
    vision = config.model.vision
    if config.has_tower and vision is not None:
        of_patches = patch_kernel(vision.head_dim, config.dtype, config.device.capability)
        kernels = tuple(dict.fromkeys((*kernels, *([of_patches] if of_patches else []))))
    missing = missing_kernels(kernels, config.device.capability, environ)
    return with_compiled_kernels(config, missing, compiler_problem(environ) if missing else "")


def _note_model(options: NodeOptions, model: ModelConfig, reasons: Reasons) -> None:
    if options.model_impl == "auto":
        reasons.note(f"model_impl={model.impl}: {_IMPL_REASONS[model.impl]}")
    if model.multimodal:
        reasons.note(f"model=text: the text model of {model.multimodal}")
    if model.unread_fields:
        fields = ", ".join(map(shown, model.unread_fields))
        reasons.note(f"config.json: {fields} without effect, as in transformers")


def stored_weights(model: ModelConfig, model_dir: Path) -> CheckpointWeights | None:
    """Read the headers of the weights, so that broken files are found before anything starts."""
    headers = read_headers(model_dir)
    headers = text_headers(headers) if model.multimodal else headers
    rules = storage_rules(model.weight_format, model.quantization)
    return None if rules is None else find_weights(model_dir, headers, rules)


def _note_weights(
    model: ModelConfig, weights: CheckpointWeights | None, kept: KeptLayers, dtype: str, reasons: Reasons
) -> None:
    if is_at_load(model.weight_format):
        reasons.note(f"weights={AT_LOAD_NOTES[model.weight_format]}")
    if weights is not None and weights.quantized:
        reasons.note(f"weights={weights.memory_cost(model.weight_format, dtype, model.keeps_quantized)}")
    if model.keeps_quantized:
        for note in kept.notes(dtype, model.weight_format):
            reasons.note(note)


def _choose_name(options: NodeOptions) -> Resolved[str]:
    """Return the name in the API. It tells that answers mean nothing."""
    name = options.served_model_name or model_name(options.model)
    if options.synthetic_acceptance is None or options.simulated or name.endswith(SYNTHETIC_SUFFIX):
        return Resolved(name)
    return Resolved(name + SYNTHETIC_SUFFIX, "drafts become tokens, whatever the model samples")


def _choose_costs(options: NodeOptions) -> Resolved[SimulatedCosts | None]:
    if not options.simulated:
        return Resolved(None)
    costs = choose_costs(options.sim_costs, options.sim_speed)
    return Resolved(costs, f"seconds, at sim_speed {options.sim_speed:g}")


def _with_tiers_checked(config: NodeConfig) -> NodeConfig:
    """Return the configuration with the sizes of host memory and disk among its reasons."""
    options = config.options
    if options.host_kv_memory is None:
        return config
    lines = [f"host_kv_memory={options.host_kv_memory}: {check_host_kv(config)}"]
    if config.disk_kv:
        lines.append(f"disk_kv={config.disk_kv}: {check_disk_kv(config)}")
    return msgspec.structs.replace(config, choices=(*config.choices, *lines))
