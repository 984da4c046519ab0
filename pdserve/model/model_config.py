"""A checkpoint's ``config.json`` as plain values. Torch-free: router, oracle and CLI read configs, too."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import msgspec

from pdserve.checkpoint.quantized_weights import find_weights
from pdserve.checkpoint.stored_head import has_other_head
from pdserve.checkpoint.weight_files import most_stored_dtype, read_headers
from pdserve.errors import CheckpointError, shown
from pdserve.kv.groups import KVCacheGroups, KVHeads, cut_into_groups
from pdserve.kv.layout import AnyKVCacheSpec, FullAttentionSpec, LatentSpec
from pdserve.kv.states import AnyStateSpec
from pdserve.model.attention_spec import AttentionSpec
from pdserve.model.config_fields import REMEDY, ConfigFields
from pdserve.model.eagle3 import Eagle3Config, TargetSizes
from pdserve.model.eos_tokens import eos_token_ids
from pdserve.model.families import FAMILIES
from pdserve.model.from_transformers.any_decoder import (
    add_defaults,
    read_heads,
    read_positions,
    read_windows,
    rename_fields,
)
from pdserve.model.gemma4 import Gemma4Config
from pdserve.model.latent import LatentConfig, read_latent
from pdserve.model.mamba2 import Mamba2Config
from pdserve.model.moe import MoEConfig
from pdserve.model.quantization.kept_weights import HEAD, layer_part
from pdserve.model.quantization.layer_form import LayerForm
from pdserve.model.quantization.quantization_config import read_weight_format
from pdserve.model.quantization.weight_formats import (
    SUPPORTED_DTYPES,
    UNQUANTIZED,
    WEIGHT_FORMATS,
    WeightFormat,
    storage_rules,
)
from pdserve.model.rope import RopeConfig
from pdserve.model.text_part import causal_name, take_text_part, text_headers
from pdserve.model.unread_fields import check_unread, unread_names
from pdserve.model.unserved_kinds import check_kind
from pdserve.model.vision import AnyVision, read_vision

NATIVE = "native"
TRANSFORMERS = "transformers"
MODEL_IMPLS = ("auto", NATIVE, TRANSFORMERS)


class ModelConfig(msgspec.Struct, frozen=True):
    """A decoder-only transformer: of a family in ``FAMILIES``, or any other one that runs through transformers.

    Without a family, fields that only native layers read have their defaults, and ``attention`` is empty: the loaded
    layers say what they need.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int  # with ``kv_heads``, those of the finest KV cache group, as ``head_dim``
    head_dim: int  # elements of a key in the KV cache; with latents, of a row
    rms_norm_eps: float
    rope: RopeConfig
    max_position_embeddings: int
    dtype: str  # dtype of the checkpoint: float32, bfloat16 or float16
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention: tuple[AttentionSpec, ...] = ()  # one spec per layer that attends
    windows: tuple[int | None, ...] = ()  # tokens, per layer of a transformers model; None: all tokens
    recurrent: tuple[bool, ...] = ()  # per layer, whether it keeps a state instead of attending; empty: no layer does
    state: AnyStateSpec | None = None  # state per recurrent layer, in the checkpoint's dtype; None: no such layer
    has_output_gate: bool = False  # the output of attention is multiplied by the sigmoid of a part of q_proj
    centered_norms: bool = False  # RMS norms scale by 1 + weight
    weight_format: str = UNQUANTIZED  # format of linear layers in the checkpoint, a key of WEIGHT_FORMATS
    quantization: dict[str, Any] = {}  # config.json's quantization_config
    layer_forms: dict[str, LayerForm] = {}  # layers that stay quantized in memory, such as "3.q_proj"; see kept_weights
    linear_bytes: float = 0.0  # bytes per weight of linear layers then, and of experts; 0: as the weight format says
    expert_bytes: float = 0.0
    eos_token_ids: tuple[int, ...] = ()  # from the configs and the tokenizer
    impl: str = NATIVE  # or TRANSFORMERS
    num_weights: int = 0  # parameters in the checkpoint's files, once dequantized; 0: not counted
    moe: MoEConfig | None = None  # None: dense, or not native
    latent: LatentConfig | None = None  # None: the KV cache has keys and values of heads
    use_qk_norm: bool = False  # norms of query and key heads, in families where they are optional
    num_nextn_layers: int = 0  # layers behind the last that predict further tokens
    num_draft_layers: int = 0  # draft layers that are loaded: the first next-token layers, or a draft head
    draft_head: Eagle3Config | None = None  # EAGLE-3 head in a separate checkpoint; None: no head
    vision: AnyVision | None = None  # native tower of the multimodal checkpoint; None: none that can be used
    multimodal: str = ""  # architecture of the multimodal checkpoint around this text model; "": text only
    kv_heads: tuple[KVHeads, ...] = ()  # heads per layer with a KV cache; empty: all have num_kv_heads and head_dim
    gemma4: Gemma4Config | None = None  # None: another family, or not native
    mamba2: Mamba2Config | None = None  # None: another family, or not native
    attends: tuple[bool, ...] = ()  # per layer, whether it attends; empty: those that are not recurrent do
    kv_sources: tuple[int, ...] = ()  # the layer whose KV each layer reads: itself, or an earlier one; empty: itself
    conv_bias: bool = False  # short convolutions and their projections have biases
    unread_fields: tuple[str, ...] = ()  # names in config.json that native layers and transformers do not know

    @property
    def whole_images(self) -> bool:
        """Whether tokens of an image see later ones of it, so that one step computes all that have no KV yet."""
        return any(spec.whole_images for spec in self.attention)

    @property
    def keeps_quantized(self) -> bool:
        """Whether some weights stay quantized in memory; else all are dequantized when they are loaded."""
        return bool(self.layer_forms)

    @property
    def linear_format(self) -> WeightFormat:
        """Return the format in memory of linear layers without a form."""
        return WEIGHT_FORMATS[self.weight_format]

    def layer_part(self, name: str) -> tuple[int, str] | None:
        """Return the layer and the projection of a weight in a linear layer, or "experts"; None for other weights.

        ``name`` is the checkpoint's, or that of a causal model.
        """
        causal = causal_name(name) if self.multimodal else None
        return layer_part(causal or name, self.num_layers, self.predictor)

    @property
    def head_form(self) -> LayerForm | None:
        """Return the form in memory of an output projection; None: in the model's dtype."""
        return self.form_of(f"{HEAD}.weight")

    def form_of(self, name: str) -> LayerForm | None:
        """Return the form in memory of a checkpoint's weight; None: as ``linear_format`` says."""
        part = self.layer_part(name) if self.layer_forms else None
        return None if part is None else self.layer_forms.get("{}.{}".format(*part))

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """Layers that have a KV cache: all but the recurrent ones and those that read another layer's."""
        return tuple(layer for layer in range(self.num_layers) if self.has_kv(layer))

    def has_kv(self, layer: int) -> bool:
        """Whether a layer has a KV cache of its own."""
        return self.is_attending(layer) and (not self.kv_sources or self.kv_sources[layer] == layer)

    def is_attending(self, layer: int) -> bool:
        return self.attends[layer] if self.attends else not self.is_recurrent(layer)

    def has_mlp(self, layer: int) -> bool:
        """Whether a layer has an MLP or experts; draft layers have."""
        blocks = "" if self.mamba2 is None else self.mamba2.blocks
        return not blocks[layer : layer + 1].strip("-E")

    @property
    def kv_places(self) -> tuple[int, ...]:
        """The KV cache that each attending layer reads, as an index of ``kv_layers``; empty: each has its own."""
        order = {layer: place for place, layer in enumerate(self.kv_layers)}
        return tuple(order[source] for source in self.kv_sources)

    def heads_of(self, layer: int) -> KVHeads:
        """Return the KV heads of a layer that attends."""
        if not self.kv_heads:
            return KVHeads(self.num_kv_heads, self.head_dim)
        source = self.kv_sources[layer] if self.kv_sources else layer
        return self.kv_heads[self.kv_layers.index(source)]

    def is_recurrent(self, layer: int) -> bool:
        return bool(self.recurrent) and self.recurrent[layer]

    @property
    def num_recurrent(self) -> int:
        return sum(self.recurrent)

    @property
    def has_gates(self) -> bool:
        """Whether MLPs and experts have gates; else they are down(relu(up(x))²)."""
        return self.mamba2 is None or not self.mamba2.blocks

    def kv_layers_in(self, layers: range) -> int:
        """Count those of ``layers`` that have a KV cache."""
        return sum(self.has_kv(layer) for layer in layers)

    def state_spec(self, dtype: str) -> AnyStateSpec | None:
        """Return what each recurrent layer keeps per sequence on a node that serves in ``dtype``."""
        return None if self.state is None else msgspec.structs.replace(self.state, dtype=dtype)

    @property
    def num_kv_layers(self) -> int:
        """Layers with a KV cache: ``kv_layers``, followed by the draft layers."""
        return len(self.kv_layers) + self.num_draft_layers

    def with_draft_layers(self, count: int, head: Eagle3Config | None = None) -> ModelConfig:
        """Return the model with ``count`` layers that make drafts and attend as the last one.

        They are the first ones that predict further tokens, or the one of ``head``.
        """
        attention = self.attention + self.attention[-1:] * count
        heads = self.kv_heads + self.kv_heads[-1:] * count
        return msgspec.structs.replace(
            self, num_draft_layers=count, attention=attention, kv_heads=heads, draft_head=head
        )

    @property
    def sizes_for_head(self) -> TargetSizes:
        return TargetSizes(**{name: getattr(self, name) for name in TargetSizes.__struct_fields__})

    @property
    def predictor(self) -> str:
        """First part of the names of the tensors of the layer that makes drafts; empty if the family has none here."""
        family = FAMILIES.get(self.architecture) if self.impl == NATIVE else None
        return "" if family is None else family.predictor.format(layer=self.num_layers)

    def kv_cache_spec(self, dtype: str) -> AnyKVCacheSpec:
        """Return what each layer with a KV cache keeps per token."""
        if self.latent is not None:
            return LatentSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype)
        return FullAttentionSpec(num_kv_heads=self.num_kv_heads, head_dim=self.head_dim, dtype=dtype)

    @property
    def rope_head_dim(self) -> int:
        """Elements of a head that its rotary embedding is made for."""
        return self.head_dim if self.latent is None else self.latent.qk_rope_head_dim

    @property
    def value_size(self) -> int:
        """Inputs of the output projection: the values of all heads."""
        return self.num_heads * (self.head_dim if self.latent is None else self.latent.v_head_dim)

    @property
    def kv_cache_groups(self) -> KVCacheGroups:
        """The layers that share a block table; a window of all positions is none. Only for the whole model."""
        windows = self.windows or tuple(spec.window for spec in self.attention)
        if self.kv_sources:
            windows = tuple(windows[layer] for layer in self.kv_layers)
        if self.kv_heads:
            windows = windows or (None,) * len(self.kv_heads)
        used = (window if window and window < self.max_position_embeddings else None for window in windows)
        return cut_into_groups(tuple(used), self.kv_heads)


