"""The linear layers of a native model that adapters may change, by their names in the model's checkpoint.

split    outputs of a tensor shard        inputs of a tensor shard
OUTPUTS  its part, or its KV heads        all
INPUTS   all                              its part
WHOLE    all                              all
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import msgspec

from pdserve.kv.states import GatedDeltaSpec, Mamba2Spec
from pdserve.model.model_config import NATIVE, ModelConfig

_SHARED_EXPERT = ("Qwen3NextForCausalLM", "Qwen3_5MoeForCausalLM")  # architectures with a single shared expert
_MERGED_INPUTS = ("Qwen3NextForCausalLM",)  # architectures whose delta nets have merged input projections


class Split(enum.Enum):
    OUTPUTS = "outputs"
    INPUTS = "inputs"
    WHOLE = "whole"


class BaseLayer(msgspec.Struct, frozen=True):
    """The sizes of one linear layer of the whole model."""

    in_features: int
    out_features: int
    split: Split = Split.OUTPUTS
    unit: int = 1  # least outputs of a shard: those of a KV head

    def sizes(self, tp: int) -> tuple[int, int]:
        """Return the inputs and outputs of one of ``tp`` tensor shards."""
        if self.split is Split.INPUTS:
            return self.in_features // tp, self.out_features
        if self.split is Split.WHOLE:
            return self.in_features, self.out_features
        return self.in_features, max(self.unit, self.out_features // tp)


def adapters_problem(model: ModelConfig) -> str:
    """Describe why a model takes no adapters; empty if it takes some."""
    if model.impl != NATIVE:
        return (
            f"{model.architecture} runs through transformers, whose layers take no adapters here; choose a model of a "
            "native family, or serve the merged weights"
        )
    if model.state is not None and not isinstance(model.state, GatedDeltaSpec):
        kind = "Mamba2 mixers" if isinstance(model.state, Mamba2Spec) else "short convolutions"
        return f"{model.architecture} has {kind}, whose layers take no adapters; serve the merged weights"
    return ""


def base_layers(model: ModelConfig, layers: range | None = None) -> dict[str, BaseLayer]:
    """Return the layers that adapters may change; ``layers`` None: those of the whole model."""
    return {
        f"model.layers.{layer}.{name}": linear
        for layer in (range(model.num_layers) if layers is None else layers)
        for name, linear in _linears(model, layer)
    }


def refusal(model: ModelConfig, name: str) -> str:
    """Describe why a layer outside ``base_layers`` takes no adapter, with a remedy."""
    last = name.rpartition(".")[2]
    if ".experts" in name:
        what = "experts take no adapters"
    elif last in ("embed_tokens", "lm_head"):
        what = "the embedding and the head take no adapters"
    elif last == "kv_b_proj":
        what = "kv_b_proj is absorbed into attention and takes no adapter"
    elif name.endswith(("mlp.gate", "mlp.router", "shared_expert_gate", "block_sparse_moe.gate", "router.proj")):
        what = "the router of experts takes no adapter"
    elif "vision" in name or "visual" in name:
        what = "the vision tower takes no adapters"
    else:
        return f"{model.architecture} has no such linear layer; choose an adapter that was trained on this base"
    return f"{what}; train the adapter with other target_modules, or serve the merged weights"


def _linears(model: ModelConfig, layer: int) -> Iterator[tuple[str, BaseLayer]]:
    """Yield the linear layers of one layer, named behind its prefix."""
    if model.is_recurrent(layer):
        yield from _delta_net(model)
    elif model.latent is not None:
        yield from _latent_attention(model)
    else:
        yield from _attention(model, layer)
    yield from _mlp(model, layer)


def _attention(model: ModelConfig, layer: int) -> Iterator[tuple[str, BaseLayer]]:
    heads = model.heads_of(layer)
    size = model.hidden_size
    queries = model.num_heads * heads.head_dim
    keys = BaseLayer(size, heads.size, unit=heads.head_dim)
    yield "self_attn.q_proj", BaseLayer(size, queries * (2 if model.has_output_gate else 1))
    if model.has_kv(layer):
        yield "self_attn.k_proj", keys
        if model.gemma4 is None or not model.gemma4.projects_once(model.attention[layer]):
            yield "self_attn.v_proj", keys
    yield "self_attn.o_proj", BaseLayer(queries, size, Split.INPUTS)


def _latent_attention(model: ModelConfig) -> Iterator[tuple[str, BaseLayer]]:
    latent = model.latent
    assert latent is not None
    size = model.hidden_size
    queries = model.num_heads * latent.qk_head_dim
    if latent.q_lora_rank:
        yield "self_attn.q_a_proj", BaseLayer(size, latent.q_lora_rank, Split.WHOLE)
        yield "self_attn.q_b_proj", BaseLayer(latent.q_lora_rank, queries)
    else:
        yield "self_attn.q_proj", BaseLayer(size, queries)
    yield "self_attn.kv_a_proj_with_mqa", BaseLayer(size, latent.row_size, Split.WHOLE)
    yield "self_attn.o_proj", BaseLayer(model.num_heads * latent.v_head_dim, size, Split.INPUTS)


def _delta_net(model: ModelConfig) -> Iterator[tuple[str, BaseLayer]]:
    state = model.state
    assert isinstance(state, GatedDeltaSpec)
    size = model.hidden_size
    values = state.value_heads * state.value_dim
    if model.architecture in _MERGED_INPUTS:
        yield "linear_attn.in_proj_qkvz", BaseLayer(size, state.channels + values)
        yield "linear_attn.in_proj_ba", BaseLayer(size, 2 * state.value_heads)
    else:
        yield "linear_attn.in_proj_qkv", BaseLayer(size, state.channels)
        yield "linear_attn.in_proj_z", BaseLayer(size, values)
        yield "linear_attn.in_proj_b", BaseLayer(size, state.value_heads)
        yield "linear_attn.in_proj_a", BaseLayer(size, state.value_heads)
    yield "linear_attn.out_proj", BaseLayer(values, size, Split.INPUTS)


def _mlp(model: ModelConfig, layer: int) -> Iterator[tuple[str, BaseLayer]]:
    moe = model.moe
    gemma4 = model.gemma4
    if moe is None or moe.is_dense(layer) or gemma4 is not None:
        wide = gemma4 is not None and gemma4.wide_mlp and not model.has_kv(layer)
        yield from _gated("mlp", model.hidden_size, model.intermediate_size * (2 if wide else 1))
    elif moe.shared_intermediate_size:
        name = "shared_expert" if model.architecture in _SHARED_EXPERT else "shared_experts"
        yield from _gated(f"mlp.{name}", model.hidden_size, moe.shared_intermediate_size)
    if gemma4 is not None and gemma4.size_per_layer:
        yield "per_layer_input_gate", BaseLayer(model.hidden_size, gemma4.size_per_layer, Split.WHOLE)
        yield "per_layer_projection", BaseLayer(gemma4.size_per_layer, model.hidden_size, Split.WHOLE)


def _gated(name: str, size: int, inner: int) -> Iterator[tuple[str, BaseLayer]]:
    yield f"{name}.gate_proj", BaseLayer(size, inner)
    yield f"{name}.up_proj", BaseLayer(size, inner)
    yield f"{name}.down_proj", BaseLayer(inner, size, Split.INPUTS)
