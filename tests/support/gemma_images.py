"""Small random Gemma 4 models that take images, in the forms of the published sizes, and their image processor.

config = gemma4_config("gemma4", ids, "float32", {})    # config.json; "gemma4" is like the 31B
images = GemmaProcessor(config).processed(pictures)     # inputs of the library's model, and grids of tokens
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from PIL import Image
from torch import Tensor
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

PATCH = 16  # pixels
POOLED = 3  # patches on a side of a token
MOST_TOKENS = 70  # per image: the smallest limit that the library allows
TOKENS = ("<|image>", "<image|>", "<|image|>", "<|video|>")  # before and behind an image, and placeholders
#: The published sizes: 31B, 26B-A4B, E2B and 12B.
CLASSES = {
    "gemma4": "Gemma4ForConditionalGeneration",
    "gemma4_moe": "Gemma4ForConditionalGeneration",
    "gemma4_shared": "Gemma4ForConditionalGeneration",
    "gemma4_unified": "Gemma4UnifiedForConditionalGeneration",
}
#: As published, but for the number of tokens.
PROCESSOR: dict[str, Any] = {
    "do_convert_rgb": True,
    "do_normalize": False,
    "do_rescale": True,
    "do_resize": True,
    "image_mean": [0.0, 0.0, 0.0],
    "image_processor_type": "Gemma4ImageProcessor",
    "image_std": [1.0, 1.0, 1.0],
    "max_soft_tokens": MOST_TOKENS,
    "patch_size": PATCH,
    "pooling_kernel_size": POOLED,
    "resample": 3,
    "rescale_factor": 1 / 255,
}
_TEXT: dict[str, Any] = {
    "final_logit_softcapping": 30.0,
    "global_head_dim": 32,
    "head_dim": 16,
    "hidden_size": 64,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 96,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "max_position_embeddings": 4096,
    "model_type": "gemma4_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-6,
    "sliding_window": 24,
    "tie_word_embeddings": False,
    "use_bidirectional_attention": "vision",
    "vocab_size": 512,
    "vocab_size_per_layer_input": 512,
}
_K_EQ_V = {"attention_k_eq_v": True, "num_global_key_value_heads": 1}
_TEXTS: dict[str, dict[str, Any]] = {
    "gemma4": {**_TEXT, **_K_EQ_V},
    "gemma4_moe": {
        **_TEXT,
        **_K_EQ_V,
        "enable_moe_block": True,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "top_k_experts": 2,
    },
    "gemma4_shared": {
        **_TEXT,
        "hidden_size_per_layer_input": 8,
        "num_key_value_heads": 1,
        "num_kv_shared_layers": 2,
        "use_bidirectional_attention": None,
        "use_double_wide_mlp": True,
    },
    "gemma4_unified": {**_TEXT, **_K_EQ_V, "model_type": "gemma4_unified_text"},
}
_VISION: dict[str, Any] = {
    "head_dim": 16,
    "hidden_size": 32,
    "intermediate_size": 48,
    "model_type": "gemma4_vision",
    "num_attention_heads": 2,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "patch_size": PATCH,
    "pooling_kernel_size": POOLED,
    "position_embedding_size": MOST_TOKENS * POOLED,
    "standardize": True,
}
_EMBEDDER: dict[str, Any] = {
    "mm_embed_dim": 32,
    "mm_posemb_size": MOST_TOKENS,
    "model_type": "gemma4_unified_vision",
    "output_proj_dims": 32,
    "patch_size": PATCH,
    "pooling_kernel_size": POOLED,
}


def gemma4_config(kind: str, ids: dict[str, int], dtype: str, text: dict[str, Any]) -> dict[str, Any]:
    clips = {"standardize": False, "use_clipped_linears": True} if kind == "gemma4_shared" else {}
    whole = "gemma4_unified" if kind == "gemma4_unified" else "gemma4"
    return {
        "architectures": [CLASSES[kind]],
        "audio_token_id": None,
        "boi_token_id": ids["<|image>"],
        "eoi_token_id": ids["<image|>"],
        "image_token_id": ids["<|image|>"],
        "model_type": whole,
        "text_config": copy.deepcopy({**_TEXTS[kind], "dtype": dtype, "eos_token_id": ids["<|im_end|>"], **text}),
        "tie_word_embeddings": text.get("tie_word_embeddings", False),
        "video_token_id": ids["<|video|>"],
        "vision_config": _EMBEDDER if kind == "gemma4_unified" else {**_VISION, **clips},
    }


def draw_buffers(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw what the library keeps in buffers: limits of linear layers, and the shift and scale of outputs."""
    for name, buffer in model.named_buffers():
        last = name.rpartition(".")[2]
        if last in ("input_min", "output_min", "input_max", "output_max"):
            sign = -1.0 if last.endswith("min") else 1.0
            buffer.copy_(sign * (1.0 + torch.rand((), generator=generator)))
        elif last == "std_bias":
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=generator))
        elif last == "std_scale":
            buffer.copy_(1.0 + 0.2 * torch.randn(buffer.shape, generator=generator))


class GemmaProcessor:
    """The library's image processor of a config. It makes the inputs of the 12B of those of the others."""

    def __init__(self, config: dict[str, Any], fields: dict[str, Any]) -> None:
        self._is_unified = config["model_type"] == "gemma4_unified"
        self._processor = Gemma4ImageProcessorPil(**{k: v for k, v in fields.items() if k != "image_processor_type"})
        self.before = config["boi_token_id"]
        self.behind = config["eoi_token_id"]

    def grid(self, image: Image.Image) -> tuple[int, int]:
        """Return rows and columns of an image's tokens."""
        positions = self._processor([image], return_tensors="pt")["image_position_ids"][0]
        columns, rows = (positions.max(0).values + 1).tolist()
        return rows // POOLED, columns // POOLED

    def processed(self, images: Sequence[Image.Image]) -> tuple[Tensor, Tensor]:
        """Return pixel values [images, patches, values] and positions [images, patches, 2 (column, row)]."""
        batch = self._processor(list(images), return_tensors="pt")
        values = torch.as_tensor(batch["pixel_values"]).float()
        positions = torch.as_tensor(batch["image_position_ids"])
        if not self._is_unified:
            return values, positions
        merged = torch.zeros(len(images), MOST_TOKENS, POOLED * POOLED * values.shape[-1])
        places = torch.full((len(images), MOST_TOKENS, 2), -1)
        for number, image in enumerate(images):
            rows, columns = self.grid(image)
            count = rows * columns
            patches = values[number, : count * POOLED**2].view(rows, POOLED, columns, POOLED, PATCH, PATCH, 3)
            merged[number, :count] = patches.permute(0, 2, 1, 4, 3, 5, 6).reshape(count, -1)
            places[number, :count, 0] = torch.arange(columns).repeat(rows)
            places[number, :count, 1] = torch.arange(rows).repeat_interleave(columns)
        return merged, places