#: Fields that are the node's choice, not the checkpoint's, or that change nothing.
MAY_DIFFER = frozenset({"layer_forms", "linear_bytes", "expert_bytes", "unread_fields"})

_CLASS_NAME = re.compile(r"[A-Za-z]\w{0,99}", re.ASCII)
_NEXTN = (  # the first name in a config counts
    "num_nextn_predict_layers",
    "num_mtp_layers",
    "num_mtp_modules",
    "mtp_num_hidden_layers",
)


def load_model_config(model_dir: Path, impl: str = "auto", *, embeds: bool = False) -> ModelConfig:
    """Read ``config.json`` (the format of transformers 4 or 5) and, for EOS, generation_config.json and the tokenizer.

    ``impl`` is one of ``MODEL_IMPLS``; auto is native for the families in ``FAMILIES``. A model that only ``embeds``
    may be saved without the head: its architecture is then named "…Model". Raises CheckpointError for anything of the
    text model that is missing, broken or not supported; ``vision_problem`` says it of a tower.
    """
    fields = ConfigFields(model_dir / "config.json")
    if embeds:
        _add_unused_head(fields)
    vision = _usable_vision(fields)
    multimodal = take_text_part(fields, native=impl != TRANSFORMERS)
    architecture = _architecture(fields, impl)
    if impl == TRANSFORMERS or architecture not in FAMILIES:
        return _any_decoder(model_dir, fields, architecture, multimodal)
    model = _native_decoder(model_dir, fields, architecture, multimodal, embeds)
    if model.rope.rope_type == "dynamic":  # its rotary embeddings depend on the length of a sequence
        return model
    return msgspec.structs.replace(model, vision=vision)


