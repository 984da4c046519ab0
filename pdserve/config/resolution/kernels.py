"""Choose what computes a node's steps: dtype, attention back end, runner and CUDA graphs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from pdserve.config.attention_backends import NO_BACKEND, Platform, check_backend, choose_backend, find_platform
from pdserve.config.kernels.triton_hosts import try_triton
from pdserve.config.node_config import DeviceInfo
from pdserve.config.node_options import NodeOptions
from pdserve.config.resolution.resolved import Resolved
from pdserve.config.runner_oracle import Decision, Facts, decide, decide_simulated, uses_graphs
from pdserve.errors import ConfigError
from pdserve.kv.layout import DTYPE_BYTES
from pdserve.model.model_config import TRANSFORMERS, ModelConfig
from pdserve.model.pooling import GENERATE, PoolingConfig


class QuantizationLimits(msgspec.Struct, frozen=True):
    """Why runner V2 should not get quantized weights. A reason is empty if it does not apply."""

    problem: str = ""  # why it cannot keep them quantized
    doubt: str = ""  # why it may be slower with them


def try_platform(options: NodeOptions, device: DeviceInfo, environ: Mapping[str, str], model: ModelConfig) -> Platform:
    """Return the platform of this process; where Triton may be used, after a kernel has been tried."""
    platform = find_platform(device.kind, environ)
    if options.simulated or model.impl == TRANSFORMERS or platform.triton_problem:
        return platform
    return msgspec.structs.replace(platform, triton_error=try_triton(device, platform.interpreted))


def choose_dtype(options: NodeOptions, model: ModelConfig) -> Resolved[str]:
    if options.dtype == "auto":
        return Resolved(model.dtype, "the checkpoint's")
    if options.dtype not in DTYPE_BYTES:
        raise ConfigError(f"dtype {options.dtype!r} is not one of auto, {', '.join(DTYPE_BYTES)}")
    return Resolved(options.dtype)


def choose_attention_backend(
    options: NodeOptions, platform: Platform, dtype: str, model: ModelConfig, v1_forced: bool
) -> Resolved[str]:
    """Raises ConfigError for a back end that cannot run the model here."""
    if options.simulated:
        return Resolved(NO_BACKEND)
    if model.impl == TRANSFORMERS:
        if options.attention_backend not in ("auto", "torch"):
            raise ConfigError(
                f"attention_backend {options.attention_backend!r} is for native models; {model.architecture} runs "
                "through transformers. Choose auto or torch"
            )
        return Resolved("torch", "it has all that a layer of transformers may ask for")
    of_cache = (model.latent, type(model.kv_cache_spec(dtype)), model.kv_heads)
    if options.attention_backend != "auto":
        check_backend(options.attention_backend, platform, dtype, model.head_dim, model.attention, *of_cache)
        return Resolved(options.attention_backend)
    return Resolved(*choose_backend(platform, dtype, model.head_dim, model.attention, v1_forced, *of_cache))


def choose_runner(
    options: NodeOptions,
    platform: Platform,
    model: ModelConfig,
    backend: str,
    pooling: PoolingConfig | None,
    quantization: QuantizationLimits,
    variable: str | None,
) -> Decision:
    """Return the oracle's answer. ``variable`` is the value of PDSERVE_USE_V2_MODEL_RUNNER, None if unset."""
    if options.simulated:
        return decide_simulated(variable)
    facts = Facts(
        architecture=model.architecture,
        platform=platform,
        attention_backend=backend,
        head_dim=model.head_dim if model.latent is None else model.latent.kv_lora_rank,
        model_impl=model.impl,
        rope_type=model.rope.rope_type,
        cuda_graphs=options.cuda_graphs,
        runner_type=GENERATE if pooling is None else pooling.task,
        quantization_problem=quantization.problem,
        quantization_doubt=quantization.doubt,
    )
    return decide(facts, variable)


def choose_cuda_graphs(options: NodeOptions, platform: Platform, decision: Decision) -> Resolved[bool]:
    """Return whether decode steps are captured. ``decide`` has refused "on" where there are no graphs."""
    if options.cuda_graphs != "auto":
        return Resolved(options.cuda_graphs == "on")
    if uses_graphs(decision, platform):
        return Resolved(True, "V2 on a GPU", shown="on")
    return Resolved(False, "only V2 on a GPU captures them", shown="off")
