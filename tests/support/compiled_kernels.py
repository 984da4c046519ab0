"""Compiles kernels for Hopper, without a GPU, and prints what ``sass.py`` finds in them, a line of JSON each.

    python tests/support/compiled_kernels.py TILE_ROWS …

It must run without TRITON_INTERPRET=1, and so in a process of its own.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
import triton
from sass import count_register_products, find_overwritten
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from pdserve.model.attention_spec import AttentionSpec
from runner.kernels import tiles
from runner.kernels.attention import prefill_attention
from runner.kernels.experts import grouped_mxfp4, mxfp4_words
from runner.placement import TensorPlacement

HOPPER = GPUTarget("cuda", 90, 32)
POINTERS = {
    **dict.fromkeys(("x", "bias", "y", "q", "cache", "out", "sinks"), "*bf16"),
    **dict.fromkeys(("scales", "assignments", "experts", "page_table", "query_starts", "seq_lens"), "*i32"),
    "words": "*i16",
}
FLOATS = ("alpha", "limit", "scale", "v_scale")
LAUNCH = ("num_warps", "num_stages")


def sass_of(kernel: Any, options: dict[str, Any]) -> str:
    """Return the code of a kernel whose pointers are aligned; ``options`` are its constants and launch options."""
    constants = {name: value for name, value in options.items() if name not in LAUNCH}
    kinds = {name: "fp32" if name in FLOATS else POINTERS.get(name, "i32") for name in kernel.arg_names}
    signature = kinds | dict.fromkeys(constants, "constexpr")
    aligned = {(at,): [["tt.divisibility", 16]] for at, name in enumerate(kernel.arg_names) if name in POINTERS}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(source, target=HOPPER, options={name: options[name] for name in LAUNCH})
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        return subprocess.run([tool, "-sass", file.name], capture_output=True, text=True, check=True).stdout


def mxfp4(rows: int, gated: bool) -> str:
    sizes = {"IN": 1440, "OUT": 2880, "GATED": gated, "ROWS_PER_TOKEN": 4, "SORTED": True, "BLOCK_ROWS": rows}
    waits = grouped_mxfp4.overwrites_operands((9, 0), triton.__version__)
    sizes |= {"WAITS": waits, "WORDS": mxfp4_words.WORDS}
    return sass_of(grouped_mxfp4._grouped_mxfp4_kernel, sizes | grouped_mxfp4._options(rows, torch.bfloat16))


def attention(window: int) -> str:
    """Return the code for gpt-oss's heads, in tiles of a CPU, which are those of Hopper."""
    placement = TensorPlacement(torch.device("cpu"), torch.bfloat16, torch.bfloat16, use_triton=True)
    chosen = tiles.choose_tiles(8, 64, placement)
    spec = AttentionSpec(scale=0.125, window=window or None)
    sizes = {"KV_HEADS": 8, "GROUP": 8, "HEAD_DIM": 64, "PAGE_SIZE": 16, "WINDOW": window, "HAS_SINKS": True}
    options = sizes | {"FEW": chosen.few} | chosen.prefill_options(spec.window)
    return sass_of(prefill_attention._prefill_attention_kernel, options)


def main() -> None:
    for name in sys.argv[1:]:
        kind, _, number = name.partition(":")
        sass = attention(int(number)) if kind == "attention" else mxfp4(int(number), gated=kind == "gated")
        found = [f"{hit.write.text} after {hit.product.text}" for hit in find_overwritten(sass)]
        print(json.dumps({"kernel": name, "products": count_register_products(sass), "overwritten": found}), flush=True)


if __name__ == "__main__":
    main()
