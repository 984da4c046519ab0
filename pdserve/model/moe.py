"""Mixtures of experts as config.json describes them: sizes, and how a router chooses experts."""

from __future__ import annotations

from typing import Any

import msgspec

from pdserve.model.config_fields import REMEDY, ConfigFields


class MoEConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The layers with experts of a model. Names are vLLM's.

    A router scores all experts, adds the correction bias, keeps ``topk_group`` of ``num_expert_group`` groups by the
    sum of their ``best_of_group`` best scores, and chooses the ``top_k`` best experts in them. Their weights are the
    scores without the bias, divided by their sum if ``renormalize``, times ``routed_scaling_factor``.
    """

    num_experts: int
    top_k: int  # experts per token
    intermediate_size: int  # per expert
    shared_intermediate_size: int = 0  # all shared experts together; they process every token. 0: none
    scoring: str = "softmax"  # or sigmoid
    renormalize: bool = True
    has_correction_bias: bool = False
    num_expert_group: int = 1
    topk_group: int = 1
    best_of_group: int = 2
    routed_scaling_factor: float = 1.0
    has_bias: bool = False  # the router and the experts have biases, as in gpt-oss
    swiglu_alpha: float = 1.0  # factor in the sigmoid, if ``swiglu_limit`` is set
    swiglu_limit: float | None = None  # gates above and ups beyond are clamped, as in gpt-oss; None: silu and product
    has_shared_gate: bool = False  # the result of the shared experts is multiplied by the sigmoid of a learned score
    dense_layers: tuple[int, ...] = ()  # layers with an MLP in place of experts, ascending

    def is_dense(self, layer: int) -> bool:
        """``layer`` counts from 0 in the whole model."""
        return layer in self.dense_layers


def qwen3_moe(fields: ConfigFields, num_layers: int) -> MoEConfig:
    step = fields.integer("decoder_sparse_step", 1)
    mlp_only = fields.get("mlp_only_layers") or []
    if not isinstance(mlp_only, list):
        raise fields.error(f"has mlp_only_layers that are not a list. {REMEDY}")
    dense = tuple(layer for layer in range(num_layers) if layer in mlp_only or (layer + 1) % step)
    return _checked(
        fields,
        MoEConfig(
            **_sizes(fields, "moe_intermediate_size"),
            renormalize=fields.flag("norm_topk_prob"),
            dense_layers=dense,
        ),
    )


def qwen3_next(fields: ConfigFields, num_layers: int) -> MoEConfig:
    moe = qwen3_moe(fields, num_layers)
    return msgspec.structs.replace(moe, **_gated_shared_expert(fields))


def qwen3_5_moe(fields: ConfigFields, num_layers: int) -> MoEConfig:
    sizes = _sizes(fields, "moe_intermediate_size")
    return _checked(fields, MoEConfig(**sizes, **_gated_shared_expert(fields)))


def mixtral(fields: ConfigFields, num_layers: int) -> MoEConfig:
    return _checked(fields, MoEConfig(**_sizes(fields, "intermediate_size")))


def glm4_moe(fields: ConfigFields, num_layers: int) -> MoEConfig:
    sizes = _sizes(fields, "moe_intermediate_size")
    return _checked(
        fields,
        MoEConfig(
            **sizes,
            shared_intermediate_size=sizes["intermediate_size"] * fields.integer("n_shared_experts", 1, least=0),
            scoring="sigmoid",
            renormalize=fields.flag("norm_topk_prob"),
            has_correction_bias=True,
            num_expert_group=fields.integer("n_group", 1),
            topk_group=fields.integer("topk_group", 1),
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.0, 1e-6, 1e6),
            dense_layers=_first_layers(fields, num_layers),
        ),
    )


def deepseek_v2(fields: ConfigFields, num_layers: int) -> MoEConfig:
    """Return softmax routing. Groups count only with the method that is limited to some, by their best expert."""
    fields.choice("scoring_func", fields.get("scoring_func", "softmax"), ("softmax",))
    method = fields.choice("topk_method", fields.get("topk_method"), ("greedy", "group_limited_greedy"))
    limited = method != "greedy"
    groups = [fields.integer(name) if limited else 1 for name in ("n_group", "topk_group")]
    for name in ("n_group", "topk_group"):
        fields.given(name)  # marks the field as read, although it is not used
    if fields.flag("norm_topk_prob"):
        raise fields.error(f"has norm_topk_prob = true, which no layer of this architecture computes. {REMEDY}")
    sizes = _sizes(fields, "moe_intermediate_size")
    return _checked(
        fields,
        MoEConfig(
            **sizes,
            shared_intermediate_size=sizes["intermediate_size"] * fields.integer("n_shared_experts"),
            renormalize=False,
            num_expert_group=groups[0],
            topk_group=groups[1],
            best_of_group=1,
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.0, 1e-6, 1e6),
            dense_layers=_first_layers(fields, num_layers),
        ),
    )


def mistral4(fields: ConfigFields, num_layers: int) -> MoEConfig:
    """Return DeepSeek-V3's routing by softmax, without a correction bias."""
    moe = glm4_moe(fields, num_layers)
    return msgspec.structs.replace(moe, scoring="softmax", has_correction_bias=False)


def deepseek_v3(fields: ConfigFields, num_layers: int) -> MoEConfig:
    fields.choice("scoring_func", fields.get("scoring_func", "sigmoid"), ("sigmoid",))
    fields.choice("topk_method", fields.get("topk_method", "noaux_tc"), ("noaux_tc",))
    return glm4_moe(fields, num_layers)


