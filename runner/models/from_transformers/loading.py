"""Build a model of the library transformers. No code of a checkpoint is run."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor

from pdserve.errors import CheckpointError, ConfigError, shown
from pdserve.model.config_fields import ConfigFields
from pdserve.model.pooling import CLASSIFIER
from pdserve.model.text_part import MULTIMODAL
from runner.models.from_transformers.part import ModelPart, take_part
from runner.models.from_transformers.without_values import UnreadSlice
from runner.models.quantization.dequantize import is_padding_bias
from runner.placement import TensorPlacement

_HEAD = "lm_head.weight"
_DEVIATION = 0.02  # standard deviation of random weights
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_LOCAL: dict[str, Any] = {"local_files_only": True, "trust_remote_code": False}

NO_INTERFACE = "its layers do not call a given attention function"

# Errors that the library raises for checkpoints that it cannot read.
LIBRARY_ERRORS: tuple[type[Exception], ...] = (OSError, ValueError, RuntimeError, TypeError, KeyError, IndexError)
LIBRARY_ERRORS += (AttributeError, AssertionError, ImportError)


def build_model(
    model_dir: Path, placement: TensorPlacement, attention: str, part: ModelPart, weights: Mapping[str, Any] | None
) -> Any:
    """Return a part of a checkpoint's causal model on the device; on the device meta nothing is read or drawn.

    ``weights`` has slices of safetensors, dequantized. None: weights are random; they depend on names and shapes, so
    that parts in all processes are parts of one model. Raises ConfigError for a model that cannot use a given attention
    function or has no plan for such a part, CheckpointError for a broken checkpoint.
    """
    _logging: Any = transformers.utils.logging
    _logging.disable_progress_bar()
    _logging.set_verbosity_error()  # the library's warnings name the tensors of other parts; ``_read`` checks them
    model_type = ConfigFields(model_dir / "config.json").get("model_type")
    if isinstance(model_type, str) and model_type not in transformers.CONFIG_MAPPING:
        version = transformers.__version__
        raise ConfigError(f"transformers {version} lacks model type {shown(model_type)}; checkpoints' code is not run")
    try:
        config = transformers.AutoConfig.from_pretrained(model_dir, **_LOCAL)
    except LIBRARY_ERRORS as exc:
        raise CheckpointError(f"transformers cannot read {model_dir}/config.json: {shown(str(exc))}") from exc
    if config.model_type in MULTIMODAL:
        config = _text_config(config, weights)
    model_class = _class_of(config)
    if model_class.config_class is config.sub_configs.get("text_config"):
        config = config.get_text_config()
    vars(config).pop("quantization_config", None)  # weights arrive dequantized
    if any(name.endswith("Model") for name in config.architectures or ()):
        config.tie_word_embeddings = True  # a body was saved alone, to embed: its head is not used
    partial = _partial(model_class, part)
    try:
        if placement.device.type == "meta" and weights is None:
            model = _without_memory(partial, config, placement, attention)
        elif weights is None:
            model = _draw(partial, config, placement, attention, part)
        else:
            model = _read(partial, config, model_dir, placement, attention, weights)
    except LIBRARY_ERRORS as exc:
        if not model_class._supports_attention_backend:
            raise ConfigError(NO_INTERFACE) from exc
        raise CheckpointError(f"transformers cannot load {model_dir}: {shown(str(exc))}") from exc
    model = model.to(placement.device).eval().requires_grad_(False)
    if part.shards is not None:
        part.shards.finish(model)
    return model


def _text_config(config: Any, weights: Mapping[str, Any] | None) -> Any:
    """Return the config of a multimodal model's text model, which has the head that is stored, else a tied one."""
    text = config.get_text_config()
    text.tie_word_embeddings = config.tie_word_embeddings and _HEAD not in (weights or {})
    return text


def _class_of(config: Any) -> Any:
    classifies = any(name.endswith(CLASSIFIER) for name in config.architectures or ())
    mapping: Any = (
        transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING
        if classifies
        else transformers.MODEL_FOR_CAUSAL_LM_MAPPING
    )
    if type(config) in mapping:
        return mapping[type(config)]
    alone = getattr(transformers, type(config).__name__.removesuffix("Config") + "ForCausalLM", None)
    if not classifies and alone is not None:  # Mistral 4: transformers lists it as multimodal only
        return alone
    kind = "sequence classifier" if classifies else "causal language model"
    more = f"; of multimodal ones, text is served for {', '.join(MULTIMODAL)}" if _has_images(config) else ""
    raise ConfigError(f"model type {config.model_type!r} is no {kind} of transformers{more}")


