"""The text model of a multimodal checkpoint, which a node serves alone: its fields in config.json and its tensors.

    config.json   {"model_type": "mistral3", "text_config": {"model_type": "mistral", …}, "vision_config": {…}}
                  {"model_type": "qwen3_5_moe_text", …, "architectures": ["Qwen3_5MoeForConditionalGeneration"]}
    tensors       language_model.model.layers.0…   language_model.lm_head.weight   vision_tower…     as published
                  model.language_model.layers.0…   lm_head.weight                  model.visual…     newer ones

The second form is that of text parts which tools have saved alone, under the class of the whole.

Without images the text model computes the same alone, for the kinds here: tests/runner/test_published_checkpoints.py
compares their tokens with those of the whole model.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pdserve.checkpoint.safetensors_header import Tensor
from pdserve.checkpoint.weight_files import read_headers
from pdserve.model.config_fields import ConfigFields
from pdserve.model.from_transformers.library_configs import library_defaults

#: Kinds of multimodal models, and the kind of their text model where text_config names none.
MULTIMODAL: Mapping[str, str] = {
    "exaone4_5": "exaone4",
    "gemma3": "gemma3_text",
    "gemma3n": "gemma3n_text",
    "gemma4": "gemma4_text",
    "gemma4_unified": "gemma4_unified_text",
    "glm4v_moe": "glm4v_moe_text",
    "internvl": "qwen2",
    "kimi_k25": "deepseek_v3",
    "llama4": "llama4_text",
    "llava": "llama",
    "mistral3": "mistral",
    "qwen2_5_vl": "qwen2_5_vl_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
    "qwen3_vl": "qwen3_vl_text",
    "qwen3_vl_moe": "qwen3_vl_moe_text",
}
#: First names of kinds of text models, which the library replaces in a multimodal config.
_RENAMED: Mapping[str, str] = {"exaone4_5_text": "exaone4", "kimi_k2": "deepseek_v3"}
#: Model type and architecture of native families, by the kind of a text model.
_NATIVE: Mapping[str, tuple[str, str]] = {
    "deepseek_v3": ("deepseek_v3", "DeepseekV3ForCausalLM"),
    "gemma4_text": ("gemma4_text", "Gemma4ForCausalLM"),
    "gemma4_unified_text": ("gemma4_text", "Gemma4ForCausalLM"),
    "glm4v_moe_text": ("glm4_moe", "Glm4MoeForCausalLM"),
    "llama": ("llama", "LlamaForCausalLM"),
    "ministral3": ("ministral3", "Ministral3ForCausalLM"),
    "mistral": ("mistral", "MistralForCausalLM"),
    "mistral4": ("mistral4", "Mistral4ForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen2_5_vl_text": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_5_text": ("qwen3_5_text", "Qwen3_5ForCausalLM"),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM"),
    "qwen3_moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "qwen3_vl_text": ("qwen3", "Qwen3ForCausalLM"),
    "qwen3_vl_moe_text": ("qwen3_moe", "Qwen3MoeForCausalLM"),
}
#: Fields that the library's layers do not read, by the values that they compute with.
_BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "gemma4_unified_text": {"hidden_size_per_layer_input": 0, "enable_moe_block": False},
    "qwen3_vl_moe_text": {"norm_topk_prob": True},
}
#: Kinds whose first configs have the fields of the text model beside those of the whole.
_FLAT = frozenset({"qwen2_5_vl"})
_EXPERTS = ("num_experts", "num_local_experts")  # names of one field
#: Multimodal architectures whose checkpoints store fused experts with inputs before outputs.
TRANSPOSED_EXPERTS = frozenset({"Qwen3VLMoeForConditionalGeneration"})
_WHOLE = "ForConditionalGeneration"  # the end of the architecture of a multimodal model
_ROPE = ("rope_parameters", "rope_scaling")
_IMAGE_ROPE = ("mrope_section", "mrope_interleaved")  # sections of image positions; text has a single position
_PREFIXES = (
    ("language_model.model.", "model."),
    ("model.language_model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
    *((name, name) for name in ("model.embed_tokens.", "model.layers.", "model.norm.")),  # Qwen2.5-VL, as published
    ("mtp.", "mtp."),  # a layer that predicts further tokens, where the text model's checkpoint has it, too
)


def text_kind(values: Mapping[str, Any]) -> str:
    """Return the model type of the text model that a config describes, multimodal or not."""
    kind = str(values.get("model_type"))
    text = values.get("text_config")
    if kind in _FLAT and text is None:
        return MULTIMODAL[kind]
    if kind not in MULTIMODAL or not isinstance(text, dict):
        return kind
    kind_of_text = str(text.get("model_type") or MULTIMODAL[kind])
    return _RENAMED.get(kind_of_text, kind_of_text)


def take_text_part(fields: ConfigFields, native: bool) -> str:
    """Replace the fields of a multimodal config by those of its text model; return the whole's architecture.

    Nothing changes, and the result is empty, for other configs. ``native`` lets a native family serve the text model,
    and is needed for one that was saved alone.
    """
    whole = fields.values
    kind = str(whole.get("model_type"))
    names = whole.get("architectures")
    if not isinstance(names, list) or not names:
        return ""
    alone = native and kind in _NATIVE and str(names[0]).endswith(_WHOLE)
    is_flat = kind in _FLAT and whole.get("text_config") is None
    text = whole if alone or is_flat else whole.get("text_config")
    if not isinstance(text, dict) or (kind not in MULTIMODAL and not alone):
        return ""
    kind_of_text = text_kind(whole)
    dtype = whole.get("dtype") or whole.get("torch_dtype") or text.get("dtype") or text.get("torch_dtype")
    of_whole = {name: whole[name] for name in ("eos_token_id", "quantization_config") if whole.get(name) is not None}
    tied = whole.get("tie_word_embeddings", library_defaults(kind).get("tie_word_embeddings"))
    model_type = kind_of_text
    architectures = names
    if native and kind_of_text in _NATIVE:
        model_type, architecture = _NATIVE[kind_of_text]
        architectures = [architecture]
    fields.values = {
        **_defaults(kind_of_text, text),
        **text,
        **_BUILT_IN.get(kind_of_text, {}),
        **of_whole,
        "architectures": architectures,
        "dtype": dtype,
        "model_type": model_type,
        "tie_word_embeddings": tied is True and not _has_head(fields.path.parent),
    }
    for name in _ROPE:
        if isinstance(fields.values.get(name), dict):
            fields.values[name] = _text_rope(fields.values[name])
    return str(names[0])


def _defaults(kind: str, text: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the library's defaults of a text model, without the number of experts if its config has any name of it."""
    has_experts = any(text.get(name) is not None for name in _EXPERTS)
    return {name: value for name, value in library_defaults(kind).items() if not (has_experts and name in _EXPERTS)}


def _text_rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value for name, value in rope.items() if name not in _IMAGE_ROPE}
    return {name: "default" if value == "mrope" else value for name, value in plain.items()}


def _has_head(model_dir: Path) -> bool:
    """Whether the checkpoint stores a head: the library uses it, whatever its config says of tied embeddings."""
    if not any(model_dir.glob("*.safetensors")):
        return False
    return any(
        causal_name(name) == "lm_head.weight" for tensors in read_headers(model_dir).values() for name in tensors
    )


def causal_name(tensor: str) -> str | None:
    """Return the name that a tensor of a multimodal checkpoint has in the text model; None: it is of another part."""
    return next((new + tensor.removeprefix(old) for old, new in _PREFIXES if tensor.startswith(old)), None)


def text_headers(headers: Mapping[Path, Mapping[str, Tensor]]) -> dict[Path, dict[str, Tensor]]:
    """Return the tensors of the text model, by the names that the multimodal checkpoint gives them."""
    return {
        path: {name: tensor for name, tensor in tensors.items() if causal_name(name) is not None}
        for path, tensors in headers.items()
    }
