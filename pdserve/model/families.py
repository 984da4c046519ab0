"""The decoder families that nodes can run: one entry per architecture.

An entry holds what the architecture's config.json means. It is free of torch, because the router, the oracle and
``pdserve explain`` read configs, too. The layers are in ``runner/models``. docs/adding-a-model.md adds a family.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from pdserve.errors import shown
from pdserve.kv.groups import KVHeads
from pdserve.kv.states import AnyStateSpec
from pdserve.model import gemma4, lfm2, mamba2
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.kv_heads import gemma4_windows
from pdserve.model.moe import (
    MoEConfig,
    deepseek_v2,
    deepseek_v3,
    glm4_moe,
    glm4_moe_lite,
    gpt_oss,
    lfm2_moe,
    minimax_m2,
    mistral4,
    mixtral,
    qwen3_5_moe,
    qwen3_moe,
    qwen3_next,
)
from pdserve.model.recurrent import (
    convolution_layers,
    linear_attention_layers,
    read_gated_delta,
    read_short_conv,
)
from pdserve.model.rope import RopeConfig, read_rope, read_rope_of_latents, read_rope_of_mistral

_V1_AND_V2 = "v1-and-v2"
_STATES_AND_LATENTS = "recurrent-and-latent-models"

_SHORT_CONV: Mapping[str, Any] = {
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "norm_eps": 1e-5,
    "rope_theta": 1e6,
    "max_position_embeddings": 128_000,
    "tie_word_embeddings": True,
    "conv_L_cache": 3,
}

Windows = tuple[int | None, ...]  # per layer, in tokens; None is full attention
_TRAINED = "original_max_position_embeddings"
_MISTRAL_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}
_GATED_DELTA: Mapping[str, Any] = {
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}


def full_attention(fields: ConfigFields, num_layers: int) -> Windows:
    if fields.get("sliding_window") is not None:  # transformers drops older keys from its cache, without a mask
        raise fields.error(
            f"has sliding_window = {shown(fields.get('sliding_window'))}, but layers of this architecture attend to "
            "all tokens. Remove the field if the model was trained so"
        )
    return _as_layer_types_say(fields, (None,) * num_layers)


def no_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Return full attention for all layers; ``layer_types`` say something else here."""
    return (None,) * num_layers


def same_window(fields: ConfigFields, num_layers: int) -> Windows:
    return _as_layer_types_say(fields, (fields.optional_integer("sliding_window"),) * num_layers)


def window_if_used(fields: ConfigFields, num_layers: int) -> Windows:
    """Return one window for all layers if ``use_sliding_window``."""
    window = _window_if_used(fields)
    return _as_layer_types_say(fields, (window,) * num_layers)


def windows_by_layer_type(fields: ConfigFields, num_layers: int) -> Windows:
    """Return Mistral's windows: by ``layer_types``, else the same one for all layers."""
    window = fields.optional_integer("sliding_window")
    return _windows_of(fields, window, [window is not None] * num_layers)


def windows_by_layer_type_if_used(fields: ConfigFields, num_layers: int) -> Windows:
    """Return Qwen's windows if ``use_sliding_window``: by ``layer_types``, else from ``max_window_layers`` on."""
    window = _window_if_used(fields)
    first = fields.integer("max_window_layers", num_layers, least=0)
    return _windows_of(fields, window, [window is not None and layer >= first for layer in range(num_layers)])


def alternating_windows(fields: ConfigFields, num_layers: int) -> Windows:
    """Return windows by ``layer_types``, else for every second layer from the first on."""
    window = fields.optional_integer("sliding_window")
    return _windows_of(fields, window, [layer % 2 == 0 for layer in range(num_layers)])


def _window_if_used(fields: ConfigFields) -> int | None:
    fields.given("sliding_window")  # marks the field as read, although it is not used
    return fields.optional_integer("sliding_window") if fields.flag("use_sliding_window") else None


def _windows_of(fields: ConfigFields, window: int | None, slides: list[bool]) -> Windows:
    """Return windows by ``layer_types``; without these, ``slides`` says which layers have one."""
    sliding = _sliding_layers(fields, len(slides)) or slides
    if window is None and any(sliding):
        raise fields.error("has sliding_attention layers but no sliding_window, or use_sliding_window is false")
    return tuple(window if slides_here else None for slides_here in sliding)


