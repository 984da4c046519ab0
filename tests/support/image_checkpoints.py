"""Small random checkpoints of models that take images, in the form in which they are published, and their reference.

directory = make_image_checkpoint(tmp_path / "model", "qwen3_vl")
images = [random_image(64, 96, seed=0)]
reference = ImageReference(directory)
ids, spans = reference.prompt("What is this: ", images[0], "?")
tokens = reference.greedy(ids, images, 8)
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gemma_images
import numpy as np
import torch
import transformers
from checkpoints import reference_greedy
from gemma_images import GemmaProcessor
from PIL import Image
from safetensors.torch import load_file, save_file
from small_tokenizers import byte_level, write
from tokenizers import AddedToken
from torch import Tensor

from pdserve.images import Images, ImageSpan
from runner.models.vision.tower import Features
from runner.models.vision.towers import AnyVisionTower

KINDS = ("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "mistral3", *gemma_images.CLASSES)
SLOW = ("qwen3_vl_moe", "qwen3_5_moe", *gemma_images.CLASSES)  # kinds of slow tests only
DEEPSTACK = ("qwen3_vl", "qwen3_vl_moe")  # kinds whose towers join the first text layers
PATCH_SIZE = 16
MERGE_SIZE = 2
CELL = PATCH_SIZE * MERGE_SIZE  # pixels on a side of a token
#: As Qwen publishes it; the bounds of pixels are smaller: 4 … 256 tokens.
PROCESSOR: dict[str, Any] = {
    "size": {"longest_edge": 256 * CELL**2, "shortest_edge": 4 * CELL**2},
    "patch_size": PATCH_SIZE,
    "temporal_patch_size": 2,
    "merge_size": MERGE_SIZE,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    "processor_class": "Qwen3VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
#: As Mistral publishes it, but for the longest side: up to 16 × 16 tokens.
PIXTRAL: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": True,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_processor_type": "PixtralImageProcessorFast",
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "patch_size": 14,
    "processor_class": "PixtralProcessor",
    "resample": 3,
    "rescale_factor": 0.00392156862745098,
    "size": {"longest_edge": 448},
}
PIXTRAL_TOKENS = {"image_break_token": "[IMG_BREAK]", "image_end_token": "[IMG_END]", "image_token": "[IMG]"}
VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
SHOWN = "<|vision_start|><|image_pad|><|vision_end|>"
#: Parts in messages of all roles, tools and their results. "add_vision_id" numbers images, as Qwen's templates do.
CHAT_TEMPLATE = """\
{%- set state = namespace(images=0) -%}
{%- macro show(content) -%}
{%- if content is string -%}
{{- content -}}
{%- else -%}
{%- for part in content or [] -%}
{%- if part.type in ("image", "image_url") -%}
{%- set state.images = state.images + 1 -%}
{%- if add_vision_id %}Picture {{ state.images }}: {% endif -%}
<|vision_start|><|image_pad|><|vision_end|>
{%- elif part.type == "text" -%}
{{- part.text -}}
{%- else -%}
{{- raise_exception("unknown part " ~ part.type) -}}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{%- if tools -%}
{{- "<|im_start|>system\\nTools: " -}}
{%- for tool in tools -%}{{- tool | tojson }}{{ "\\n" -}}{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- endif -%}
{%- for message in messages -%}
{%- set role = "user" if message.role == "tool" else message.role -%}
{{- "<|im_start|>" ~ role ~ "\\n" -}}
{%- if message.role == "tool" -%}
{{- "<tool_response>\\n" ~ show(message.content) ~ "\\n</tool_response>" -}}
{%- else -%}
{{- show(message.content) -}}
{%- endif -%}
{%- for call in message.tool_calls or [] -%}
{%- set called = call.function or call -%}
{{- "\\n<tool_call>\\n{\\"name\\": " ~ (called.name | tojson) ~ ", \\"arguments\\": " -}}
{{- called.arguments if called.arguments is string else (called.arguments | tojson) -}}
{{- "}\\n</tool_call>" -}}
{%- endfor -%}
{{- "<|im_end|>\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<|im_start|>assistant\\n" -}}
{%- endif -%}
"""

VOCABULARY = 512
_TEXT: dict[str, Any] = {
    "attention_bias": False,
    "dtype": "float32",
    "head_dim": 32,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "max_position_embeddings": 4096,
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-06,
    "vocab_size": VOCABULARY,
}
_RECURRENT: dict[str, Any] = {
    "attn_output_gate": True,
    "full_attention_interval": 2,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_value_head_dim": 16,
    "mamba_ssm_dtype": "float32",
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [3, 3, 2],
        "partial_rotary_factor": 0.5,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}
_TEXTS: dict[str, dict[str, Any]] = {
    "qwen3_vl": {
        **_TEXT,
        "model_type": "qwen3_vl_text",
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
        "rope_theta": 5000000,
    },
    "qwen3_vl_moe": {
        **_TEXT,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "model_type": "qwen3_vl_moe_text",
        "moe_intermediate_size": 48,
        "norm_topk_prob": True,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "rope_scaling": {"mrope_interleaved": True, "mrope_section": [6, 5, 5], "rope_type": "default"},
        "rope_theta": 5000000,
    },
    "qwen3_5": {**_TEXT, **_RECURRENT, "model_type": "qwen3_5_text"},
    "qwen3_5_moe": {
        **{name: value for name, value in _TEXT.items() if name != "intermediate_size"},
        **_RECURRENT,
        "model_type": "qwen3_5_moe_text",
        "moe_intermediate_size": 48,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 48,
    },
}
_TEXTS["mistral3"] = {**_TEXT, "model_type": "mistral", "rope_theta": 1000000.0, "sliding_window": None}
_VISION: dict[str, Any] = {
    "depth": 4,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_size": 32,
    "in_channels": 3,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "num_heads": 2,
    "num_position_embeddings": 64,
    "out_hidden_size": 64,
    "patch_size": PATCH_SIZE,
    "spatial_merge_size": MERGE_SIZE,
    "temporal_patch_size": 2,
}
_PIXTRAL_VISION: dict[str, Any] = {
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 32,
    "image_size": 448,
    "initializer_range": 0.02,
    "intermediate_size": 48,
    "model_type": "pixtral",
    "num_attention_heads": 2,
    "num_channels": 3,
    "num_hidden_layers": 4,
    "patch_size": 14,
    "rope_theta": 10000.0,
}
_CLASSES = {
    **gemma_images.CLASSES,
    "mistral3": "Mistral3ForConditionalGeneration",
    "qwen3_vl": "Qwen3VLForConditionalGeneration",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "qwen3_5": "Qwen3_5ForConditionalGeneration",
    "qwen3_5_moe": "Qwen3_5MoeForConditionalGeneration",
}


def make_image_checkpoint(path: Path, kind: str, *, seed: int = 0, dtype: str = "float32", **text: Any) -> Path:
    """Write a random checkpoint of a kind of ``KINDS`` with tokenizer, template and processor; return its directory.

    ``text`` are fields of text_config. Weights are drawn wide, so that logits differ clearly, also between images.
    """
    path.mkdir(parents=True)
    ids = write_tokenizer(path, kind)
    write_processor(path, kind)
    config = _MAKERS[kind](kind, ids, dtype, text)
    (path / "config.json").write_text(json.dumps(config))
    model_class: Any = getattr(transformers, _CLASSES[kind])
    model = model_class(transformers.AutoConfig.from_pretrained(path)).to(getattr(torch, dtype))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(_drawn(kind, name, parameter, generator))
        gemma_images.draw_buffers(model, generator)
    tensors = {stored_name(kind, name): stored_form(kind, name, tensor) for name, tensor in model.state_dict().items()}
    if config["tie_word_embeddings"]:
        del tensors["lm_head.weight"]
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def largest_embeddings(kind: str) -> int:
    """Return the bytes of the embeddings of the largest image: a row per token, and one more per layer of deepstack."""
    rows = 1 + len(_deepstack(kind))
    tokens: int = PROCESSOR["size"]["longest_edge"] // CELL**2
    return tokens * rows * 4 * int(_TEXT["hidden_size"])


def stored_name(kind: str, name: str) -> str:
    """Return the name of a tensor as published: the 12B of Gemma 4 has two parts in place of one."""
    if kind != "gemma4_unified":
        return name
    name = name.replace("embed_vision.", "vision_embedder.")
    return name.replace("vision_embedder.multimodal_embedder.", "embed_vision.")


def stored_form(kind: str, name: str, tensor: Tensor) -> Tensor:
    """Return a tensor as published: Qwen3-VL's fused experts have inputs before outputs."""
    is_transposed = kind == "qwen3_vl_moe" and ".mlp.experts." in name
    return (tensor.transpose(1, 2) if is_transposed else tensor).contiguous()