def _has_images(config: Any) -> bool:
    return "vision_config" in config.sub_configs or hasattr(config, "vision_config")


def _partial(model_class: Any, part: ModelPart) -> Any:
    """Return the class of a model that keeps only ``part`` as soon as it is built, before it has any memory."""

    def build(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        self.whole_names = set(self.state_dict())
        if not part.is_whole:
            take_part(self, part)

    return type(model_class.__name__, (model_class,), {"__init__": build, "__module__": model_class.__module__})


def _unread(model_class: Any) -> Any:
    """Return the class of a model whose weights are not read: those that are missing get no memory either."""
    nothing: dict[str, Any] = dict.fromkeys(
        ("_move_missing_keys_from_meta_to_device", "_initialize_missing_keys"), lambda self, *args, **kwargs: None
    )
    return type(model_class.__name__, (model_class,), {"__module__": model_class.__module__, **nothing})


def _without_memory(model_class: Any, config: Any, placement: TensorPlacement, attention: str) -> Any:
    with torch.device("meta"):
        return model_class._from_config(config, dtype=placement.dtype, attn_implementation=attention)


def _read(
    model_class: Any,
    config: Any,
    model_dir: Path,
    placement: TensorPlacement,
    attention: str,
    weights: Mapping[str, Any],
) -> Any:
    """Raises CheckpointError unless each weight has its place, and no place is left."""
    slices = dict(weights)
    if placement.device.type == "meta":
        model_class = _unread(model_class)
        slices = {name: UnreadSlice(weight) for name, weight in slices.items()}
    model, report = model_class.from_pretrained(
        None,
        config=config,
        state_dict=slices,
        dtype=placement.dtype,
        attn_implementation=attention,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # they are refused below, by name
    )
    for kind in ("missing_keys", "mismatched_keys", "unexpected_keys", "error_msgs"):
        odd_names = {_described(key) for key in report.get(kind) or () if not is_padding_bias(str(key), weights)}
        if kind == "unexpected_keys":
            odd_names = {name for name in odd_names if not _is_left_out(name, model)}
        if odd_names:
            names = ", ".join(sorted(odd_names)[:3])
            raise CheckpointError(f"{model_dir} has {kind.replace('_', ' ')}: {names}; config.json is of another model")
    return model


def _described(key: Any) -> str:
    """Return the name of a tensor; with the shapes of the file and of the model if these differ."""
    if isinstance(key, tuple) and len(key) == 3:
        return f"{key[0]} {list(key[1])} in place of {list(key[2])}"
    return str(key)


def _is_left_out(name: str, model: Any) -> bool:
    """Whether a tensor of the checkpoint belongs to another part, or to heads that predict further tokens (MTP)."""
    config = model.config.get_text_config()
    layer = _LAYER.search(name)
    extra = getattr(config, "num_nextn_predict_layers", 0) or 0
    return name in model.whole_names or (layer is not None and 0 <= int(layer[1]) - config.num_hidden_layers < extra)


def _draw(model_class: Any, config: Any, placement: TensorPlacement, attention: str, part: ModelPart) -> Any:
    """Draw weights on the device, tensor by tensor: a CPU takes minutes for 8B random values."""
    model = _without_memory(model_class, config, placement, attention)
    in_float32 = re.compile("|".join(map(re.escape, model._keep_in_fp32_modules_strict or ())) or "$.")

    def empty(name: str, like: Tensor) -> Tensor:
        dtype = torch.float32 if in_float32.search(name) else like.dtype
        return torch.ones(like.shape, dtype=dtype, device=placement.device)

    for prefix, module in model.named_modules():
        for key, parameter in list(module.named_parameters(recurse=False)):
            name = f"{prefix}.{key}"
            whole = empty(name, parameter)
            if parameter.ndim > 1 or key != "weight":  # else the weight of a norm
                seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=4).digest(), "little")
                whole.normal_(0.0, _DEVIATION, generator=torch.Generator(placement.device).manual_seed(seed))
            mine = whole if part.shards is None else part.shards.part(name, whole)
            module._parameters[key] = torch.nn.Parameter(mine, requires_grad=False)
            module._parameters[key]._is_hf_initialized = True
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = empty(f"{prefix}.{key}", buffer)
    model.initialize_weights()  # buffers
    model.tie_weights()
    return model
