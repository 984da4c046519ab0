"""config.json, field by field: native layers compute what transformers does with it, or refuse it by name.

The fields are those of the library's config class of each native family, and those that the library's layers look for
beside them. A field that a new version of the library adds fails here until ``VALUES`` has another value for it.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
import transformers
from checkpoints import CONFIG_CLASSES, FAMILIES, make_checkpoint
from differential import EQUAL, Library, LibraryError, compare, edited, random_prompts

from pdserve.errors import PdserveError
from pdserve.model.model_config import ModelConfig, load_model_config
from pdserve.model.unread_fields import FIXED

NUM_LAYERS = 3
PROMPTS = random_prompts(random.Random(1), 96, (40,))  # token ids below the smallest vocabulary size
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
CONVOLUTIONS = ["conv", "conv", "full_attention"]
HYBRID = ["linear_attention", "linear_attention", "full_attention"]
ALTERNATING = ["full_attention", "sliding_attention", "full_attention"]

#: Other values of each field. They change logits where a family knows the field, except those without effect.
VALUES: dict[str, tuple[Any, ...]] = {
    "architectures": (["OPTForCausalLM"],),
    "attention_in_multiplier": (0.5,),
    "attention_multiplier": (0.5,),
    "attention_out_multiplier": (0.5,),
    "chunk_size": (16,),
    "conv_kernel": (2,),
    "embedding_multiplier": (0.5,),
    "expand": (3,),
    "hidden_dropout": (0.5,),
    "key_multiplier": (0.9,),
    "layer_norm_epsilon": (1e-2,),
    "layers_block_type": (HYBRID, ["mamba", "attention", "mlp"]),
    "lm_head_multiplier": (0.5,),
    "logits_scaling": (0.5,),
    "mamba_chunk_size": (16,),
    "mamba_conv_bias": (True, False),
    "mamba_d_conv": (2,),
    "mamba_d_head": ("auto", 8),
    "mamba_d_ssm": (64,),
    "mamba_d_state": (8,),
    "mamba_expand": (1,),
    "mamba_head_dim": (8,),
    "mamba_hidden_act": ("gelu",),
    "mamba_n_groups": (1,),
    "mamba_n_heads": (4,),
    "mamba_norm_before_gate": (False,),
    "mamba_num_heads": (4,),
    "mamba_proj_bias": (True,),
    "mamba_rms_norm": (True,),
    "mamba_ssm_cache_dtype": ("bfloat16",),
    "mlp_hidden_act": ("silu",),
    "mlp_multipliers": ([0.5, 2.0],),
    "moe_latent_size": (16,),
    "moe_shared_expert_intermediate_size": (32,),
    "moe_shared_expert_overlap": (False,),
    "mtp_layers_block_type": (["mlp"],),
    "n_groups": (1,),
    "num_logits_to_keep": (2,),
    "position_embedding_type": ("rope", "nope"),
    "projectors_bias": (True,),
    "rescale_prenorm_residual": (False,),
    "residual_in_fp32": (True,),
    "residual_multiplier": (0.5,),
    "shared_intermediate_size": (32,),
    "ssm_in_multiplier": (0.5,),
    "ssm_multipliers": ([0.5] * 5,),
    "ssm_out_multiplier": (0.5,),
    "ssm_state_size": (8,),
    "time_step_floor": (0.1,),
    "time_step_limit": ([0.5, 0.8],),
    "time_step_max": (0.5,),
    "time_step_min": (0.6,),
    "use_bias": (True,),
    "use_conv_bias": (False,),
    "use_mamba_kernels": (False,),
    "attention_bias": (True, False),
    "attention_chunk_size": (8,),
    "attention_dropout": (0.5,),
    "attention_k_eq_v": (True,),
    "block_auto_adjust_ff_dim": (True,),
    "block_ff_dim": (64,),
    "block_ffn_dim_multiplier": (1.5,),
    "block_multiple_of": (32,),
    "bos_token_id": (5,),
    "chunk_size_feed_forward": (4,),
    "conv_L_cache": (2, 5),
    "conv_bias": (True,),
    "decoder_sparse_step": (2,),
    "dtype": ("bfloat16",),
    "eos_token_id": ([3, 4],),
    "final_logit_softcapping": (5.0,),
    "enable_moe_block": (True,),
    "first_k_dense_replace": (0, 2),
    "full_attention_interval": (2, 3),
    "full_attn_idxs": ([0],),
    "gradient_checkpointing": (True,),
    "head_dim": (8,),
    "hidden_act": ("gelu", "relu"),
    "hidden_activation": ("silu",),
    "hidden_size": (96,),
    "hidden_size_per_layer_input": (8,),
    "id2label": ({"0": "yes"},),
    "initializer_range": (0.5,),
    "intermediate_size": (64,),
    "is_causal": (False,),
    "is_encoder_decoder": (True,),
    "kv_lora_rank": (16,),
    "kv_sharing_modes": (["own", "reuse", "reuse"],),
    "label2id": ({"yes": 0},),
    "layer_types": (
        HYBRID,
        CONVOLUTIONS,
        ALTERNATING,
        ["full_attention"] * NUM_LAYERS,
        ["sliding_attention"] * NUM_LAYERS,
    ),
    "linear_conv_kernel_dim": (2,),
    "linear_key_head_dim": (8,),
    "linear_num_key_heads": (1,),
    "linear_num_value_heads": (2,),
    "linear_value_head_dim": (8,),
    "max_position_embeddings": (64,),
    "max_window_layers": (0, 2),
    "mlp_bias": (True,),
    "mlp_only_layers": ([1],),
    "model_type": ("opt", "llama", "qwen2"),
    "moe_intermediate_size": (32,),
    "n_group": (1, 2),
    "n_routed_experts": (4,),
    "n_shared_experts": (1,),
    "norm_eps": (1e-2,),
    "norm_topk_prob": (True, False),
    "num_attention_heads": (8,),
    "num_dense_layers": (0, 3),
    "num_experts": (4,),
    "num_experts_per_tok": (1,),
    "num_hidden_layers": (2,),
    "num_key_value_heads": (1,),
    "num_kv_shared_layers": (1,),
    "num_local_experts": (4,),
    "num_mtp_layers": (1,),
    "num_nextn_predict_layers": (1,),
    "original_max_position_embeddings": (32,),
    "output_hidden_states": (True,),
    "output_router_logits": (True,),
    "pad_token_id": (3,),
    "partial_rotary_factor": (0.25,),
    "per_layer_config": ({"1": {"rms_norm_eps": 0.1}},),
    "pretraining_tp": (2,),
    "problem_type": ("regression",),
    "q_lora_rank": (16, None),
    "qk_head_dim": (48,),
    "qk_nope_head_dim": (8,),
    "qk_rope_head_dim": (8,),
    "return_dict": (False,),
    "rms_norm_eps": (1e-2,),
    "rope_interleave": (True, False),
    "rope_parameters": (
        YARN,
        {"rope_type": "default", "rope_theta": 100.0},
        {"rope_type": "linear", "factor": 3.0},
        {},
    ),
    "rope_scaling": (YARN, {"type": "linear", "factor": 3.0}, {"rope_type": "dynamic", "factor": 3.0}, {}),
    "rope_theta": (100.0,),
    "rotary_dim": (8,),
    "routed_scaling_factor": (2.5,),
    "router_aux_loss_coef": (0.5,),
    "router_jitter_noise": (0.5,),
    "scoring_func": ("softmax",),
    "shared_expert_intermediate_size": (32,),
    "sliding_window": (12,),
    "swiglu_alpha": (1.1,),
    "swiglu_limit": (0.5,),
    "tie_word_embeddings": (True,),
    "tie_embedding": (True,),
    "top_k_experts": (1,),
    "topk_group": (1,),
    "topk_method": ("greedy", "noaux_tc"),
    "torch_dtype": ("bfloat16",),
    "transformers_version": ("4.0.0",),
    "use_cache": (False,),
    "use_bidirectional_attention": ("all", "vision"),
    "use_double_wide_mlp": (True,),
    "use_expert_bias": (False,),
    "use_qk_norm": (False, True),
    "use_sliding_window": (True,),
    "v_head_dim": (24,),
    "vocab_size": (96,),
    "vocab_size_per_layer_input": (64,),
}
#: Fields beside those of the library's classes: of transformers 4, of original configs, and of its base classes.
OLDER = {"model_type", "rope_scaling", "rope_theta", "rotary_dim", "scoring_func", "torch_dtype"}
OLDER |= {"partial_rotary_factor", "per_layer_config", "original_max_position_embeddings", "num_nextn_predict_layers"}
OLDER |= {"full_attention_interval"}
#: Attributes that the library looks for and that belong to other kinds of models, to its loader, or to quantization.
OTHER_KINDS = {"auto_map", "decoder", "fusion_config", "generator", "mlp_layer_types", "mtp_layer_types", "num_heads"}
OTHER_KINDS |= {"gguf_file", "output_loading_info", "quantization_config", "text_config", "transformers_weights"}
OTHER_KINDS |= {"vision_aspect_ratio", "vision_feature_layer", "vision_feature_select_strategy"}
#: Fields that may be refused although the forward pass of the library stays equal: with a cache it does not, or the
#: file contradicts itself, or native layers need what the library has a default for.
MAY_BE_REFUSED = {
    "architectures",
    "attention_chunk_size",
    "hidden_act",
    "intermediate_size",
    "is_causal",
    "is_encoder_decoder",
    "kv_sharing_modes",
    "layer_types",
    "max_position_embeddings",
    "model_type",
    "n_routed_experts",
    "norm_topk_prob",  # DeepSeek's own code of V2 reads it, the library's does not
    "num_experts",
    "num_local_experts",
    "partial_rotary_factor",
    "rotary_dim",
    "scoring_func",
    "sliding_window",
}


class Change(NamedTuple):
    """A field, what to write into config.json, and what to leave out of it."""

    name: str
    fields: dict[str, Any]
    without: tuple[str, ...] = ()


class Base:
    """A checkpoint of a family, as the library saves and computes it."""

    def __init__(self, family: str, directory: Path) -> None:
        self.family = family
        self.directory = directory / "base"
        self.path = make_checkpoint(self.directory, family, num_hidden_layers=NUM_LAYERS)
        self.written = json.loads((self.path / "config.json").read_text())
        self.config = load_model_config(self.path)
        self.fields, self.expected = self._fields_of_the_library()

    def other_values(self) -> list[Change]:
        values = [(name, value) for name in sorted(self.fields | OLDER) for value in VALUES[name]]
        return [Change(name, {name: value}) for name, value in values if self.written.get(name, ...) != value]

    def absent_values(self) -> list[Change]:
        absent = [Change(name, {}, (name,)) for name in sorted(self.written.keys() & VALUES.keys())]
        return absent + [Change(name, {name: None}) for name in sorted(self.fields | OLDER)]

    def _fields_of_the_library(self) -> tuple[set[str], torch.Tensor]:
        """Return the fields of the config's class and the fields that layers look for, and their log-probabilities."""
        looked_for: set[str] = set()
        base: Any = transformers.PretrainedConfig
        get = base.__getattribute__

        def noted(config: Any, name: str) -> Any:
            looked_for.add(name)
            return get(config, name)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(base, "__getattribute__", noted)
            expected = Library(self.path).logprobs(PROMPTS[0])
        config_class = CONFIG_CLASSES[self.family][0]
        generation_config: Any = transformers.GenerationConfig
        of_generation = generation_config()
        fields = {field.name for field in dataclasses.fields(config_class)}
        fields |= {
            name
            for name in looked_for
            if not name.startswith("_") and not hasattr(config_class, name) and not hasattr(of_generation, name)
        }
        return fields - OTHER_KINDS, expected


