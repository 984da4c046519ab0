"""The remedy for weights in GGUF, which are not read: a command that writes them as safetensors."""

from __future__ import annotations

from pathlib import Path


def conversion(file: Path) -> str:
    """Return a command that writes a GGUF file as a checkpoint beside it, using transformers and the package gguf."""
    directory, name, target = (repr(str(path)) for path in (file.parent, file.name, file.with_suffix("")))
    script = (
        "from transformers import AutoModelForCausalLM as M, AutoTokenizer as T, GgufConfig as G; "
        f"d, f, to = {directory}, {name}, {target}; "
        "m = M.from_pretrained(d, gguf_file=f, dtype='bfloat16', quantization_config=G(dequantize=True)); "
        "m.save_pretrained(to); "
        "T.from_pretrained(d, gguf_file=f).save_pretrained(to)"
    )
    return f'GGUF is not read; convert it: pip install gguf accelerate && python -c "{script}"'
