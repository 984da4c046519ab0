"""Compiles kernels for Hopper, without a GPU, and prints the findings of ``sass.py``, a line of JSON each.

    python tests/support/compiled_kernels.py gated:TILE_ROWS plain:TILE_ROWS attention:WINDOW delta:KERNEL …
    python tests/support/compiled_kernels.py latent:KERNEL four_bits:FORM:ROWS four_bit_experts:FORM:ROWS …

It must run without TRITON_INTERPRET=1, and so in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from four_bit_weights import AWQ, MXFP4, NVFP4, channel
from sass import count_register_products, count_spills, find_overwritten
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.model.attention_spec import AttentionSpec
from runner.kernels import activation, gated_delta, gated_delta_chunks, norm, short_conv, tiles
from runner.kernels.attention import decode_attention, latents, prefill_attention
from runner.kernels.experts import grouped_mxfp4, mxfp4_words
from runner.kernels.four_bits import grouped, products
from runner.placement import TensorPlacement

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    **dict.fromkeys(("x", "bias", "y", "q", "k", "v", "cache", "out", "sinks"), "*bf16"),
    **dict.fromkeys(("mixed", "weight", "history", "ba", "gate", "w", "u", "scores"), "*bf16"),
    **dict.fromkeys(("q_rope", "latents", "keys"), "*bf16"),
    **dict.fromkeys(
        ("scales", "assignments", "experts", "page_table", "query_starts", "seq_lens", "slots", "later"), "*i32"
    ),
    **dict.fromkeys(("parts", "done", "chunks", "long_rows", "snapshots", "ends", "drafted"), "*i32"),
    **dict.fromkeys(("a_log", "dt_bias", "states", "totals", "cos", "sin", "results", "weights"), "*fp32"),
    "words": "*i16",
}
FLOATS = ("alpha", "limit", "scale", "v_scale", "eps")
LAUNCH = ("num_warps", "num_stages", "maxnreg")
SIZES = ("inputs", "outputs")  # arguments that are multiples of 16, as they are in models


def sass_of(kernel: Any, options: dict[str, Any], kinds: dict[str, str] | None = None) -> str:
    """Return the code of a kernel whose pointers and SIZES are aligned.

    ``options`` are its constants and launch options, ``kinds`` types of arguments that others have by these names.
    """
    constants = {name: value for name, value in options.items() if name not in LAUNCH}
    pointers = POINTERS | (kinds or {})
    kinds = {name: "fp32" if name in FLOATS else pointers.get(name, "i32") for name in kernel.arg_names}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    is_aligned = [kinds[name][0] == "*" or name in SIZES for name in kernel.arg_names]
    aligned = {(at,): [["tt.divisibility", 16]] for at, aligns in enumerate(is_aligned) if aligns}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source, target=HOPPER, options={name: options[name] for name in LAUNCH if name in options}
    )
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def mxfp4(rows: int, gated: bool) -> str:
    sizes = {"IN": 1440, "OUT": 2880, "GATED": gated, "ROWS_PER_TOKEN": 4, "SORTED": True, "BLOCK_ROWS": rows}
    sizes |= {"WAITS": waits(), "WORDS": mxfp4_words.WORDS}
    return sass_of(grouped_mxfp4._grouped_mxfp4_kernel, sizes | grouped_mxfp4._options(rows, torch.bfloat16))


def attention(window: int) -> str:
    """Return the code for gpt-oss's heads, in tiles of a CPU, which equal Hopper's."""
    placement = TensorPlacement(torch.device("cpu"), torch.bfloat16, torch.bfloat16, use_triton=True)
    chosen = tiles.choose_tiles(8, 64, placement)
    spec = AttentionSpec(scale=0.125, window=window or None)
    sizes = {"KV_HEADS": 8, "GROUP": 8, "HEAD_DIM": 64, "PAGE_SIZE": 16, "WINDOW": window, "HAS_SINKS": True}
    sizes |= {"ROPE_DIM": 0, "HAS_LATER": False}
    options = sizes | {"FEW": chosen.few} | chosen.prefill_options(spec.window)
    return sass_of(prefill_attention._prefill_attention_kernel, options)


def delta(name: str) -> str:
    """Return the code of a kernel of recurrent layers, for Qwen3-Next's heads or LFM2's channels."""
    heads = {"KEY_HEADS": 16, "VALUE_HEADS": 32, "KEY_DIM": 128, "VALUE_DIM": 128}
    convolve = {**heads, "CHANNELS": 8192, "WIDTH": 4, "BLOCK_DIM": 128, "ALIGNMENT": 16}
    chunks = {**heads, "BLOCK_KEY": 128, "BLOCK_VALUE": 128, "CHUNK": 64, "DOT": tl.bfloat16, "PRECISION": "tf32"}
    rule = {"BLOCK_KEY": 128, "BLOCK_VALUE": 8, "SNAPSHOTS": True, "HAS_DRAFTS": True, "HAS_OUT": True, "num_warps": 1}
    history = {"CHANNELS": 8192, "WIDTH": 4, "BLOCK": 512, "SNAPSHOTS": True, "HAS_DRAFTS": True}
    short = {"CHANNELS": 2048, "WIDTH": 3, "BLOCK": 128, "TOKENS": 16, "HAS_BIAS": True}
    kernel, options = {
        "decodes": (gated_delta._convolve_singles_kernel, convolve),
        "prompts": (gated_delta._convolve_kernel, {**convolve, "TOKENS": 16, "TILES": 4, "maxnreg": 128}),
        "history": (gated_delta._store_history_kernel, history),
        "rule": (gated_delta._delta_rule_kernel, {**heads, **rule}),
        "commit": (
            gated_delta._delta_rule_kernel,
            {**heads, **rule, "SNAPSHOTS": False, "HAS_DRAFTS": False, "HAS_OUT": False},
        ),
        "invert": (gated_delta_chunks._invert_kernel, {**chunks, "maxnreg": 168}),
        "advance": (gated_delta_chunks._advance_kernel, {**chunks, "TILE_VALUES": 32, "STAGES": 3}),
        "short": (short_conv._short_conv_kernel, short),
        "norm": (norm._gated_norm_kernel, {"HEADS": 32, "SIZE": 128, "BLOCK": 128, "BLOCK_HEADS": 8}),
        "sigmoid": (activation._sigmoid_and_mul_kernel, {"SIZE": 4096, "BLOCK": 1024}),
    }[name]
    return sass_of(kernel, {"num_warps": 4, "num_stages": 3, **options})


def latent(name: str) -> str:
    """Return the code of a kernel of latent attention, for DeepSeek's heads, in tiles as ``attention`` has them."""
    placement = TensorPlacement(torch.device("cpu"), torch.bfloat16, torch.bfloat16, use_triton=True)
    group, chosen = tiles.choose_latent_tiles(16, placement)
    row = {"RANK": 512, "ROPE": 64, "PAGE_SIZE": 64, "num_warps": 4, "num_stages": 3}
    attend = {"KV_HEADS": 1, "GROUP": group, "HEAD_DIM": 512, "ROPE_DIM": 64, "PAGE_SIZE": 64, "WINDOW": 0}
    attend["HAS_SINKS"] = False
    if name == "store":
        return sass_of(latents._store_latents_kernel, {"HEADS": 16, "BLOCK_HEADS": 16, **row}, {"rows": "*bf16"})
    if name == "gather":
        sizes = {"HEADS": 16, "NOPE": 128, "TILE": 128, "BLOCK": 16, "ROW_CHUNK": 256, **row}
        return sass_of(latents._gather_latents_kernel, sizes)
    if name == "prefill":
        return sass_of(
            prefill_attention._prefill_attention_kernel,
            {**attend, "HAS_LATER": False, "FEW": chosen.few, **chosen.prefill},
        )
    options = {**attend, "SEVERAL": name == "several", "PDL": True}
    return sass_of(
        decode_attention._decode_attention_kernel, options | (chosen.several if name == "several" else chosen.decode)
    )