@pytest.fixture(scope="module", params=FAMILIES)
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Base:
    return Base(request.param, tmp_path_factory.mktemp(request.param))


def test_every_field_of_the_library_has_a_reader_or_no_effect(base: Base, tmp_path: Path) -> None:
    assert base.fields <= VALUES.keys()
    nulls = dict.fromkeys(base.fields - base.written.keys() - FIXED.keys())
    assert not base.fields & {*load_model_config(edited(base.path, tmp_path / "model", nulls)).unread_fields}


@pytest.mark.parametrize("every", [16, pytest.param(1, marks=pytest.mark.slow)])
def test_every_value_means_what_it_means_to_transformers_or_is_refused(every: int, base: Base, tmp_path: Path) -> None:
    assert_equal_or_refused(base, base.other_values()[::every], tmp_path)


@pytest.mark.slow
def test_every_default_is_that_of_transformers(base: Base, tmp_path: Path) -> None:
    assert_equal_or_refused(base, base.absent_values(), tmp_path)


def assert_equal_or_refused(base: Base, changes: list[Change], directory: Path) -> None:
    problems = [(change, problem_of(base, change, directory / str(index))) for index, change in enumerate(changes)]
    wrong = [f"{change}: {problem}" for change, problem in problems if problem is not None]
    assert not wrong, "\n".join(wrong)