def _native_decoder(
    model_dir: Path, fields: ConfigFields, architecture: str, multimodal: str, embeds: bool
) -> ModelConfig:
    """Read a model of a family in ``FAMILIES``."""
    family = FAMILIES[architecture]
    fields.defaults = family.defaults
    if family.rename is not None:
        family.rename(fields)
    check_unread(fields, family.module, has_layer_config=family.complete is not None)
    weight_format, quantization = read_weight_format(fields)
    _check_activation(fields)
    num_layers = fields.integer("num_hidden_layers")
    num_heads = fields.integer("num_attention_heads")
    latent = read_latent(fields) if family.has_latents else None
    num_kv_heads, head_dim = _key_value_heads(fields, num_heads, latent)
    rope_head_dim = head_dim if latent is None else latent.qk_rope_head_dim
    rope = RopeConfig(theta=10_000.0)
    if family.complete is None:
        rope = family.rope(fields, fields.integer("max_position_embeddings"), rope_head_dim, family.partial_rotary)
    scale = head_dim**-0.5 if latent is None else latent.scale(rope)
    vocab_size = fields.integer("vocab_size")
    dtype = _dtype(model_dir, fields, weight_format)
    recurrent = () if family.recurrent is None else family.recurrent(fields, num_layers)
    nextn = [name for name in _NEXTN if fields.given(name) is not None] or _NEXTN
    model = ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=_intermediate_size(fields),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=fields.number("rms_norm_eps", 1e-6, 1e-20, 1.0),
        rope=rope,
        max_position_embeddings=fields.integer("max_position_embeddings"),
        dtype=dtype,
        tie_word_embeddings=_is_tied(model_dir, fields, embeds),
        attention_bias=fields.flag("attention_bias"),
        mlp_bias=fields.flag("mlp_bias"),
        conv_bias=fields.flag("conv_bias"),
        attention=tuple(
            AttentionSpec(scale=scale, window=window, has_sinks=family.has_sinks)
            for layer, window in enumerate(family.windows(fields, num_layers))
            if not (recurrent and recurrent[layer])
        ),
        recurrent=recurrent,
        state=family.state(fields, dtype) if recurrent else None,
        has_output_gate=family.has_output_gate,
        centered_norms=family.centered_norms,
        weight_format=weight_format,
        quantization=quantization,
        eos_token_ids=eos_token_ids(model_dir, fields, vocab_size),
        moe=None if family.moe is None else family.moe(fields, num_layers),
        latent=latent,
        use_qk_norm=fields.flag("use_qk_norm"),
        num_nextn_layers=fields.integer(nextn[0], 0, least=0),
        multimodal=multimodal,
    )
    if family.complete is not None:
        complete = family.complete(fields, num_layers, num_heads, KVHeads(num_kv_heads, head_dim))
        model = msgspec.structs.replace(model, **complete)
    return msgspec.structs.replace(model, unread_fields=unread_names(fields))


