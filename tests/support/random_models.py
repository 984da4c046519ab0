"""Random models of all native families, each from one random generator: config, format of the checkpoint, and steps.

numbers = random.Random("7:12")
model = draw_model(numbers)                     # a family and fields of its config
path = model.write(directory)                   # a random checkpoint, in the format of transformers 4 or 5
options = draw_setup(numbers, model, "V2")      # for compare() in differential.py and for node_config()
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from checkpoints import FAMILIES, RECURRENT, make_checkpoint

from pdserve.config.attention_backends import fits_triton

Fields = dict[str, Any]

_BOOLEANS = (False, True)


class RandomModel(NamedTuple):
    family: str
    fields: Fields  # fields of the family's transformers config
    fused: bool  # experts of a layer in one tensor
    legacy: bool  # config.json as transformers 4 writes it
    other_head: bool  # a head is stored although config.json calls it tied
    seed: int  # seed of the weights

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence; only dynamic frequencies allow more than the model's positions."""
        dynamic = self.fields["rope_parameters"].get("rope_type") == "dynamic"
        positions: int = self.fields["max_position_embeddings"]
        return 3 * positions if dynamic else positions

    def write(self, directory: Path, seed: int | None = None) -> Path:
        path = make_checkpoint(
            directory, self.family, seed=self.seed if seed is None else seed, fused=self.fused, **self.fields
        )
        config = json.loads((path / "config.json").read_text())
        if self.legacy:
            config = _as_transformers_4(config)
        if self.other_head:
            config["tie_word_embeddings"] = True
        (path / "config.json").write_text(json.dumps(config))
        return path

    def __str__(self) -> str:
        return json.dumps(self._asdict())


