"""Random checkpoints in the format transformers writes, small enough to make in a test, and configs to run them.

directory = make_checkpoint(tmp_path / "model", "qwen3", num_hidden_layers=2)
runner = runner.build(node_config(directory), lambda stage, fraction: None)
"""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from eagle3_training import random_weights as random_head
from eagle3_training import write_head
from safetensors.torch import load_file, save_file

from pdserve.checkpoint.safetensors_header import read_header
from pdserve.config.node_config import DeviceInfo, NodeConfig
from pdserve.config.node_options import NodeOptions
from pdserve.config.parallel import choose_parallel_config, shard_of
from pdserve.config.resolution.at_load import quantized_at_load
from pdserve.config.resolution.images import choose_images
from pdserve.config.resolution.quantized_layers import keep_layers, keep_quantized
from pdserve.config.resolve import stored_weights
from pdserve.config.runner_oracle import Decision
from pdserve.kv.layout import FP8_E4M3, KVLayout, KVScales
from pdserve.kv.states import StateLayout
from pdserve.model.eagle3 import load_eagle3
from pdserve.model.model_config import load_model_config

_logging: Any = transformers.utils.logging
_logging.disable_progress_bar()

RECURRENT = ("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text")
CONVOLUTIONS = ("lfm2", "lfm2_moe")
MAMBA2 = ("granitemoehybrid", "nemotron_h", "falcon_h1")
LATENT = ("deepseek_v2", "deepseek_v3", "glm4_moe_lite", "mistral4")
FAMILIES: tuple[str, ...] = (
    "llama",
    "mistral",
    "ministral3",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "mixtral",
    "gpt_oss",
    "glm4_moe",
    "minimax_m2",
    *RECURRENT,
    *CONVOLUTIONS,
    *MAMBA2,
    *LATENT,
    "gemma4_text",
)