def _key_value_heads(fields: ConfigFields, num_heads: int, latent: LatentConfig | None) -> tuple[int, int]:
    """Return the key/value heads of the KV cache and their size, or one head with the size of a latent's row."""
    if latent is None:
        num_kv_heads = fields.integer("num_key_value_heads", num_heads)
        head_dim = fields.integer("head_dim", fields.integer("hidden_size") // num_heads)
    else:
        num_kv_heads = 1
        head_dim = latent.row_size
    if num_heads % num_kv_heads:
        raise fields.error(f"{num_heads} attention heads cannot share {num_kv_heads} key/value heads evenly")
    if head_dim % 2:
        raise fields.error(f"head_dim {head_dim} is odd; rotary embeddings need an even one")
    return num_kv_heads, head_dim


def _usable_vision(fields: ConfigFields) -> AnyVision | None:
    """Return the tower of a whole multimodal config; None if it has no native one, or one that cannot be used."""
    try:
        return read_vision(fields)
    except CheckpointError:
        return None


def vision_problem(model_dir: Path, model: ModelConfig) -> str:
    """Return why a multimodal checkpoint takes no images; empty if its tower can be used."""
    if model.vision is not None:
        return ""
    if model.rope.rope_type == "dynamic":
        return "its rotary embeddings depend on the length of a sequence"
    try:
        read_vision(ConfigFields(model_dir / "config.json"))
    except CheckpointError as exc:
        return str(exc)
    return f"the vision tower of {model.multimodal} has no native layers"


def _any_decoder(model_dir: Path, fields: ConfigFields, architecture: str, multimodal: str) -> ModelConfig:
    """Read what the KV cache and the scheduler need of a model that runs through transformers."""
    add_defaults(fields)
    rename_fields(fields)
    find_recurrent = FAMILIES[architecture].recurrent if architecture in FAMILIES else None
    if find_recurrent is not None and find_recurrent(fields, fields.integer("num_hidden_layers")):
        raise fields.error("describes a model with recurrent layers, which are native only: leave --model-impl at auto")
    check_kind(fields)
    weight_format, quantization = read_weight_format(fields)
    vocab_size = fields.integer("vocab_size")
    headers = read_headers(model_dir) if any(model_dir.glob("*.safetensors")) else {}
    headers = text_headers(headers) if multimodal else headers
    rules = storage_rules(weight_format, quantization) or ()
    num_layers = fields.integer("num_hidden_layers")
    return ModelConfig(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        windows=read_windows(fields, num_layers),
        **read_heads(fields, num_layers),
        rms_norm_eps=1e-6,
        rope=RopeConfig(theta=10_000.0),
        max_position_embeddings=read_positions(fields),
        dtype=_dtype(model_dir, fields, weight_format),
        weight_format=weight_format,
        quantization=quantization,
        eos_token_ids=eos_token_ids(model_dir, fields, vocab_size),
        impl=TRANSFORMERS,
        multimodal=multimodal,
        num_weights=find_weights(model_dir, headers, rules).num_weights,
    )


def _add_unused_head(fields: ConfigFields) -> None:
    """Describe the causal model around a body, with a head that takes no memory."""
    names = fields.get("architectures")
    if isinstance(names, list):
        bodies = [name for name in names if isinstance(name, str) and name.endswith("Model")]
        fields.values["architectures"] = [name.removesuffix("Model") + "ForCausalLM" for name in bodies] or names
    fields.values["tie_word_embeddings"] = True


def _is_tied(model_dir: Path, fields: ConfigFields, embeds: bool) -> bool:
    """Return whether the head is the embedding. As in transformers, a stored head that differs is used instead."""
    if not fields.flag("tie_word_embeddings"):
        return False
    return embeds or not any(model_dir.glob("*.safetensors")) or not has_other_head(model_dir)


def _architecture(fields: ConfigFields, impl: str) -> str:
    """Return the first architecture that has a family, unless ``impl`` is transformers; else the first one."""
    given = fields.get("architectures")
    names = given if isinstance(given, list) else [given]
    if not names or not all(isinstance(name, str) and _CLASS_NAME.fullmatch(name) for name in names):
        fault = "lacks 'architectures'" if given is None else f"has architectures = {shown(given)}"
        raise fields.error(f"{fault}; it must be a list of classes, such as 'LlamaForCausalLM'. {REMEDY}")
    native = next((name for name in names if name in FAMILIES), None)
    if impl == NATIVE and native is None:
        raise fields.error(
            f"has architecture {shown(names[0])}; native are {', '.join(FAMILIES)}. Leave --model-impl at auto"
        )
    return str(names[0] if native is None or impl == TRANSFORMERS else native)


def _intermediate_size(fields: ConfigFields) -> int:
    """Return the size of dense MLPs. Qwen3.5's mixtures of experts have none: that of an expert then."""
    if fields.get("intermediate_size") is None and fields.get("moe_intermediate_size") is not None:
        return fields.integer("moe_intermediate_size")
    return fields.integer("intermediate_size")


def _check_activation(fields: ConfigFields) -> None:
    activation = fields.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise fields.error(f"has hidden_act = {shown(activation)}; supported is 'silu'. {REMEDY}")


def _dtype(model_dir: Path, fields: ConfigFields, weight_format: str) -> str:
    """Return the config's dtype; without one, the dtype that stores most values of the checkpoint.

    Without weights either, it is bfloat16 for quantized models, and transformers' default of float32 for others.
    """
    dtype = fields.get("dtype", fields.get("torch_dtype"))
    if dtype is None and any(model_dir.glob("*.safetensors")):
        dtype = most_stored_dtype(read_headers(model_dir))
    if dtype is None:
        dtype = "float32" if weight_format == UNQUANTIZED else "bfloat16"
    return fields.choice("dtype", dtype, SUPPORTED_DTYPES)
