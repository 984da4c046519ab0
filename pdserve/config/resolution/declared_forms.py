"""The forms of a model's layers as config.json alone declares them, for random weights and before any are at hand."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from pdserve.model.model_config import ModelConfig
from pdserve.model.quantization.at_load import at_load_form
from pdserve.model.quantization.kept_weights import EXPERTS, LINEAR_PARTS, form_of_rule
from pdserve.model.quantization.layer_form import LayerForm
from pdserve.model.quantization.weight_formats import storage_rules


def declared_forms(model: ModelConfig) -> dict[tuple[int, str], LayerForm]:
    """Return the form of each layer's projections, and of its experts. Layers that are to stay plain have none.

    Lists of modules that stay plain are not read: a stored tensor itself says whether it is quantized.
    """
    layers = model.quantization.get("quantized_layers")
    if model.weight_format == "modelopt" and isinstance(layers, dict):
        return dict(_by_layer(model, layers))
    form = at_load_form(model.weight_format) or _first_form(model.weight_format, model.quantization)
    if form is None:
        return {}
    parts = () if form.kind == "mxfp4" else LINEAR_PARTS
    parts += () if model.moe is None else (EXPERTS,)
    numbers = range(model.num_layers + model.num_nextn_layers)
    return {(layer, part): form for layer in numbers for part in parts if _fits(model, layer, part, form)}


def _first_form(weight_format: str, options: Mapping[str, Any]) -> LayerForm | None:
    """Return the form of the first rule; None if V2 keeps no such weights."""
    forms = [form_of_rule(rule) for rule in storage_rules(weight_format, options) or ()]
    return forms[0] if forms else None


def _fits(model: ModelConfig, layer: int, part: str, form: LayerForm) -> bool:
    """Whether the inputs of a projection are whole groups; a group of FP8 or MXFP4 may be a part of one."""
    if not form.is_four_bits:
        return True
    moe = model.moe
    widths = [model.hidden_size]
    if part == "o_proj":
        widths = [model.value_size]
    elif part == "out_proj" and model.state is not None:
        widths = [model.state.out_inputs]
    elif part == "q_b_proj" and model.latent is not None:
        widths = [model.latent.q_lora_rank or model.hidden_size]
    elif part == "down_proj":
        is_dense = moe is None or moe.is_dense(layer)
        widths = [model.intermediate_size if is_dense or moe is None else moe.shared_intermediate_size]
    elif part == EXPERTS and moe is not None:
        widths.append(moe.intermediate_size)
    return all(map(form.fits, widths))


def _by_layer(model: ModelConfig, layers: Mapping[str, Any]) -> Iterator[tuple[tuple[int, str], LayerForm]]:
    """Yield the forms of ModelOpt's mixed precision, which names modules, and all experts of a layer at once."""
    for name, options in layers.items():
        part = model.layer_part(f"{name}.weight".replace(".experts.weight", ".experts.0.down_proj.weight"))
        form = _first_form("modelopt", options)
        if part is not None and form is not None:
            yield part, form
