"""Decide whether a node keeps quantized weights in their format in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from math import prod
from typing import NamedTuple

import msgspec

from pdserve.checkpoint.quantized_weights import CheckpointWeights, QuantizedWeight
from pdserve.config.node_config import DeviceInfo
from pdserve.config.parallel import ParallelConfig
from pdserve.config.resolution.declared_forms import declared_forms
from pdserve.config.runner_oracle import Decision
from pdserve.kv.layout import DTYPE_BYTES
from pdserve.model.latent import LatentConfig
from pdserve.model.model_config import ModelConfig
from pdserve.model.quantization.at_load import at_load_form, is_at_load
from pdserve.model.quantization.kept_weights import (
    EXPERTS,
    FUSED_EXPERTS,
    HEAD,
    MERGED,
    MXFP4_BLOCK,
    form_of,
    form_of_rule,
)
from pdserve.model.quantization.layer_form import LayerForm
from pdserve.model.quantization.weight_formats import UNQUANTIZED

_MEASURED = (9, 0)  # compute capability for which docs/numbers.md has figures
_FP8_EXPERT_GROUPS = (0, 32, 64, 128)  # inputs that share a scale in the grouped products of experts; 0: all
_ONE_BY_ONE = "V2 keeps experts that are stored one by one; one tensor has all of a layer"
_ROTATED = ("q_proj", "q_b_proj", "kv_a_proj_with_mqa")  # projections of latent attention
_KINDS = "unquantized, FP8, MXFP4, NVFP4 and 4-bit integer weights"


class Member(NamedTuple):
    """A stored weight of a product."""

    name: str
    part: str  # projection, or EXPERTS
    num_weights: int
    stored_bytes: int
    form: LayerForm | None  # None: V2 keeps no such weights
    problem: str = ""  # why it keeps none
    is_quantized: bool = True


class Dequantized(NamedTuple):
    """Weights that V2 dequantizes for one reason."""

    reason: str
    parts: tuple[str, ...]  # names of modules
    num_tensors: int
    num_weights: int
    stored_bytes: int


class KeptLayers(NamedTuple):
    """The layers that V2 keeps quantized. ``forms`` are by layer and projection, as "3.q_proj" or "3.experts"."""

    forms: dict[str, LayerForm]
    dequantized: tuple[Dequantized, ...] = ()
    members: tuple[tuple[Member, LayerForm | None], ...] = ()  # stored weights, with their form in memory

    def bytes_per_weight(self, dtype: str, experts: bool) -> float:
        """Return the mean of linear layers, or of experts, where ``dtype`` is that of dequantized weights."""
        members = ((member, form) for member, form in self.members if member.part != HEAD)
        chosen = [(member, form) for member, form in members if (member.part == EXPERTS) == experts]
        if chosen:
            total = sum(member.num_weights for member, _ in chosen)
            return sum(member.num_weights * _bytes(form, dtype) for member, form in chosen) / max(1, total)
        forms = [form for key, form in self.forms.items() if key.endswith(f".{EXPERTS}") == experts]
        return sum(_bytes(form, dtype) for form in forms) / len(forms) if forms else float(DTYPE_BYTES[dtype])

    def notes(self, dtype: str, weight_format: str) -> Iterator[str]:
        """Say what is dequantized, why, and what it costs."""
        what = "not quantized" if is_at_load(weight_format) else "dequantized when loaded"
        for reason, parts, num_tensors, num_weights, stored_bytes in self.dequantized:
            in_memory = num_weights * DTYPE_BYTES[dtype]
            yield (
                f"{what}: {', '.join(parts)} ({num_tensors} weights): {stored_bytes / 2**30:.2f} GiB stored "
                f"take {in_memory / 2**30:.2f} GiB of memory in {dtype}; {reason}"
            )


def _bytes(form: LayerForm | None, dtype: str) -> float:
    return float(DTYPE_BYTES[dtype]) if form is None else form.bytes_per_weight


def keep_layers(model: ModelConfig, parallel: ParallelConfig, weights: CheckpointWeights | None = None) -> KeptLayers:
    """Choose for each layer whether V2 keeps its weights quantized. Without ``weights`` config.json alone decides."""
    if model.weight_format == UNQUANTIZED or model.gemma4 is not None:
        return KeptLayers({})
    if weights is None:
        forms = {
            f"{layer}.{part}": form
            for (layer, part), form in declared_forms(model).items()
            if not _problem(model, parallel, layer, part, form)
        }
        return KeptLayers(forms)
    products: dict[tuple[int, str], list[Member]] = {}
    for member, layer in _members(model, weights):
        products.setdefault((layer, MERGED.get(member.part, member.part)), []).append(member)
    forms = {}
    members: list[tuple[Member, LayerForm | None]] = []
    refused: dict[str, list[Member]] = {}
    if others := list(_others(model, weights)):
        refused["V2 keeps linear layers and experts"] = others
    for (layer, _), parts in products.items():
        reason = "" if any(part.is_quantized for part in parts) else UNQUANTIZED
        reason = reason or _different(parts) or next(filter(None, _problems(model, parallel, layer, parts)), "")
        for part in parts:
            members.append((part, None if reason else part.form))
            if not reason and part.form is not None:
                forms[f"{layer}.{part.part}"] = part.form
            elif part.is_quantized:
                refused.setdefault(reason, []).append(part)
    return KeptLayers(forms, tuple(_summary(reason, parts) for reason, parts in refused.items()), tuple(members))


def _summary(reason: str, members: list[Member]) -> Dequantized:
    return Dequantized(
        reason=reason,
        parts=tuple(dict.fromkeys(member.part for member in members)),
        num_tensors=len(members),
        num_weights=sum(member.num_weights for member in members),
        stored_bytes=sum(member.stored_bytes for member in members),
    )


def _others(model: ModelConfig, weights: CheckpointWeights) -> Iterator[Member]:
    """Yield the quantized weights of other modules, such as the head."""
    for name, weight in weights.quantized.items():
        if model.layer_part(name) is None:
            part = name.removesuffix(".weight").rpartition(".")[2]
            yield Member(name, part, prod(weight.shape), weight.stored_bytes, None)


def _members(model: ModelConfig, weights: CheckpointWeights) -> Iterator[tuple[Member, int]]:
    """Yield the weights of linear layers and experts with their layer."""
    at_load = at_load_form(model.weight_format)
    for name, weight in weights.quantized.items():
        part = model.layer_part(name)
        if part is not None:
            problem = _problem_of_stored(name, weight)
            form = None if problem else form_of(weight)
            yield Member(name, part[1], prod(weight.shape), weight.stored_bytes, form, problem), part[0]
    for name, tensor in weights.plain.items():
        part = model.layer_part(name)
        if part is not None and part[1] != HEAD:
            problem = _ONE_BY_ONE if name.endswith(FUSED_EXPERTS) or len(tensor.shape) != 2 else ""
            if at_load is not None and not problem:
                problem = _problem_of_groups(at_load, tensor.shape[1])
            form = None if problem else at_load
            size = tensor.end - tensor.begin
            yield Member(name, part[1], prod(tensor.shape), size, form, problem, at_load is not None), part[0]


def _problem_of_stored(name: str, weight: QuantizedWeight) -> str:
    """Say why V2 keeps no weight that is stored so; empty if it can."""
    form = form_of_rule(weight.rule, weight.scale_dtype)
    if form is None:
        return f"V2 keeps {_KINDS}; these are {weight.rule.bits}-bit numbers, {weight.rule.packing}"
    if form.kind != "mxfp4" and name.endswith(FUSED_EXPERTS):
        return _ONE_BY_ONE
    return _problem_of_groups(form, weight.shape[-1])


def _problem_of_groups(form: LayerForm, inputs: int) -> str:
    if not form.is_four_bits or form.fits(inputs):
        return ""
    return (
        f"V2 keeps 4-bit weights in whole groups of 32, 64, 128 … or all inputs, and of 16 in NVFP4; these have "
        f"{inputs} inputs in groups of {form.group or inputs}, with scales in {form.scale_dtype}"
    )


def _different(members: list[Member]) -> str:
    """Say why weights of one product have no common form."""
    plain = next((member.name for member in members if not member.is_quantized), None)
    if plain is not None:
        return f"{plain.removesuffix('.weight').rpartition('.')[2]} beside them is stored unquantized"
    problem = next((member.problem for member in members if member.form is None), None)
    if problem is not None:
        return problem
    forms = {member.form for member in members}
    return "" if len(forms) == 1 else "weights that are one product have different scales"


def _problems(model: ModelConfig, parallel: ParallelConfig, layer: int, members: list[Member]) -> Iterator[str]:
    parts = dict.fromkeys(member.part for member in members)
    form = members[0].form
    assert form is not None
    return (_problem(model, parallel, layer, part, form) for part in parts)


def _problem(model: ModelConfig, parallel: ParallelConfig, layer: int, part: str, form: LayerForm) -> str:
    """Say why a layer cannot keep weights in a form; empty if it can."""
    if part == EXPERTS and (problem := _experts_problem(model, form)):
        return problem
    if part == HEAD and (not form.is_four_bits or form.has_order):
        return "V2 keeps heads in 4 bits, in groups of consecutive inputs"
    if model.latent is not None and form.kind == "fp8":
        problem = _rotated_problem(model.latent, model.num_heads, form.rows, part)
        if problem:
            return problem
    if form.has_order and model.latent is not None and part in _ROTATED:
        return f"V2 keeps {part} whose groups are of consecutive inputs; its rotated outputs are reordered"
    size = _sliced_inputs(model, parallel, layer, part)
    if size is None or form.kind == "mxfp4":
        return ""
    name = "the experts' down_proj" if part == EXPERTS else part
    share = size // parallel.tp
    if form.has_order:
        return f"tp {parallel.tp} cuts {name}, whose groups are of inputs in another order; tp 1 keeps it"
    unit = form.group or (2 if form.is_four_bits else 1)
    if share % unit:
        fits = next(
            tp for tp in range(parallel.tp - 1, 0, -1) if size % tp == 0 and (tp == 1 or size // tp % unit == 0)
        )
        return f"{_cut(parallel, name, share, unit)}; tp {fits} keeps it"
    return ""


def kept_problem(
    model: ModelConfig, parallel: ParallelConfig, kept: KeptLayers, unquantized: Iterable[str] = ()
) -> str:
    """Say why V2 cannot run a model with quantized weights; empty if it can, or if none are quantized.

    ``unquantized`` names the weights that are stored so.
    """
    if model.weight_format == UNQUANTIZED:
        return ""
    if model.gemma4 is not None:
        return f"V2 runs Gemma 4 with unquantized weights; these are {model.weight_format}"
    if any(form.kind == "mxfp4" for form in (*kept.forms.values(), *declared_forms(model).values())):
        return _mxfp4_problem(model, parallel, unquantized)
    if kept.forms:
        return ""
    reasons = "; ".join(dict.fromkeys(item.reason for item in kept.dequantized))
    return f"V2 runs {_KINDS}; these are {model.weight_format}" + (f" ({reasons})" if reasons else "")


def kept_doubt(model: ModelConfig, kept: KeptLayers, dtype: str, device: DeviceInfo) -> str:
    """Say why V2 may be slower than V1 with quantized weights; empty where docs/numbers.md shows that it is faster.

    Elsewhere V2 multiplies dequantized FP8 weights, or no figures exist. Without a GPU, weights of 4 bits are
    dequantized for each use.
    """
    if model.weight_format == UNQUANTIZED or is_at_load(model.weight_format):
        return ""
    if (dtype == "bfloat16" and device.capability == _MEASURED) or not kept.forms:
        return ""
    if all(form.is_four_bits for form in kept.forms.values()):
        if device.kind == "cuda":
            return ""
        return "V2 is the default for 4-bit weights on CUDA GPUs only; on CPUs V1 dequantizes them when it loads them"
    return (
        f"V2 is the default for {model.weight_format} weights in bfloat16 on GPUs of compute capability "
        f"{'.'.join(map(str, _MEASURED))} (Hopper) only; this is {dtype} on {device.name}"
    )


def _cut(parallel: ParallelConfig, name: str, share: int, block: int) -> str:
    return f"tp {parallel.tp} gives {name} {share} inputs per shard, which cuts its scale blocks of {block}"


def _mxfp4_problem(model: ModelConfig, parallel: ParallelConfig, unquantized: Iterable[str]) -> str:
    moe = model.moe
    if moe is None or not moe.has_bias:
        return f"V2 keeps the MXFP4 experts of gpt-oss; this is {model.architecture}"
    plain = next((name for name in sorted(unquantized) if name.endswith(FUSED_EXPERTS)), None)
    if plain is not None:
        return f"V2 needs all experts in MXFP4, but {plain} is stored unquantized"
    inner = moe.intermediate_size * parallel.ep // parallel.tp
    for name, share in (("gate_up_proj", model.hidden_size), ("down_proj", inner)):
        if share % MXFP4_BLOCK:
            return _cut(parallel, f"the experts' {name}", share, MXFP4_BLOCK)
    return ""


def _rotated_problem(latent: LatentConfig, num_heads: int, block: int, part: str) -> str:
    """Outputs that change places keep their scale only within a block of ``block`` outputs."""
    size = latent.qk_rope_head_dim
    queries = "q_b_proj" if latent.q_lora_rank else "q_proj"
    firsts = {
        queries: [head * latent.qk_head_dim + latent.qk_nope_head_dim for head in range(num_heads)],
        "kv_a_proj_with_mqa": [latent.kv_lora_rank],
    }
    for first in firsts.get(part, ()):
        if latent.rope_interleave and block > 1 and first % block + size > block:
            return (
                f"V2 reorders the {size} rotated outputs of {part} from {first} on, which lie in two scale blocks of "
                f"{block}"
            )
    return ""


def _experts_problem(model: ModelConfig, form: LayerForm) -> str:
    if form.kind == "mxfp4":
        return ""
    if model.moe is not None and model.moe.has_bias:
        return f"V2 keeps {model.weight_format} experts without biases; {model.architecture} has some"
    if form.kind == "fp8" and form.group not in _FP8_EXPERT_GROUPS:
        sizes = ", ".join(map(str, _FP8_EXPERT_GROUPS[1:]))
        return f"V2 keeps experts with a scale per {sizes} or all inputs; {model.weight_format} has {form.group}"
    return "V2 keeps experts whose groups are of consecutive inputs" if form.has_order else ""


def _sliced_inputs(model: ModelConfig, parallel: ParallelConfig, layer: int, part: str) -> int | None:
    """Return the inputs of a projection that tensor shards divide; None if each shard has all of them."""
    moe = model.moe
    if parallel.tp == 1:
        return None
    if part == "o_proj":
        return model.value_size
    if part == "out_proj" and model.state is not None:
        return model.state.out_inputs
    if part == EXPERTS and moe is not None and parallel.ep == 1:
        return moe.intermediate_size
    if part != "down_proj":
        return None
    return model.intermediate_size if moe is None or moe.is_dense(layer) else moe.shared_intermediate_size


def keep_quantized(model: ModelConfig, decision: Decision, kept: KeptLayers, dtype: str) -> ModelConfig:
    """Return the model as the chosen runner holds it in memory."""
    if decision.runner != "V2" or not kept.forms:
        return model
    return msgspec.structs.replace(
        model,
        layer_forms=kept.forms,
        linear_bytes=kept.bytes_per_weight(dtype, experts=False),
        expert_bytes=kept.bytes_per_weight(dtype, experts=True),
    )