def problem_of(base: Base, change: Change, directory: Path) -> str | None:
    """Return how a native model differs from the library's, or why it is refused without reason; None if all is well.

    If the library cannot load the weights with a field, because shapes depend on it, the field gets weights of its own.
    """
    path = edited(base.path, directory / "edited", change.fields, change.without)
    try:
        library = Library(path)
        expected = library.logprobs(PROMPTS[0])
    except LibraryError:
        try:
            path = make_checkpoint(
                directory / "made", base.family, **{"num_hidden_layers": NUM_LAYERS, **change.fields}
            )
            library = Library(path)
            expected = library.logprobs(PROMPTS[0])
        except Exception:  # the library refuses, by errors of many types
            return None
    same = expected.shape == base.expected.shape and torch.allclose(expected, base.expected, atol=1e-5)
    try:
        if same and as_computed(load_model_config(path)) == as_computed(base.config):
            return None
        verdict = compare(path, PROMPTS, library=library)
    except AssertionError as exc:
        return f"differs from transformers: {exc}"
    except PdserveError as exc:
        verdict = str(exc)
    reason = verdict == EQUAL or not same or change.name in MAY_BE_REFUSED
    return None if reason else f"refused without reason: {verdict}"


def as_computed(config: ModelConfig) -> ModelConfig:
    """Return the config without the fields that do not change logits in float32."""
    return msgspec.structs.replace(config, dtype="float32", eos_token_ids=(), unread_fields=(), num_nextn_layers=0)