_TINY: dict[str, Any] = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}
_GATED_DELTA: dict[str, Any] = {
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
_SHARED_EXPERT: dict[str, Any] = {"moe_intermediate_size": 48, "shared_expert_intermediate_size": 48}
_LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 24,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.5,
}
_SCALED_QUERIES: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 16.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "llama_4_scaling_beta": 0.5,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "original_max_position_embeddings": 16,
}
CONFIG_CLASSES: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM, {}),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM, {"sliding_window": None}),
    "ministral3": (
        transformers.Ministral3Config,
        transformers.Ministral3ForCausalLM,
        {"head_dim": 16, "rope_parameters": _SCALED_QUERIES},
    ),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM, {}),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM, {"head_dim": 32}),
    "qwen3_moe": (
        transformers.Qwen3MoeConfig,
        transformers.Qwen3MoeForCausalLM,
        {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48},
    ),
    "mixtral": (
        transformers.MixtralConfig,
        transformers.MixtralForCausalLM,
        {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "gpt_oss": (
        transformers.GptOssConfig,
        transformers.GptOssForCausalLM,
        {
            "head_dim": 32,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 1.5e5,
                "factor": 4.0,
                "truncate": False,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "glm4_moe": (
        transformers.Glm4MoeConfig,
        transformers.Glm4MoeForCausalLM,
        {
            "head_dim": 32,
            "use_qk_norm": True,
            "attention_bias": True,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
            "num_mtp_layers": 0,
        },
    ),
    "qwen3_next": (
        transformers.Qwen3NextConfig,
        transformers.Qwen3NextForCausalLM,
        {**_GATED_DELTA, "num_experts": 8, "num_experts_per_tok": 3, "decoder_sparse_step": 1, **_SHARED_EXPERT},
    ),
    "qwen3_5_text": (transformers.Qwen3_5TextConfig, transformers.Qwen3_5ForCausalLM, _GATED_DELTA),
    "qwen3_5_moe_text": (
        transformers.Qwen3_5MoeTextConfig,
        transformers.Qwen3_5MoeForCausalLM,
        {**_GATED_DELTA, "num_experts": 8, "num_experts_per_tok": 3, **_SHARED_EXPERT},
    ),
    "lfm2": (
        transformers.Lfm2Config,
        transformers.Lfm2ForCausalLM,
        {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False},
    ),
    "lfm2_moe": (
        transformers.Lfm2MoeConfig,
        transformers.Lfm2MoeForCausalLM,
        {
            "layer_types": ["conv", "full_attention", "conv"],
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
        },
    ),
    "granitemoehybrid": (
        transformers.GraniteMoeHybridConfig,
        transformers.GraniteMoeHybridForCausalLM,
        {
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 48,
            "mamba_n_heads": 8,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "embedding_multiplier": 1.5,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.2,
            "logits_scaling": 1.4,
        },
    ),
    "nemotron_h": (
        transformers.NemotronHConfig,
        transformers.NemotronHForCausalLM,
        {
            "head_dim": 16,
            "hybrid_override_pattern": "MEM*-ME",
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "ssm_state_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 40,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.5,
        },
    ),
    "falcon_h1": (
        transformers.FalconH1Config,
        transformers.FalconH1ForCausalLM,
        {
            "num_hidden_layers": 2,
            "mamba_d_ssm": 96,
            "mamba_n_heads": 6,
            "mamba_n_groups": 2,
            "mamba_d_state": 16,
            "embedding_multiplier": 1.3,
            "lm_head_multiplier": 0.8,
            "key_multiplier": 0.6,
            "attention_in_multiplier": 1.2,
            "attention_out_multiplier": 0.9,
            "ssm_in_multiplier": 1.1,
            "ssm_out_multiplier": 0.8,
            "ssm_multipliers": [0.7, 0.8, 0.9, 1.1, 1.2],
            "mlp_multipliers": [0.9, 0.7],
        },
    ),
    "minimax_m2": (
        transformers.MiniMaxM2Config,
        transformers.MiniMaxM2ForCausalLM,
        {
            "head_dim": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "rotary_dim": 16,
            # transformers before 5.18 ignores rotary_dim
            "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
        },
    ),
    "deepseek_v2": (
        transformers.DeepseekV2Config,
        transformers.DeepseekV2ForCausalLM,
        {
            **_LATENT,
            "first_k_dense_replace": 1,
            "topk_method": "group_limited_greedy",
            "n_group": 4,
            "topk_group": 2,
        },
    ),
    "deepseek_v3": (
        transformers.DeepseekV3Config,
        transformers.DeepseekV3ForCausalLM,
        {**_LATENT, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "num_mtp_layers": 0},
    ),
    "mistral4": (
        transformers.Mistral4Config,
        transformers.Mistral4ForCausalLM,
        {**_LATENT, "first_k_dense_replace": 1, "n_group": 4, "topk_group": 2, "rope_parameters": _SCALED_QUERIES},
    ),
    "glm4_moe_lite": (transformers.Glm4MoeLiteConfig, transformers.Glm4MoeLiteForCausalLM, {**_LATENT}),
    "gemma4_text": (
        transformers.Gemma4TextConfig,
        transformers.Gemma4ForCausalLM,
        {
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "global_head_dim": 32,
            "sliding_window": 20,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 128,
            "final_logit_softcapping": 30.0,
        },
    ),
}
_SIX_LAYERS: dict[str, Any] = {
    "num_hidden_layers": 6,
    "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2,
}
GEMMA4_SIZES: dict[str, dict[str, Any]] = {  # what differs between the published sizes, made small
    "E2B": {
        **_SIX_LAYERS,
        "num_key_value_heads": 1,
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 3,
        "use_double_wide_mlp": True,
    },
    "E4B": {**_SIX_LAYERS, "num_key_value_heads": 2, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2},
    "12B": {**_SIX_LAYERS, "num_global_key_value_heads": 1, "attention_k_eq_v": True},
    "26B-A4B": {
        **_SIX_LAYERS,
        "num_global_key_value_heads": 2,
        "attention_k_eq_v": True,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 3,
        "moe_intermediate_size": 48,
    },
    "31B": {**_SIX_LAYERS, "num_global_key_value_heads": 2, "attention_k_eq_v": True},
}
_MIMO_NORMS = ("token_layernorm", "hidden_layernorm", "final_layernorm")


def make_checkpoint(
    path: Path,
    family: str,
    *,
    seed: int = 0,
    dtype: str = "float32",
    max_shard_size: str = "5GB",
    fused: bool = False,
    predicts: bool = False,
    **overrides: Any,
) -> Path:
    """Write a random checkpoint of a family of ``FAMILIES`` and return its directory.

    ``overrides`` are fields of the family's transformers config. Weights are drawn wider than transformers' initial
    ones, so that logits differ clearly: an argmax of near-equal logits tests nothing. MiMo is a family here, too. If it
    ``predicts``, ``add_mtp`` follows.
    """
    if family == "mimo":
        return make_mimo(path, seed=seed, dtype=dtype, **overrides)
    config_class, model_class, defaults = CONFIG_CLASSES[family]
    config = config_class(**copy.deepcopy({**_TINY, **defaults, **overrides}))  # changes rope_parameters in place
    model = model_class(config).to(getattr(torch, dtype))
    config.dtype = dtype
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        stored = ("correction_bias", "expert_bias", "layer_scalar")
        buffers = ((name, buffer) for name, buffer in model.named_buffers() if name.endswith(stored))
        for name, parameter in (*model.named_parameters(), *buffers):
            noise = torch.randn(parameter.shape, generator=generator)
            if "norm" in name or name.endswith(("layer_scalar", "router.scale", "per_expert_scale")):
                is_centered = family in RECURRENT and "linear_attn" not in name  # the norm scales by 1 + weight
                parameter.copy_((0.0 if is_centered else 1.0) + 0.2 * noise)
            elif parameter.dim() == 1:
                parameter.copy_(0.3 * noise)
            elif "embed_tokens" in name:
                parameter.copy_(noise)
            else:
                parameter.copy_(1.3 * noise / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path, max_shard_size=max_shard_size, save_original_format=not fused)
    if predicts:
        add_mtp(path, family, seed=seed, **overrides)
    return path


def make_mimo(path: Path, **overrides: Any) -> Path:
    """Write a random MiMo checkpoint: Qwen2 with a layer that predicts further tokens. transformers has no such family.

    ``overrides`` go to ``make_checkpoint``.
    """
    make_checkpoint(path, "qwen2", **overrides)
    config = json.loads((path / "config.json").read_text())
    layers = {"num_hidden_layers": 1, "layer_types": None, "seed": 1 + overrides.get("seed", 0)}
    other = make_checkpoint(path / "other", "qwen2", **overrides | layers)
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(2)
    tensors = {f"{name}.weight": 1.0 + 0.2 * torch.randn(hidden, generator=generator) for name in _MIMO_NORMS}
    tensors["input_proj.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    for name, tensor in load_file(other / "model.safetensors").items():
        if name.startswith("model.layers.0."):
            tensors[name.removeprefix("model.layers.0.")] = tensor
    shutil.rmtree(other)
    add_tensors(path, {f"model.mtp_layers.0.{name}": tensor for name, tensor in tensors.items()})
    config |= {"architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_nextn_predict_layers": 1}
    (path / "config.json").write_text(json.dumps(config))
    return path


def add_mtp(path: Path, family: str, **fields: Any) -> Path:
    """Add a random layer that predicts further tokens to a checkpoint of Qwen3-Next or Qwen3.5, made with these fields.

    Return a checkpoint of its layer and norm as a model of one layer.
    """
    layers = {"num_hidden_layers": 1, "layer_types": ["full_attention"], "seed": 1 + fields.get("seed", 0)}
    other = make_checkpoint(path.parent / f"{path.name}-mtp", family, **fields | layers)
    stored = load_file(other / "model.safetensors")
    config = json.loads((path / "config.json").read_text())
    hidden = config["hidden_size"]
    generator = torch.Generator().manual_seed(2)
    tensors = {
        f"mtp.pre_fc_norm_{name}.weight": 0.2 * torch.randn(hidden, generator=generator)
        for name in ("embedding", "hidden")
    }
    tensors["mtp.fc.weight"] = torch.randn(hidden, 2 * hidden, generator=generator) / hidden**0.5
    tensors["mtp.norm.weight"] = stored["model.norm.weight"]
    tensors |= {
        "mtp." + name.removeprefix("model."): tensor
        for name, tensor in stored.items()
        if name.startswith("model.layers.0.")
    }
    add_tensors(path, tensors)
    (path / "config.json").write_text(json.dumps(config | {"mtp_num_hidden_layers": 1}))
    return other


def add_predictor(path: Path, family: str, **fields: Any) -> Path:
    """Add a layer that predicts further tokens to a checkpoint of DeepSeek-V3 or GLM, made with these fields.

    Its result is the hidden state that it takes. So it predicts the token that the model predicts there.
    """
    config = json.loads((path / "config.json").read_text())
    last = config["num_hidden_layers"]
    hidden = config["hidden_size"]
    other = make_checkpoint(path / "other", family, seed=1, **fields | {"num_hidden_layers": last + 1})
    prefix = f"model.layers.{last}."
    tensors = {f"{prefix}{name}.weight": torch.ones(hidden) for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[f"{prefix}eh_proj.weight"] = torch.cat((torch.zeros(hidden, hidden), torch.eye(hidden)), dim=1)
    for name in ("embed_tokens", "shared_head.head"):  # copies, which are not read
        tensors[f"{prefix}{name}.weight"] = torch.zeros(config["vocab_size"], hidden)
    stored = load_file(other / "model.safetensors")
    outputs = ("o_proj.weight", "down_proj.weight")
    tensors |= {
        name: torch.zeros_like(tensor) if name.endswith(outputs) else tensor
        for name, tensor in stored.items()
        if name.startswith(prefix)
    }
    shutil.rmtree(other)
    add_tensors(path, tensors)
    (path / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return path


def make_eagle3(path: Path, target: Path, seed: int = 0, **fields: Any) -> Path:
    """Write a random EAGLE-3 head for the checkpoint ``target`` in the form that its authors publish.

    ``fields`` are for its config.json. The head can draft half of the tokens.
    """
    model = json.loads((target / "config.json").read_text())
    names = ("vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "rms_norm_eps")
    layers = {"eagle_aux_hidden_state_layer_ids": list(range(model["num_hidden_layers"] - 1))}
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        **{name: model[name] for name in names},
        "head_dim": model.get("head_dim") or model["hidden_size"] // model["num_attention_heads"],
        "draft_vocab_size": model["vocab_size"] // 2,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "max_position_embeddings": 2048,
        "rope_theta": 5000.0,
        "eagle_config": layers,
        **fields,
    }
    write_head(path, config, random_head(config, model["hidden_size"], seed))
    return path


def change_weight(directory: Path, tensor: str) -> None:
    """Change one element in the middle of a tensor in place. Header, size and all other bytes stay equal."""
    path = directory / "model.safetensors"
    place = read_header(path)[tensor]
    value = torch.tensor([4.0]).numpy().tobytes()
    with path.open("r+b") as file:
        file.seek((place.begin + place.end) // 2 // len(value) * len(value))
        file.write(value)


def add_tensors(directory: Path, tensors: dict[str, torch.Tensor]) -> None:
    """Add tensors to a checkpoint, in a file of their own."""
    save_file(tensors, directory / "more.safetensors")


def library_class(path: Path) -> Any:
    """Return the class that loads a checkpoint: Qwen2's for MiMo, which the library lacks."""
    classes: dict[str, Any] = {
        "mimo": transformers.Qwen2ForCausalLM,
        "mistral4": transformers.Mistral4ForCausalLM,  # which the library lists as multimodal only
    }
    return classes.get(json.loads((path / "config.json").read_text())["model_type"], transformers.AutoModelForCausalLM)


def reference_model(path: Path, dtype: str = "float32") -> Any:
    """Return the transformers model of a checkpoint."""
    model: Any = library_class(path).from_pretrained(path, dtype=getattr(torch, dtype))
    model.generation_config.eos_token_id = None  # ``generate`` would forbid EOS until min_new_tokens
    return model.eval()


def reference_greedy(model: Any, prompt: list[int], num_tokens: int, guess: Sequence[int] = ()) -> list[int]:
    """Return the tokens that transformers' greedy ``generate`` appends to a prompt; an EOS does not end it.

    ``guess`` are the expected tokens. One step checks them all: each must be the most likely one after the tokens
    before it; otherwise tokens are generated one by one.
    """
    if len(guess) == num_tokens:
        with torch.inference_mode():
            logits = model(torch.tensor([[*prompt, *guess]])).logits[0, len(prompt) - 1 : -1]
        if logits.argmax(dim=-1).tolist() == list(guess):
            return list(guess)
    greedy: Any = transformers.GenerationConfig
    output = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        generation_config=greedy(
            do_sample=False, max_new_tokens=num_tokens, min_new_tokens=num_tokens, eos_token_id=None, pad_token_id=0
        ),
    )
    tokens: list[int] = output[0, len(prompt) :].tolist()
    return tokens


def node_config(
    model_dir: Path,
    *,
    dtype: str = "float32",
    device: str = "cpu",
    num_blocks: int = 128,
    block_size: int = 16,
    kernel_block_size: int = 16,
    max_model_len: int = 2048,
    max_num_seqs: int = 64,
    max_batch_tokens: int = 2048,
    threads: int = 1,
    attention_backend: str = "torch",
    load_format: str = "auto",
    quantization: str = "auto",
    runner: str = "V1",
    impl: str = "auto",
    pp: int = 1,
    tp: int = 1,
    ep: int = 1,
    stage_layers: tuple[int, ...] | None = None,
    kv_scales: tuple[KVScales, ...] = (),
    state_slots: int = 8,
    draft_layers: int = 0,
    draft_head: Path | None = None,
    gpu_memory_utilization: float | None = None,
    images: str = "off",
    encodes: bool = True,
) -> NodeConfig:
    """Return rank 0's configuration for a checkpoint, without ``pdserve.config.resolve.resolve``.

    ``state_slots``: slots of recurrent state, if the model has any. With ``kv_scales``, one per layer that attends,
    the KV cache is FP8. ``draft_head`` is the checkpoint of an EAGLE-3 head. ``images`` is the option,
    ``encodes`` whether the node's role computes prompts.
    """
    decision = Decision(runner=runner, reasons=("test",))
    model = quantized_at_load(load_model_config(model_dir, impl), quantization)
    weights = stored_weights(model, model_dir) if load_format == "auto" else None
    kept = keep_layers(model, choose_parallel_config(model, pp, tp, stage_layers, ep), weights)
    model = keep_quantized(model, decision, kept, dtype)
    head = None if draft_head is None else load_eagle3(draft_head, model.sizes_for_head)
    model = model.with_draft_layers(draft_layers if head is None else 1, head)
    layout = KVLayout(
        num_blocks=num_blocks,
        block_size=block_size,
        kernel_block_size=kernel_block_size,
        num_layers=model.kv_cache_groups.block_layers(range(model.num_kv_layers), model.num_kv_heads),
        groups=model.kv_cache_groups,
        spec=model.kv_cache_spec(FP8_E4M3 if kv_scales else dtype),
    )
    parallel = choose_parallel_config(model, pp, tp, stage_layers, ep)
    spec = shard_of(model, parallel.position(0)).state_spec(dtype)
    states = None if spec is None else StateLayout(state_slots, model.num_recurrent, spec)
    config = NodeConfig(
        options=NodeOptions(
            model=str(model_dir),
            load_format=load_format,
            max_num_seqs=max_num_seqs,
            gpu_memory_utilization=gpu_memory_utilization,
            images=images,
        ),
        model_dir=str(model_dir),
        model=model,
        draft_dir="" if draft_head is None else str(draft_head),
        served_model_name="test",
        device=DeviceInfo(kind=device, index=0, name=device, memory=1 << 34),
        dtype=dtype,
        random_weights=load_format == "dummy",
        max_model_len=max_model_len,
        parallel=parallel,
        kv_layout=layout,
        state_layout=states,
        kv_scales=kv_scales,
        measure_kv_memory=False,
        attention_backend=attention_backend,
        decision=decision,
        cuda_graphs=runner == "V2" and device == "cuda" and attention_backend != "torch",
        max_batch_tokens=max_batch_tokens,
        max_num_seqs=max_num_seqs,
        threads=threads,
        compat_fields={},
    )
    settings = choose_images(config.options, model_dir, model, None, parallel, dtype, encodes).value
    return settings.within(config).for_rank(0, config.device)