def write_processor(path: Path, kind: str) -> None:
    """Write the files of the image processor of a kind."""
    is_pixtral = kind == "mistral3"
    fields = PIXTRAL if is_pixtral else gemma_images.PROCESSOR if kind in gemma_images.CLASSES else PROCESSOR
    (path / "preprocessor_config.json").write_text(json.dumps(fields))
    if is_pixtral:
        whole = {**PIXTRAL_TOKENS, "patch_size": 14, "processor_class": "PixtralProcessor", "spatial_merge_size": 2}
        (path / "processor_config.json").write_text(json.dumps(whole))


def add_predictor(directory: Path) -> None:
    """Add a random layer that predicts further tokens to a checkpoint of Qwen3.5, as published."""
    stored = load_file(directory / "model.safetensors")
    prefix = "model.language_model.layers.1."  # attends
    tensors = {
        "mtp.layers.0." + name.removeprefix(prefix): tensor.flip(0)
        for name, tensor in stored.items()
        if name.startswith(prefix)
    }
    size = stored["model.language_model.norm.weight"].numel()
    generator = torch.Generator().manual_seed(2)
    for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
        tensors[f"mtp.{name}.weight"] = 0.2 * torch.randn(size, generator=generator)
    tensors["mtp.fc.weight"] = torch.randn(size, 2 * size, generator=generator) / size**0.5
    save_file(tensors, directory / "more.safetensors")
    config = json.loads((directory / "config.json").read_text())
    config["text_config"]["mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(config))


def random_image(height: int, width: int, seed: int, mode: str = "RGB") -> Image.Image:
    """Return a picture of random blocks of colour, so that resizing changes it little."""
    generator = np.random.default_rng(seed)
    blocks = generator.integers(0, 256, (max(1, height // 11), max(1, width // 13), 3), np.uint8)
    return Image.fromarray(blocks).resize((width, height), Image.Resampling.NEAREST).convert(mode)


@torch.inference_mode()
def encode(tower: AnyVisionTower, pixels: Tensor) -> Features:
    """Encode an image as a whole: ``pixels`` uint8 [height, width, 3]."""
    height, width, _ = pixels.shape
    deepstack: list[Tensor] = []
    x = tower.begin(pixels)
    x = tower.run(x, height, width, 0, tower.config.depth, lambda layer, rows: deepstack.append(rows))
    embeddings = tower.end(x)
    return Features(embeddings, torch.stack(deepstack) if deepstack else embeddings.new_empty(0, *embeddings.shape))


class ImageReference:
    """The library's model and image processor of a checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.config = json.loads((directory / "config.json").read_text())
        self.model: Any = transformers.AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.float32)
        self.model.eval()
        self.model.generation_config.eos_token_id = None
        self.gemma: GemmaProcessor | None = None
        if self.config["model_type"].startswith("gemma"):
            fields = json.loads((directory / "preprocessor_config.json").read_text())
            self.gemma = GemmaProcessor(self.config, fields)
        else:
            self.processor: Any = transformers.AutoImageProcessor.from_pretrained(directory, backend="pil")
        self.tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(directory)

    @property
    def is_pixtral(self) -> bool:
        return bool(self.config["model_type"] == "mistral3")

    @property
    def image_token_id(self) -> int:
        token_id: int = self.config["image_token_index" if self.is_pixtral else "image_token_id"]
        return token_id

    def processed(self, images: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
        """Return the tower's inputs, and grids [images, 3] of images of any sizes and modes.

        The inputs are patches [patches, columns] float32, or Pixtral's padded images [images, 3, height, width], whose
        grids are heights and widths [images, 2]. Gemma has padded patches, and their positions in place of grids.
        """
        images = [_on_white(image) for image in images]
        if self.gemma is not None:
            return self.gemma.processed([image.convert("RGB") for image in images])
        if self.is_pixtral:
            batch = self.processor(list(images), patch_size={"height": 28, "width": 28}, return_tensors="pt")
            return batch["pixel_values"], torch.as_tensor(batch["image_sizes"])
        batch = self.processor(list(images), return_tensors="pt")
        return batch["pixel_values"], batch["image_grid_thw"]

    @torch.inference_mode()
    def features(self, images: Sequence[Image.Image]) -> tuple[Tensor, Sequence[Tensor]]:
        """Return the embeddings [tokens, hidden_size] of images, and what joins the first text layers."""
        values, grids = self.processed(images)
        if self.is_pixtral:
            output = self.model.model.get_image_features(values, image_sizes=grids, vision_feature_layer=-1)
            return torch.cat(output.pooler_output), ()
        if self.gemma is not None:
            return torch.cat(list(self.model.model.get_image_features(values, grids).pooler_output)), ()
        output = self.model.model.visual(values, grid_thw=grids)
        return output.pooler_output, getattr(output, "deepstack_features", None) or ()

    def tokens_of(self, image: Image.Image) -> list[int]:
        """Return the tokens in place of an image's placeholder."""
        if self.gemma is not None:
            rows, columns = self.gemma.grid(_on_white(image).convert("RGB"))
            return [self.gemma.before, *[self.image_token_id] * (rows * columns), self.gemma.behind]
        *_, height, width = self.processed([image])[1][0].tolist()
        if self.is_pixtral:
            return self._pixtral_tokens(height // 28, width // 28)
        return [self.image_token_id] * (height * width // MERGE_SIZE**2)

    def num_tokens(self, image: Image.Image) -> int:
        """Return the tokens of an image, without text around them."""
        tokens = self.tokens_of(image)
        return len(tokens) if self.gemma is None else tokens.count(self.image_token_id)

    def prompt(self, *parts: str | Image.Image) -> tuple[list[int], Images]:
        """Return token ids with all tokens of images, and the spans of the images, without digests."""
        ids: list[int] = []
        spans: list[ImageSpan] = []
        for part in parts:
            if isinstance(part, str):
                ids += self.tokenizer.encode(part, add_special_tokens=False)
                continue
            if self.gemma is not None:
                spans.append(ImageSpan(len(ids) + 1, *self.gemma.grid(part.convert("RGB")), bytes(32)))
                ids += self.tokens_of(part)
                continue
            *_, height, width = self.processed([part])[1][0].tolist()
            if self.is_pixtral:
                spans.append(ImageSpan(len(ids), height // 28, width // 28 + 1, bytes(32)))
                ids += self._pixtral_tokens(height // 28, width // 28)
                continue
            ids.append(self.config["vision_start_token_id"])
            spans.append(ImageSpan(len(ids), height // MERGE_SIZE, width // MERGE_SIZE, bytes(32)))
            ids += [self.image_token_id] * spans[-1].num_tokens
            ids.append(self.config["vision_end_token_id"])
        return ids, tuple(spans)

    def _pixtral_tokens(self, rows: int, columns: int) -> list[int]:
        """Return the tokens of an image as the library's processor writes them."""
        row = "[IMG]" * columns + "[IMG_BREAK]"
        text = (row * rows).removesuffix("[IMG_BREAK]") + "[IMG_END]"
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return ids

    @torch.inference_mode()
    def logits(self, ids: Sequence[int], images: Sequence[Image.Image]) -> Tensor:
        """Return logits [tokens, vocabulary] of a prompt, computed at once."""
        inputs = self._inputs(ids, images)
        if self.config["model_type"] == "gemma4_unified":  # its forward pass makes the masks of other sizes
            shape = torch.empty(1, len(ids), 0)
            mask = inputs.pop("attention_mask")
            types = inputs["mm_token_type_ids"]
            positions = torch.arange(len(ids))[None]
            inputs["attention_mask"] = self.model.create_masks_for_generate(
                self.model.config, shape, mask, None, positions, mm_token_type_ids=types
            )
        logits: Tensor = self.model(**inputs, use_cache=False).logits[0]
        return logits

    def greedy(self, ids: Sequence[int], images: Sequence[Image.Image], num_tokens: int) -> list[int]:
        """Return the most likely tokens after a prompt; an end of text does not end it."""
        if not images:
            return reference_greedy(self.model, list(ids), num_tokens)
        if self.gemma is not None:
            whole = list(ids)
            for _ in range(num_tokens):
                whole.append(int(self.logits(whole, images)[-1].argmax()))
            return whole[len(ids) :]
        output = self.model.generate(
            **self._inputs(ids, images), max_new_tokens=num_tokens, do_sample=False, pad_token_id=0
        )
        tokens: list[int] = output[0, len(ids) :].tolist()
        return tokens

    def _inputs(self, ids: Sequence[int], images: Sequence[Image.Image]) -> dict[str, Any]:
        inputs = torch.tensor([list(ids)])
        given = {"input_ids": inputs, "attention_mask": torch.ones_like(inputs)}
        if self.is_pixtral and len(images) == 1 and ids.count(self.image_token_id) == 1:
            return {"inputs_embeds": self._embedded(inputs, images[0]), "attention_mask": torch.ones_like(inputs)}
        if not self.is_pixtral:
            given["mm_token_type_ids"] = (inputs == self.image_token_id).to(torch.int32)
        if images:
            grids = (
                "image_sizes" if self.is_pixtral else "image_grid_thw" if self.gemma is None else "image_position_ids"
            )
            given["pixel_values"], given[grids] = self.processed(images)
        return given

    def _embedded(self, inputs: Tensor, image: Image.Image) -> Tensor:
        """Return the embeddings of a prompt whose only image has one token, whose values the library would split.

        It splits several images correctly, so the image is encoded beside itself.
        """
        embeddings: Tensor = self.model.get_input_embeddings()(inputs)
        embeddings[inputs == self.image_token_id] = self.features([image, image])[0][:1]
        return embeddings


def _on_white(image: Image.Image) -> Image.Image:
    """Return an image with what is transparent on white, as later versions of the library do."""
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image
    image = image.convert("RGBA")
    return Image.alpha_composite(Image.new("RGBA", image.size, (255, 255, 255, 255)), image).convert("RGB")


def _config(kind: str, ids: dict[str, int], dtype: str, text: dict[str, Any]) -> dict[str, Any]:
    vision = {**_VISION, "model_type": kind, "deepstack_visual_indexes": _deepstack(kind)}
    tied = text.get("tie_word_embeddings", False)
    return {
        "architectures": [_CLASSES[kind]],
        "image_token_id": ids["<|image_pad|>"],
        "model_type": kind,
        "text_config": copy.deepcopy({**_TEXTS[kind], "dtype": dtype, "eos_token_id": ids["<|im_end|>"], **text}),
        "tie_word_embeddings": tied,
        "video_token_id": ids["<|video_pad|>"],
        "vision_config": vision,
        "vision_end_token_id": ids["<|vision_end|>"],
        "vision_start_token_id": ids["<|vision_start|>"],
    }


def _deepstack(kind: str) -> list[int]:
    return [0, 1, 2] if kind in DEEPSTACK else []


def _mistral3(kind: str, ids: dict[str, int], dtype: str, text: dict[str, Any]) -> dict[str, Any]:
    return {
        "architectures": [_CLASSES["mistral3"]],
        "image_token_index": ids["[IMG]"],
        "model_type": "mistral3",
        "multimodal_projector_bias": False,
        "projector_hidden_act": "gelu",
        "spatial_merge_size": 2,
        "text_config": copy.deepcopy({**_TEXTS["mistral3"], "dtype": dtype, "eos_token_id": ids["<|im_end|>"], **text}),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "vision_config": _PIXTRAL_VISION,
        "vision_feature_layer": -1,
    }


_MAKERS = {
    **dict.fromkeys(("qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _config),
    "mistral3": _mistral3,
    **dict.fromkeys(gemma_images.CLASSES, gemma_images.gemma4_config),
}


def write_tokenizer(path: Path, kind: str = "qwen3_vl") -> dict[str, int]:
    """Write a byte-level tokenizer with a chat template; return the ids of its special tokens by name."""
    is_gemma = kind in gemma_images.CLASSES
    tokens = (
        tuple(PIXTRAL_TOKENS.values()) if kind == "mistral3" else gemma_images.TOKENS if is_gemma else VISION_TOKENS
    )
    tokenizer = byte_level()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in tokens])
    assert tokenizer.get_vocab_size() <= VOCABULARY
    write(path, tokenizer, eos_token="<|im_end|>")
    shown = "[IMG]" if kind == "mistral3" else "<|image|>" if is_gemma else SHOWN
    (path / "chat_template.jinja").write_text(CHAT_TEMPLATE.replace(SHOWN, shown))
    vocabulary: dict[str, int] = tokenizer.get_vocab()
    return {token: vocabulary[token] for token in (*tokens, "<|im_end|>")}


def _drawn(kind: str, name: str, parameter: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(parameter.shape, generator=generator)
    if "norm" in name and name.endswith("weight"):
        is_text = ".visual." not in name and "linear_attn" not in name
        is_centered = kind.startswith("qwen3_5") and is_text  # the norm scales by 1 + weight
        return noise * 0.2 if is_centered else noise * 0.2 + 1.0
    if parameter.dim() == 1:
        return 0.3 * noise
    if "embed" in name and "patch_embed" not in name:
        return noise
    if name.endswith(("position_embedding_table", "pos_embedding")):
        return noise
    fan_in = parameter[0].numel() if "patch_" in name else parameter.shape[-1]
    return noise.mul(1.3 / math.sqrt(fan_in))