def glm4_moe_lite(fields: ConfigFields, num_layers: int) -> MoEConfig:
    """Return GLM-4.5's routing with dense layers by ``mlp_layer_types``, else only the first one."""
    fields.choice("topk_method", fields.get("topk_method", "noaux_tc"), ("noaux_tc",))
    types = fields.get("mlp_layer_types", ["dense"] + ["sparse"] * (num_layers - 1))
    if not isinstance(types, list) or len(types) != num_layers:
        raise fields.error(f"has mlp_layer_types that are no list of {num_layers} layers. {REMEDY}")
    for kind in types:
        fields.choice("mlp layer type", kind, ("dense", "sparse"))
    dense = tuple(layer for layer in range(num_layers) if types[layer] == "dense")
    if fields.given("first_k_dense_replace") not in (None, len(dense)):
        raise fields.error(f"has another first_k_dense_replace than dense layers, {len(dense)}. {REMEDY}")
    return msgspec.structs.replace(glm4_moe(fields, num_layers), dense_layers=dense)


def lfm2_moe(fields: ConfigFields, num_layers: int) -> MoEConfig:
    return _checked(
        fields,
        MoEConfig(
            **_sizes(fields, "moe_intermediate_size"),
            scoring="sigmoid",
            renormalize=fields.flag("norm_topk_prob"),
            has_correction_bias=fields.flag("use_expert_bias"),
            routed_scaling_factor=fields.number("routed_scaling_factor", 1.0, 1e-6, 1e6),
            dense_layers=tuple(range(min(fields.integer("num_dense_layers", least=0), num_layers))),
        ),
    )


def minimax_m2(fields: ConfigFields, num_layers: int) -> MoEConfig:
    fields.choice("scoring_func", fields.get("scoring_func", "sigmoid"), ("sigmoid",))
    sizes = _sizes(fields, "intermediate_size")
    return _checked(fields, MoEConfig(**sizes, scoring="sigmoid", has_correction_bias=True))


def gpt_oss(fields: ConfigFields, num_layers: int) -> MoEConfig:
    """Return softmax over the chosen experts, which equals softmax over all, divided by the sum of the chosen ones."""
    return _checked(
        fields,
        MoEConfig(
            **_sizes(fields, "intermediate_size"),
            has_bias=True,
            swiglu_alpha=fields.number("swiglu_alpha", 1.702, 1e-6, 1e6),
            swiglu_limit=fields.number("swiglu_limit", 7.0, 1e-6, 1e6),
        ),
    )


def granite_moe(fields: ConfigFields, num_layers: int) -> MoEConfig:
    """Return softmax over the chosen experts, as gpt-oss has it, beside a shared MLP."""
    shared = fields.integer("shared_intermediate_size")
    sizes = _sizes(fields, "intermediate_size")
    return _checked(fields, MoEConfig(**sizes, shared_intermediate_size=shared))


def nemotron_moe(fields: ConfigFields, dense_layers: tuple[int, ...]) -> MoEConfig:
    """Return GLM-4.5's routing with a shared expert of a size of its own."""
    config = MoEConfig(
        **_sizes(fields, "moe_intermediate_size"),
        shared_intermediate_size=fields.integer("moe_shared_expert_intermediate_size"),
        scoring="sigmoid",
        renormalize=fields.flag("norm_topk_prob"),
        has_correction_bias=True,
        num_expert_group=fields.integer("n_group", 1),
        topk_group=fields.integer("topk_group", 1),
        routed_scaling_factor=fields.number("routed_scaling_factor", 1.0, 1e-6, 1e6),
        dense_layers=dense_layers,
    )
    return _checked(fields, config)


def _first_layers(fields: ConfigFields, num_layers: int) -> tuple[int, ...]:
    return tuple(range(min(fields.integer("first_k_dense_replace", 1, least=0), num_layers)))


def _sizes(fields: ConfigFields, intermediate_size: str) -> dict[str, Any]:
    names = ("num_experts", "num_local_experts", "n_routed_experts")  # transformers 4 and 5 save different names
    given = {name: fields.integer(name) for name in names if fields.given(name) is not None}
    if len(set(given.values())) > 1:
        raise fields.error(f"has different numbers of experts in {' and '.join(given)}. {REMEDY}")
    name = next(iter(given or [name for name in names if name in fields.defaults]), names[0])
    return {
        "num_experts": fields.integer(name),
        "top_k": fields.integer("num_experts_per_tok"),
        "intermediate_size": fields.integer(intermediate_size),
    }


def _gated_shared_expert(fields: ConfigFields) -> dict[str, Any]:
    return {"shared_intermediate_size": fields.integer("shared_expert_intermediate_size"), "has_shared_gate": True}


def _checked(fields: ConfigFields, moe: MoEConfig) -> MoEConfig:
    groups = moe.num_expert_group
    kept = moe.topk_group
    if moe.num_experts % groups or kept > groups or (groups > 1 and moe.num_experts < 2 * groups):
        raise fields.error(
            f"keeps {kept} of {groups} groups of {moe.num_experts} experts; groups must be of equal size, at least 2. "
            f"{REMEDY}"
        )
    in_groups = moe.num_experts // groups * kept
    if moe.top_k > in_groups:
        raise fields.error(f"chooses {moe.top_k} of {in_groups} experts per token. {REMEDY}")
    return moe