FOUR_BITS = {"nvfp4": NVFP4, "mxfp4": MXFP4, "awq": AWQ, "int4": AWQ._replace(group=32), "channel": channel(4096)}
FOUR_BIT_POINTERS = {"zeros": "*i32", "output_scales": "*fp32", "parts": "*fp32", "arrived": "*i32"}


def four_bits(name: str) -> str:
    """Return the code of products with 4-bit weights, of 4,096 inputs and outputs."""
    form_name, _, rows = name.partition(":")
    form = FOUR_BITS[form_name]
    tiles = products.choose_tiles(int(rows), 4096, 4096, form, torch.bfloat16, processors=132)
    assert tiles is not None
    options = products.kernel_options(form, 4096, torch.bfloat16, tiles)
    options |= {"WAITS": waits(), "HAS_BIAS": True, "PDL": int(rows) == 1}
    return sass_of(products._product_kernel, options, FOUR_BIT_POINTERS)


def four_bit_experts(name: str) -> str:
    """Return the code of products with experts of 4-bit weights, in tiles of a number of rows; 0: unsorted."""
    form, _, rows = name.partition(":")
    tile_rows = int(rows) or 8
    is_sorted = rows != "0"
    tiles = grouped.choose_tiles(tile_rows, is_sorted, torch.bfloat16)
    options = grouped.kernel_options(FOUR_BITS[form], 4096, torch.bfloat16, tiles)
    options |= {"WAITS": waits(), "HAS_BIAS": True, "SORTED": is_sorted, "BLOCK_ROWS": tile_rows}
    return sass_of(grouped._grouped_kernel, options, FOUR_BIT_POINTERS)


def waits() -> bool:
    return grouped_mxfp4.overwrites_operands((9, 0), triton.__version__)


def code_of(kind: str, variant: str) -> str:
    if kind in ("four_bits", "four_bit_experts"):
        return four_bits(variant) if kind == "four_bits" else four_bit_experts(variant)
    if kind in ("delta", "latent"):
        return delta(variant) if kind == "delta" else latent(variant)
    return attention(int(variant)) if kind == "attention" else mxfp4(int(variant), gated=kind == "gated")


def main() -> None:
    for name in sys.argv[1:]:
        kind, _, variant = name.partition(":")
        begin = time.monotonic()
        sass = code_of(kind, variant)
        seconds = round(time.monotonic() - begin, 2)  # to compile, unless Triton's cache has the kernel
        overwritten = [f"{hit.write.text} after {hit.product.text}" for hit in find_overwritten(sass)]
        results = {"kernel": name, "products": count_register_products(sass), "overwritten": overwritten}
        print(json.dumps({**results, "spilled": count_spills(sass), "seconds": seconds}), flush=True)


if __name__ == "__main__":
    main()