def _as_layer_types_say(fields: ConfigFields, windows: Windows) -> Windows:
    """Return the windows of an architecture without ``layer_types``. If a config has them, they must say the same."""
    sliding = _sliding_layers(fields, len(windows))
    if sliding is not None and sliding != [window is not None for window in windows]:
        layers = "have no sliding window" if None in windows else f"have a sliding window of {windows[0]}"
        raise fields.error(f"has layer_types, but all layers of this architecture {layers}. {REMEDY}")
    return windows


def _sliding_layers(fields: ConfigFields, num_layers: int) -> list[bool] | None:
    """Return which layers have a window by ``layer_types``; None without the field."""
    layer_types = fields.get("layer_types")
    if layer_types is None:
        return None
    if not isinstance(layer_types, list) or len(layer_types) != num_layers:
        count = len(layer_types) if isinstance(layer_types, list) else shown(layer_types)
        raise fields.error(f"has {count} layer_types for {num_layers} layers; it must be a list with one per layer")
    for layer_type in layer_types:
        fields.choice("layer type", layer_type, ("full_attention", "sliding_attention"))
    return [layer_type == "sliding_attention" for layer_type in layer_types]


class DecoderFamily(msgspec.Struct, frozen=True, kw_only=True):
    module: str  # a file in runner/models/families/; the class is named like the architecture; also model_type
    defaults: Mapping[str, Any] = {}  # values that transformers assumes where config.json lacks a field
    windows: Callable[[ConfigFields, int], Windows] = full_attention
    has_sinks: bool = False  # attention has sinks
    rename: Callable[[ConfigFields], None] | None = None  # writes fields of config.json under their usual names
    recurrent: Callable[[ConfigFields, int], tuple[bool, ...]] | None = None  # whether each layer is; None: none is
    state: Callable[[ConfigFields, str], AnyStateSpec] = read_gated_delta  # what recurrent layers keep, in a dtype
    has_output_gate: bool = False  # attention output is gated
    centered_norms: bool = False  # RMS norms scale by 1 + weight
    has_latents: bool = False  # MLA: the KV cache keeps a latent of each token in place of keys and values
    partial_rotary: bool = False  # RoPE may rotate only the first part of each head
    rope: Callable[[ConfigFields, int, int, bool], RopeConfig] = read_rope
    # Name prefix of the layer that predicts further tokens and makes drafts; "": checkpoints have no such layer, or it
    # does not run here. {layer} is the number of layers of the model.
    predictor: str = ""
    moe: Callable[[ConfigFields, int], MoEConfig] | None = None  # None: dense
    complete: Callable[[ConfigFields, int, int, KVHeads], dict[str, Any]] | None = None  # own fields of ModelConfig
    v2_figures: str = ""  # section of docs/numbers.md with V2's figures, which names this family; "": V1 by default
    v2_figures_of: str = ""  # architecture of these figures, if another one with equal layers was measured
    v2_is_faster: bool = False  # the section has V1's figures, too, and V2 decodes faster