def draw_model(numbers: random.Random, families: Sequence[str] = FAMILIES) -> RandomModel:
    family = numbers.choice(families)
    fields = _common(numbers, family)
    fields |= _SPECIFIC[family](numbers, fields)
    if family == "gemma4_text":
        fields["rope_parameters"] = _two_ropes(numbers, fields)
    else:
        fields["rope_parameters"] = _rope(numbers, fields, partial=family in ("glm4_moe", "minimax_m2", *RECURRENT))
    if family == "nemotron_h" or fields.get("position_embedding_type", "rope") != "rope":
        fields["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    if fields["rope_parameters"].get("rope_type") == "dynamic" and "time_step_limit" in fields:
        fields["time_step_limit"] = [0.0, math.inf]  # answers are then compared with the library's, which has no limits
    if family == "mistral4":  # for other types, the library rotates as many values as whole heads have
        while fields["rope_parameters"]["rope_type"] not in ("yarn", "llama3"):
            fields["rope_theta"] = fields["rope_parameters"]["rope_theta"]
            fields["rope_parameters"] = _rope(numbers, fields, partial=False)
    if family in ("ministral3", "mistral4"):
        fields["rope_parameters"] |= _query_scale(numbers, fields)
    legacy = numbers.random() < 0.4 and family not in ("gemma4_text", "nemotron_h")
    if legacy and family == "gpt_oss" and fields["rope_parameters"]["rope_type"] == "default":
        legacy = False  # without rope_scaling it has YaRN
    return RandomModel(
        family,
        fields,
        fused=numbers.random() < 0.5,
        legacy=legacy,
        other_head=not fields["tie_word_embeddings"] and numbers.random() < 0.2,
        seed=numbers.randrange(1 << 30),
    )


def draw_setup(numbers: random.Random, model: RandomModel, version: str = "V1") -> dict[str, Any]:
    """Return the options of a runner, and how prompts are cut into steps. V2 has Triton's interpreter on CPUs."""
    page = numbers.choice((8, 16, 16, 32) if version == "V1" else (16, 16, 32))
    triton = version == "V2"
    return {
        "runner": version,
        "attention_backend": "triton" if triton else "torch",
        "kernel_block_size": page,
        "block_size": page * numbers.choice((1, 1, 2, 3)),
        "num_blocks": (4 * model.longest // page + 16) * (6 if model.family == "gemma4_text" else 1),  # groups
        "max_model_len": model.longest,
        "chunk": numbers.choice((1 << 30, numbers.randrange(1, 60))),
        "stagger": numbers.choice((0, 1, 2)),
        "num_tokens": numbers.choice((2, 5) if triton else (2, 5, 12)),
    }


def draw_prompts(numbers: random.Random, model: RandomModel, num_tokens: int, most: int = 300) -> list[list[int]]:
    """Return one to four prompts, with lengths around block sizes, windows and rope's trained length."""
    edges = [16, 32, 48, model.fields.get("sliding_window") or 1, model.fields["max_position_embeddings"]]
    longest = min(model.longest - num_tokens, most)
    prompts = []
    for _ in range(numbers.choice((1, 2, 4))):
        near = numbers.choice(edges) + numbers.randrange(-2, 3)
        length = numbers.choice((near, numbers.randrange(1, longest + 1)))
        prompts.append(_tokens(numbers, model, min(max(length, 1), longest)))
    return prompts


def fits_v2(model: RandomModel) -> bool:
    """Whether Triton has kernels for its head sizes, and V2 its rotary embeddings."""
    dynamic = model.fields["rope_parameters"].get("rope_type") == "dynamic"
    rotated = model.fields.get("qk_rope_head_dim") or model.fields["head_dim"]
    sizes = rotated, model.fields.get("global_head_dim", 16), model.fields.get("kv_lora_rank", 16)
    return all(fits_triton(size) for size in sizes) and not dynamic


def _tokens(numbers: random.Random, model: RandomModel, length: int) -> list[int]:
    return [numbers.randrange(model.fields["vocab_size"]) for _ in range(length)]


def _common(numbers: random.Random, family: str) -> Fields:
    kv_heads = numbers.choice((1, 2, 3))
    heads = kv_heads * numbers.choice((1, 2, 4))
    return {
        "num_hidden_layers": numbers.choice((1, 2, 3)),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": numbers.choice((8, 12, 16, 16, 32, 32, 64)),
        "hidden_size": heads * numbers.choice((4, 8, 12, 16)),
        "intermediate_size": numbers.choice((16, 40, 96)),
        "vocab_size": numbers.choice((32, 61, 128, 200)),
        "max_position_embeddings": numbers.choice((32, 80, 256)),
        "rms_norm_eps": numbers.choice((1e-6, 1e-5, 1e-2)),
        "tie_word_embeddings": numbers.choice(_BOOLEANS),
        "rope_theta": numbers.choice((100.0, 1e4, 1e6)),
    }


def _layer_types(numbers: random.Random, fields: Fields) -> list[str]:
    return [numbers.choice(("full_attention", "sliding_attention")) for _ in range(fields["num_hidden_layers"])]


def _llama(numbers: random.Random, fields: Fields) -> Fields:
    return {"attention_bias": numbers.choice(_BOOLEANS), "mlp_bias": numbers.choice(_BOOLEANS)}


def _mistral(numbers: random.Random, fields: Fields) -> Fields:
    window = numbers.choice((None, 2, 7, 20, 40))  # the library's cache has a window of 1 wrong
    if window is not None and numbers.random() < 0.5:
        return {"sliding_window": window, "layer_types": _layer_types(numbers, fields)}
    return {"sliding_window": window}


def _ministral3(numbers: random.Random, fields: Fields) -> Fields:
    return {"sliding_window": numbers.choice((None, None, 2, 20))}


def _query_scale(numbers: random.Random, fields: Fields) -> Fields:
    """Return further rope_parameters; the library has no scale of queries without a trained length."""
    rope = fields["rope_parameters"]
    if rope["rope_type"] in ("default", "linear", "dynamic"):
        rope["original_max_position_embeddings"] = fields["max_position_embeddings"] // 4
    no_scale = rope["rope_type"] == "dynamic"
    return {"llama_4_scaling_beta": 0.0 if no_scale else numbers.choice((0.0, 0.1, 0.1, 1.0))}


def _qwen2(numbers: random.Random, fields: Fields) -> Fields:
    drawn: Fields = {"use_sliding_window": numbers.choice(_BOOLEANS), "sliding_window": numbers.choice((2, 20, 40))}
    drawn["max_window_layers"] = numbers.randrange(4)
    if drawn["use_sliding_window"] and numbers.random() < 0.5:
        drawn["layer_types"] = _layer_types(numbers, fields)
    return drawn


def _qwen3(numbers: random.Random, fields: Fields) -> Fields:
    return _qwen2(numbers, fields) | {"attention_bias": numbers.choice(_BOOLEANS)}


def _experts(numbers: random.Random, name: str) -> Fields:
    experts = numbers.choice((2, 4, 5, 8))
    return {name: experts, "num_experts_per_tok": numbers.randrange(1, min(experts, 4) + 1)}


def _qwen3_moe(numbers: random.Random, fields: Fields) -> Fields:
    layers = fields["num_hidden_layers"]
    return {
        **_experts(numbers, "num_experts"),
        "use_sliding_window": numbers.choice(_BOOLEANS),
        "sliding_window": numbers.choice((2, 20)),
        "attention_bias": numbers.choice(_BOOLEANS),
        "moe_intermediate_size": numbers.choice((16, 48)),
        "norm_topk_prob": numbers.choice(_BOOLEANS),
        "decoder_sparse_step": numbers.choice((1, 1, 2)),
        "mlp_only_layers": [layer for layer in range(layers) if numbers.random() < 0.3],
    }


def _mixtral(numbers: random.Random, fields: Fields) -> Fields:
    return {**_experts(numbers, "num_local_experts"), "sliding_window": numbers.choice((None, 2, 20))}


def _gpt_oss(numbers: random.Random, fields: Fields) -> Fields:
    drawn = {
        **_experts(numbers, "num_local_experts"),
        "sliding_window": numbers.choice((2, 20, 128)),
        "attention_bias": numbers.choice(_BOOLEANS),
        "swiglu_alpha": numbers.choice((1.0, 1.702)),
        "swiglu_limit": numbers.choice((0.5, 7.0)),
    }
    return drawn if numbers.random() < 0.5 else drawn | {"layer_types": _layer_types(numbers, fields)}


def _glm4_moe(numbers: random.Random, fields: Fields) -> Fields:
    groups = numbers.choice((1, 1, 2, 4))
    kept = numbers.randrange(1, groups + 1)
    per_group = numbers.choice((2, 4))
    return {
        "use_qk_norm": numbers.choice(_BOOLEANS),
        "attention_bias": numbers.choice(_BOOLEANS),
        "n_routed_experts": groups * per_group,
        "n_group": groups,
        "topk_group": kept,
        "num_experts_per_tok": numbers.randrange(1, min(kept * per_group, 4) + 1),
        "moe_intermediate_size": numbers.choice((16, 48)),
        "n_shared_experts": numbers.choice((1, 2)),
        "first_k_dense_replace": numbers.randrange(3),
        "norm_topk_prob": numbers.choice(_BOOLEANS),
        "routed_scaling_factor": numbers.choice((1.0, 2.5)),
        "num_mtp_layers": 0,
    }


def _minimax_m2(numbers: random.Random, fields: Fields) -> Fields:
    return {**_experts(numbers, "num_local_experts"), "rotary_dim": None}


def _recurrent(numbers: random.Random, fields: Fields) -> Fields:
    kinds = ["linear_attention", "full_attention", *(["linear_attention"] * numbers.randrange(3))]
    numbers.shuffle(kinds)
    key_heads = numbers.choice((1, 2, 3))
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "attention_bias": numbers.choice(_BOOLEANS),
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * numbers.choice((1, 2, 3)),
        "linear_key_head_dim": numbers.choice((8, 12, 16)),
        "linear_value_head_dim": numbers.choice((8, 12, 16)),
        "linear_conv_kernel_dim": numbers.choice((2, 3, 4)),
    }


def _recurrent_moe(numbers: random.Random, fields: Fields) -> Fields:
    return {
        **_recurrent(numbers, fields),
        **_experts(numbers, "num_experts"),
        "moe_intermediate_size": numbers.choice((16, 48)),
        "shared_expert_intermediate_size": numbers.choice((16, 48)),
    }


def _qwen3_next(numbers: random.Random, fields: Fields) -> Fields:
    drawn = _recurrent_moe(numbers, fields)
    layers = range(drawn["num_hidden_layers"])
    return {
        **drawn,
        "norm_topk_prob": numbers.choice(_BOOLEANS),
        "decoder_sparse_step": numbers.choice((1, 1, 2)),
        "mlp_only_layers": [layer for layer in layers if numbers.random() < 0.3],
    }


def _lfm2(numbers: random.Random, fields: Fields) -> Fields:
    kinds = ["conv", "full_attention", *(["conv"] * numbers.randrange(3))]
    numbers.shuffle(kinds)
    return {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "conv_bias": numbers.choice(_BOOLEANS),
        "conv_L_cache": numbers.choice((2, 3, 4)),
        "norm_eps": numbers.choice((1e-5, 1e-3)),
        "block_auto_adjust_ff_dim": numbers.choice(_BOOLEANS),
        "block_multiple_of": numbers.choice((8, 32)),
        "block_ffn_dim_multiplier": numbers.choice((1.0, 1.25)),
    }


def _lfm2_moe(numbers: random.Random, fields: Fields) -> Fields:
    shared = ("num_hidden_layers", "layer_types", "conv_bias", "conv_L_cache", "norm_eps")
    drawn = _lfm2(numbers, fields)
    return {
        **{name: drawn[name] for name in shared},
        **_experts(numbers, "num_experts"),
        "moe_intermediate_size": numbers.choice((16, 48)),
        "num_dense_layers": numbers.randrange(3),
        "norm_topk_prob": numbers.choice(_BOOLEANS),
        "use_expert_bias": numbers.choice(_BOOLEANS),
        "routed_scaling_factor": numbers.choice((1.0, 2.5)),
    }


def _latent(numbers: random.Random, fields: Fields) -> Fields:
    rope = numbers.choice((8, 16, 16, 32))
    return {
        **_glm4_moe(numbers, fields),
        "attention_bias": False,
        "num_key_value_heads": fields["num_attention_heads"],
        "head_dim": rope,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": numbers.choice((8, 12, 24)),
        "v_head_dim": numbers.choice((8, 20, 32)),
        "kv_lora_rank": numbers.choice((12, 16, 32, 64)),
        "q_lora_rank": numbers.choice((None, 12, 24)),
    }


def _deepseek_v2(numbers: random.Random, fields: Fields) -> Fields:
    method = numbers.choice(("greedy", "group_limited_greedy"))
    return {**_latent(numbers, fields), "norm_topk_prob": False, "topk_method": method}


def _deepseek_v3(numbers: random.Random, fields: Fields) -> Fields:
    return {**_latent(numbers, fields), "rope_interleave": numbers.choice(_BOOLEANS)}


def _mistral4(numbers: random.Random, fields: Fields) -> Fields:
    drawn = _deepseek_v3(numbers, fields)
    del drawn["num_mtp_layers"]
    return {**drawn, "head_dim": drawn["qk_nope_head_dim"] + drawn["qk_rope_head_dim"]}


def _glm4_moe_lite(numbers: random.Random, fields: Fields) -> Fields:
    types = [numbers.choice(("dense", "sparse")) for _ in range(fields["num_hidden_layers"])]
    drawn = _deepseek_v3(numbers, fields)
    del drawn["first_k_dense_replace"]
    return {**drawn, "mlp_layer_types": types}


def _gemma4(numbers: random.Random, fields: Fields) -> Fields:
    """Any of the published sizes' features together. Both kinds of layers have KV heads that divide the other's."""
    layers = numbers.randrange(2, 7)
    types = [numbers.choice(("full_attention", "sliding_attention")) for _ in range(layers - 1)] + ["full_attention"]
    few = numbers.choice((1, 2))
    kv_heads = [few, few * numbers.choice((1, 2, 3))]
    numbers.shuffle(kv_heads)
    heads = max(kv_heads) * numbers.choice((1, 2))
    drawn: Fields = {
        "num_hidden_layers": layers,
        "layer_types": types,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads[0],
        "num_global_key_value_heads": numbers.choice((None, kv_heads[1])),
        "attention_k_eq_v": numbers.choice(_BOOLEANS),
        "hidden_size": heads * numbers.choice((16, 20, 24)),  # with few values, norms amplify rounding errors
        "global_head_dim": numbers.choice((8, 12, 16, 32, 64)),
        "sliding_window": numbers.choice((2, 20, 128)),
        "final_logit_softcapping": numbers.choice((None, 5.0, 30.0)),
        "hidden_size_per_layer_input": numbers.choice((0, 8)),
        "vocab_size_per_layer_input": fields["vocab_size"],
        "use_double_wide_mlp": numbers.choice(_BOOLEANS),
        "enable_moe_block": numbers.choice(_BOOLEANS),
    }
    most_shared = max(count for count in range(layers) if set(types[: layers - count]) == set(types))
    if drawn["hidden_size_per_layer_input"]:  # the library shares KV with such embeddings only
        drawn["num_kv_shared_layers"] = numbers.choice((0, most_shared))
    if drawn["enable_moe_block"]:
        drawn |= {
            "num_experts": numbers.choice((2, 4)),
            "top_k_experts": numbers.choice((1, 2)),
            "moe_intermediate_size": numbers.choice((16, 48)),
        }
    return drawn


def _mamba2(numbers: random.Random) -> Fields:
    """Return sizes of mixers by Granite's and Falcon's names."""
    groups = numbers.choice((1, 2, 3))
    heads = groups * numbers.choice((1, 2, 4))
    return {
        "mamba_n_groups": groups,
        "mamba_n_heads": heads,
        "mamba_d_state": numbers.choice((8, 12, 16)),
        "mamba_d_conv": numbers.choice((2, 3, 4)),
        "mamba_conv_bias": numbers.choice(_BOOLEANS),
        "mamba_proj_bias": numbers.choice(_BOOLEANS),
        "time_step_limit": numbers.choice(([0.0, math.inf], [0.2, 0.8])),
    }


def _factor(numbers: random.Random) -> float:
    return numbers.choice((1.0, round(numbers.uniform(0.6, 1.5), 2)))


def _granite4(numbers: random.Random, fields: Fields) -> Fields:
    layers = numbers.randrange(1, 5)
    kinds = [numbers.choice(("linear_attention", "full_attention")) for _ in range(layers - 1)] + ["full_attention"]
    numbers.shuffle(kinds)
    drawn = _mamba2(numbers)
    names = ("embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling")
    return {
        **drawn,
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "hidden_size": math.lcm(4, drawn["mamba_n_heads"]) * math.ceil(40 / math.lcm(4, drawn["mamba_n_heads"])),
        "mamba_expand": 2,
        "mamba_d_head": "auto",
        **_experts(numbers, "num_local_experts"),
        "shared_intermediate_size": numbers.choice((16, 48)),
        "position_embedding_type": numbers.choice((None, "rope", "nope")),
        "attention_bias": numbers.choice(_BOOLEANS),
        **{name: _factor(numbers) for name in names},
        **({"num_local_experts": 0} if numbers.random() < 0.4 else {}),
    }


def _nemotron_h(numbers: random.Random, fields: Fields) -> Fields:
    pattern = [numbers.choice("MMM*-E") for _ in range(numbers.randrange(0, 6))] + ["*"]
    numbers.shuffle(pattern)
    groups = numbers.choice((1, 2, 3))
    has_experts = "E" in pattern
    experts = numbers.choice((4, 8))
    kept = numbers.choice((1, 2))
    return {
        "hybrid_override_pattern": "".join(pattern),
        "n_groups": groups,
        "mamba_num_heads": groups * numbers.choice((1, 2, 4)),
        "mamba_head_dim": numbers.choice((8, 12, 16)),
        "ssm_state_size": numbers.choice((8, 12, 16)),
        "conv_kernel": numbers.choice((2, 3, 4)),
        "use_conv_bias": numbers.choice(_BOOLEANS),
        "use_bias": numbers.choice(_BOOLEANS),
        "mlp_bias": not has_experts and numbers.choice(_BOOLEANS),
        "layer_norm_epsilon": numbers.choice((1e-5, 1e-3)),
        "n_routed_experts": experts,
        "n_group": 2,
        "topk_group": kept,
        "num_experts_per_tok": numbers.choice((1, 2)),
        "moe_intermediate_size": numbers.choice((16, 48)),
        "moe_shared_expert_intermediate_size": numbers.choice((16, 48)),
        "norm_topk_prob": numbers.choice(_BOOLEANS),
        "routed_scaling_factor": numbers.choice((1.0, 2.5)),
    }


def _falcon_h1(numbers: random.Random, fields: Fields) -> Fields:
    drawn = _mamba2(numbers)
    inputs = 1.0 if drawn["mamba_proj_bias"] else _factor(numbers)
    names = [
        f"{name}_multiplier" for name in ("embedding", "lm_head", "key", "attention_in", "attention_out", "ssm_out")
    ]
    return {
        **drawn,
        "mamba_d_ssm": drawn["mamba_n_heads"] * numbers.choice((8, 12, 16)),
        "mamba_d_head": "auto",
        "mamba_rms_norm": numbers.choice(_BOOLEANS),
        "mamba_norm_before_gate": numbers.choice(_BOOLEANS),
        "projectors_bias": numbers.choice(_BOOLEANS),
        "attention_bias": numbers.choice(_BOOLEANS),
        "mlp_bias": numbers.choice(_BOOLEANS),
        "ssm_in_multiplier": inputs,
        "ssm_multipliers": [_factor(numbers) for _ in range(5)],
        "mlp_multipliers": [_factor(numbers) for _ in range(2)],
        **{name: _factor(numbers) for name in names},
    }


def _two_ropes(numbers: random.Random, fields: Fields) -> Fields:
    """Return rope_parameters of both kinds of layers in Gemma 4, and remove the theta."""
    theta = fields.pop("rope_theta")
    kinds: list[Fields] = [
        {"rope_type": "default"},
        {"rope_type": "proportional", "partial_rotary_factor": numbers.choice((0.25, 0.5, 1.0))},
        {"rope_type": "linear", "factor": 2.5},
    ]
    full = numbers.choice((kinds[1], *kinds))
    sliding = numbers.choice((kinds[0], *kinds))
    return {
        "full_attention": full | {"rope_theta": theta},
        "sliding_attention": sliding | {"rope_theta": numbers.choice((100.0, 1e4))},
    }


_SPECIFIC: dict[str, Callable[[random.Random, Fields], Fields]] = {
    "llama": _llama,
    "mistral": _mistral,
    "ministral3": _ministral3,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "glm4_moe": _glm4_moe,
    "minimax_m2": _minimax_m2,
    "qwen3_next": _qwen3_next,
    "qwen3_5_text": _recurrent,
    "qwen3_5_moe_text": _recurrent_moe,
    "lfm2": _lfm2,
    "lfm2_moe": _lfm2_moe,
    "granitemoehybrid": _granite4,
    "nemotron_h": _nemotron_h,
    "falcon_h1": _falcon_h1,
    "deepseek_v2": _deepseek_v2,
    "deepseek_v3": _deepseek_v3,
    "mistral4": _mistral4,
    "glm4_moe_lite": _glm4_moe_lite,
    "gemma4_text": _gemma4,
}


def _rope(numbers: random.Random, fields: Fields, *, partial: bool) -> Fields:
    """Return rope_parameters, and move the theta there."""
    positions = fields["max_position_embeddings"]
    kinds: dict[str, Fields] = {
        "default": {},
        "linear": {"factor": numbers.choice((1.0, 2.5))},
        "dynamic": {"factor": numbers.choice((1.0, 3.0))},
        "llama3": {
            "factor": numbers.choice((2.0, 8.0)),
            "low_freq_factor": numbers.choice((0.5, 1.0)),
            "high_freq_factor": numbers.choice((2.0, 4.0)),
            "original_max_position_embeddings": positions // 2,
        },
        "yarn": {"factor": numbers.choice((1.0, 2.0, 4.0)), "original_max_position_embeddings": positions // 2},
    }
    kind = numbers.choice(("default", "default", *kinds))
    optional: Fields = {
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "mscale": 1.2,
        "mscale_all_dim": 0.8,
        "attention_factor": 0.7,
        "truncate": False,
    }
    rope = {"rope_type": kind, "rope_theta": fields.pop("rope_theta"), **kinds[kind]}
    if kind == "yarn":
        rope |= {name: value for name, value in optional.items() if numbers.random() < 0.3}
    if partial:
        rope["partial_rotary_factor"] = numbers.choice((0.5, 1.0))
        if fields["head_dim"] * rope["partial_rotary_factor"] < 4 or fields["head_dim"] % 4:
            rope["partial_rotary_factor"] = 1.0
    return rope


def _as_transformers_4(config: Fields) -> Fields:
    """Return a config as transformers 4 writes it: theta beside rope_scaling, torch_dtype."""
    older = dict(config)
    rope = dict(older.pop("rope_parameters"))
    older["torch_dtype"] = older.pop("dtype")
    older["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        older["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    older["rope_scaling"] = None if rope["rope_type"] == "default" else rope | {"type": rope["rope_type"]}
    return older