FAMILIES: dict[str, DecoderFamily] = {
    "LlamaForCausalLM": DecoderFamily(module="llama", v2_figures=_V1_AND_V2, v2_is_faster=True),
    "MistralForCausalLM": DecoderFamily(
        module="mistral",
        defaults={"num_key_value_heads": 8, "sliding_window": 4096},
        windows=windows_by_layer_type,
        v2_figures=_V1_AND_V2,
        v2_figures_of="LlamaForCausalLM",
        v2_is_faster=True,
    ),
    "Ministral3ForCausalLM": DecoderFamily(
        module="ministral3",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_parameters": {**_MISTRAL_ROPE, "rope_theta": 1e6, "factor": 16.0, _TRAINED: 16_384},
        },
        windows=same_window,
        rope=read_rope_of_mistral,
        v2_figures=_V1_AND_V2,
        v2_figures_of="LlamaForCausalLM",  # beside them, queries are multiplied by their scale
        v2_is_faster=True,
    ),
    "Qwen2ForCausalLM": DecoderFamily(
        module="qwen2",
        defaults={"num_key_value_heads": 32, "sliding_window": 4096, "max_window_layers": 28},
        windows=windows_by_layer_type_if_used,
    ),
    "MiMoForCausalLM": DecoderFamily(
        module="mimo",
        defaults={
            "num_key_value_heads": 32,
            "sliding_window": 4096,
            "max_window_layers": 28,
            "num_nextn_predict_layers": 1,
        },
        windows=windows_by_layer_type_if_used,
        predictor="model.mtp_layers.0.",
    ),
    "Qwen3ForCausalLM": DecoderFamily(
        module="qwen3",
        defaults={"num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096, "max_window_layers": 28},
        windows=windows_by_layer_type_if_used,
        v2_figures=_V1_AND_V2,
        v2_is_faster=True,
    ),
    "Gemma4ForCausalLM": DecoderFamily(
        module="gemma4_text",
        defaults={
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "sliding_window": 512,
            "tie_word_embeddings": True,
            "hidden_size_per_layer_input": 256,
            "vocab_size_per_layer_input": 262_144,
        },
        windows=gemma4_windows,
        complete=gemma4.complete,
    ),
    "Qwen3MoeForCausalLM": DecoderFamily(
        module="qwen3_moe",
        defaults={
            "num_key_value_heads": 4,
            "moe_intermediate_size": 768,
            "num_experts_per_tok": 8,
            "num_experts": 128,
            "sliding_window": 4096,
        },
        windows=window_if_used,
        moe=qwen3_moe,
        v2_figures=_V1_AND_V2,
        v2_is_faster=True,
    ),
    "MixtralForCausalLM": DecoderFamily(
        module="mixtral",
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "num_experts_per_tok": 2,
            "num_local_experts": 8,
            "rope_theta": 1e6,
        },
        windows=same_window,
        moe=mixtral,
        v2_figures=_V1_AND_V2,
        v2_is_faster=True,
    ),
    "GptOssForCausalLM": DecoderFamily(
        module="gpt_oss",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "sliding_window": 128,
            "attention_bias": True,
            "num_experts_per_tok": 4,
            "num_local_experts": 128,
            "rope_theta": 150_000,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
        windows=alternating_windows,
        has_sinks=True,
        moe=gpt_oss,
        v2_figures=_V1_AND_V2,
        v2_is_faster=True,
    ),
    "Glm4MoeForCausalLM": DecoderFamily(
        module="glm4_moe",
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1408,
            "num_experts_per_tok": 8,
            "n_routed_experts": 128,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
            "partial_rotary_factor": 0.5,
        },
        partial_rotary=True,
        predictor="model.layers.{layer}.",
        moe=glm4_moe,
        v2_figures=_V1_AND_V2,
        v2_is_faster=True,
    ),
    "MiniMaxM2ForCausalLM": DecoderFamily(
        module="minimax_m2",
        defaults={
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-6,
            "num_experts_per_tok": 8,
            "num_local_experts": 256,
            "rope_theta": 5e6,
        },
        partial_rotary=True,
        moe=minimax_m2,
        v2_figures=_V1_AND_V2,
        v2_is_faster=True,
    ),
    "Qwen3NextForCausalLM": DecoderFamily(
        module="qwen3_next",
        defaults={
            **_GATED_DELTA,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 10,
            "num_experts": 512,
            "norm_topk_prob": True,
            "num_nextn_predict_layers": 1,
        },
        windows=no_windows,
        recurrent=linear_attention_layers,
        predictor="mtp.",
        has_output_gate=True,
        centered_norms=True,
        partial_rotary=True,
        moe=qwen3_next,
        v2_figures=_STATES_AND_LATENTS,
    ),
    "Qwen3_5ForCausalLM": DecoderFamily(
        module="qwen3_5_text",
        defaults={**_GATED_DELTA, "num_key_value_heads": 4},
        windows=no_windows,
        recurrent=linear_attention_layers,
        predictor="mtp.",
        has_output_gate=True,
        centered_norms=True,
        partial_rotary=True,
        v2_figures=_STATES_AND_LATENTS,
    ),
    "Qwen3_5MoeForCausalLM": DecoderFamily(
        module="qwen3_5_moe_text",
        defaults={
            **_GATED_DELTA,
            "num_key_value_heads": 2,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "num_experts_per_tok": 8,
            "num_experts": 256,
        },
        windows=no_windows,
        recurrent=linear_attention_layers,
        predictor="mtp.",
        has_output_gate=True,
        centered_norms=True,
        partial_rotary=True,
        moe=qwen3_5_moe,
        v2_figures=_STATES_AND_LATENTS,
    ),
    "GraniteMoeHybridForCausalLM": DecoderFamily(
        module="granitemoehybrid",
        defaults={
            "num_attention_heads": 32,
            "shared_intermediate_size": 1024,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
        },
        windows=no_windows,
        recurrent=mamba2.granite_layers,
        state=mamba2.granite_state,
        complete=mamba2.granite,
    ),
    "NemotronHForCausalLM": DecoderFamily(
        module="nemotron_h",
        defaults={
            "vocab_size": 131_072,
            "hidden_size": 4096,
            "num_attention_heads": 32,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "intermediate_size": 21_504,
            "max_position_embeddings": 4096,
            "ssm_state_size": 128,
            "mamba_num_heads": 128,
            "mamba_head_dim": 64,
            "n_groups": 8,
            "conv_kernel": 4,
            "time_step_min": 0.001,
            "use_conv_bias": True,
            "n_routed_experts": 8,
            "moe_intermediate_size": 7688,
            "moe_shared_expert_intermediate_size": 7688,
            "num_experts_per_tok": 2,
            "norm_topk_prob": True,
        },
        rename=mamba2.rename_nemotron,
        windows=no_windows,
        recurrent=mamba2.nemotron_layers,
        state=mamba2.nemotron_state,
        complete=mamba2.nemotron,
    ),
    "FalconH1ForCausalLM": DecoderFamily(
        module="falcon_h1",
        defaults={
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "mamba_d_ssm": 1024,
            "mamba_n_heads": 128,
            "mamba_n_groups": 1,
            "mamba_d_state": 256,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
            "mamba_conv_bias": True,
            "mamba_norm_before_gate": True,
        },
        windows=no_windows,
        recurrent=mamba2.every_layer,
        state=mamba2.falcon_state,
        complete=mamba2.falcon,
    ),
    "Lfm2ForCausalLM": DecoderFamily(
        module="lfm2",
        defaults={
            **_SHORT_CONV,
            "intermediate_size": 12_288,
            "block_multiple_of": 256,
            "block_auto_adjust_ff_dim": True,
        },
        rename=lfm2.rename_dense,
        windows=no_windows,
        recurrent=convolution_layers,
        state=read_short_conv,
    ),
    "Lfm2MoeForCausalLM": DecoderFamily(
        module="lfm2_moe",
        defaults={
            **_SHORT_CONV,
            "moe_intermediate_size": 1792,
            "num_dense_layers": 2,
            "num_experts_per_tok": 4,
            "num_experts": 32,
            "use_expert_bias": True,
            "norm_topk_prob": True,
        },
        rename=lfm2.rename,
        windows=no_windows,
        recurrent=convolution_layers,
        state=read_short_conv,
        moe=lfm2_moe,
    ),
    "DeepseekV2ForCausalLM": DecoderFamily(
        module="deepseek_v2",
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
            "moe_intermediate_size": 1407,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "first_k_dense_replace": 0,
            "topk_method": "greedy",
        },
        has_latents=True,
        moe=deepseek_v2,
        v2_figures=_STATES_AND_LATENTS,
    ),
    "DeepseekV3ForCausalLM": DecoderFamily(
        module="deepseek_v3",
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 1536,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 8,
            "n_routed_experts": 256,
            "norm_topk_prob": True,
            "n_group": 8,
            "topk_group": 4,
            "routed_scaling_factor": 2.5,
            "first_k_dense_replace": 3,
            "num_nextn_predict_layers": 1,
        },
        has_latents=True,
        predictor="model.layers.{layer}.",
        moe=deepseek_v3,
        v2_figures=_STATES_AND_LATENTS,
    ),
    "Mistral4ForCausalLM": DecoderFamily(
        module="mistral4",
        defaults={
            "kv_lora_rank": 256,
            "q_lora_rank": 1024,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
            "moe_intermediate_size": 2048,
            "num_experts_per_tok": 4,
            "n_routed_experts": 128,
            "norm_topk_prob": True,
            "first_k_dense_replace": 0,
            "rope_parameters": {**_MISTRAL_ROPE, "rope_theta": 1e4, "factor": 128.0, _TRAINED: 8192},
        },
        has_latents=True,
        rope=read_rope_of_latents,
        moe=mistral4,
        v2_figures=_STATES_AND_LATENTS,
        v2_figures_of="DeepseekV3ForCausalLM",  # beside them, queries are multiplied by their scale
    ),
    "Glm4MoeLiteForCausalLM": DecoderFamily(
        module="glm4_moe_lite",
        defaults={
            "kv_lora_rank": 512,
            "q_lora_rank": 768,
            "qk_nope_head_dim": 192,
            "qk_rope_head_dim": 64,
            "v_head_dim": 256,
            "rope_interleave": True,
            "rms_norm_eps": 1e-5,
            "moe_intermediate_size": 1536,
            "num_experts_per_tok": 4,
            "n_routed_experts": 64,
            "norm_topk_prob": True,
            "routed_scaling_factor": 1.8,
        },
        has_latents=True,
        predictor="model.layers.{layer}.",
        moe=glm4_moe_lite,
        v2_figures=_STATES_AND_LATENTS,
    ),
}
